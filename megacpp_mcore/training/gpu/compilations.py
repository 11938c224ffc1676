"""What this process has compiled and captured: how often, how many bytes, and its release."""

import contextlib
import functools
import gc
import sys
from collections.abc import Iterator


@functools.cache
def _triton() -> list[int]:
    """The number of Triton kernels compiled, in a list of one; a kernel read from a cache is none.

    The counter takes Triton's one listener, and calls the listener that was there before.
    """
    import triton

    count, earlier = [0], triton.knobs.compilation.listener

    def listen(*, cache_hit: bool, **more) -> None:
        count[0] += not cache_hit
        if earlier:
            earlier(cache_hit=cache_hit, **more)

    triton.knobs.compilation.listener = listen
    return count


def compilations() -> int:
    """Triton kernels compiled, torch.compile's graphs made, and CUDA graphs of a step captured.

    The first call begins to count Triton's.
    """
    import torch

    return (
        _triton()[0]
        + torch._dynamo.utils.counters["stats"]["unique_graphs"]
        + sum(graph is not None for graph in _steps())
    )


def _steps() -> list:
    """Megatron's graphs of a step: of training and of validation, None before their capture."""
    module = sys.modules.get("megatron.core.full_cuda_graph")
    return list(module.FullCudaGraphWrapper.cuda_graph.values()) if module else []


@contextlib.contextmanager
def captured_steps_released() -> Iterator[None]:
    """Release Megatron's graphs of a step when the block ends, however it ends.

    A process group whose collectives are in a CUDA graph waits for the graph when it is destroyed,
    for ever: two ranks on two H200s did not end after their last step.
    """
    try:
        yield
    finally:
        if any(graph is not None for graph in _steps()):
            import torch
            from megatron.core.full_cuda_graph import FullCudaGraphWrapper

            with contextlib.suppress(RuntimeError):  # CUDA itself may no longer answer
                torch.cuda.synchronize()
                FullCudaGraphWrapper.cuda_graph = dict.fromkeys(FullCudaGraphWrapper.cuda_graph)
                FullCudaGraphWrapper.result = dict.fromkeys(FullCudaGraphWrapper.result)
                gc.collect()


def captured_bytes() -> int:
    """Bytes of the memory pools of CUDA graphs, which serve nothing else."""
    import torch

    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0)
    )
