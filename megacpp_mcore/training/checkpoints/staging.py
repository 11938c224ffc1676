"""A checkpoint's tensors on their way to the worker of asynchronous saves, in memory of the host.

Megatron hands the worker tensors on the GPU, by CUDA's inter-process handles: with the expandable
segments of our recipes they need rights that containers do not have (pidfd_getfd), and each worker
needs a CUDA context. Here the training process copies the tensors, for which it waits anyway, into
one anonymous file in memory. No name is left of it when a process is killed, and its size is not
that of /dev/shm.
"""

import contextlib
import math
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

_ALIGNMENT = 64  # bytes

# As Megatron's writer has it: a file's path and key, its objects, its (item, tensor) pairs.
Bucket = tuple[str, str, tuple[list[Any], list[tuple[Any, torch.Tensor]]]]
# The same without tensors, which are (item, dtype, shape, offset) in the file in memory.
_Described = tuple[str, str, tuple[list[Any], list[tuple[Any, torch.dtype, torch.Size, int]]]]


@contextlib.contextmanager
def on_the_host(buckets: Sequence[Bucket]) -> Iterator[Callable[[], list[Bucket]]]:
    """What another process calls inside the block to get `buckets`, with tensors on the CPU.

    It is pickled without their contents, and called by a process of the same user. The memory is
    freed when this block and the other process's tensors have ended. Raises OSError when there is
    not enough.
    """
    described, total = _described(buckets)
    descriptor = os.memfd_create("megacpp-save", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, total)
        place = f"/proc/{os.getpid()}/fd/{descriptor}"
        for (*_, (_, here)), (*_, (_, there)) in zip(
            buckets, _buckets_at(place, total, described), strict=True
        ):
            for (_, tensor), (_, copy) in zip(here, there, strict=True):
                copy.copy_(tensor)
        yield partial(_buckets_at, place, total, described)
    finally:
        os.close(descriptor)


def _described(buckets: Sequence[Bucket]) -> tuple[list[_Described], int]:
    """The buckets without tensors, and how many bytes those need."""
    found: list[_Described] = []
    end = 0
    for path, key, (objects, tensors) in buckets:
        places = []
        for item, tensor in tensors:
            places.append((item, tensor.dtype, tensor.shape, end))
            end += math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT
        found.append((path, key, (objects, places)))
    return found, max(end, _ALIGNMENT)


def _buckets_at(place: str, total: int, described: Sequence[_Described]) -> list[Bucket]:
    descriptor = os.open(place, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(descriptor, total)  # it lives as long as a tensor in it
    finally:
        os.close(descriptor)
    return [
        (path, key, (objects, [(item, _tensor(memory, *where)) for item, *where in places]))
        for path, key, (objects, places) in described
    ]


def _tensor(memory: mmap.mmap, dtype: torch.dtype, shape: torch.Size, offset: int) -> torch.Tensor:
    """With a storage of its own, as torch.save writes the whole storage of a view."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
