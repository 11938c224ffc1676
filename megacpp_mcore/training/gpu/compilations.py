"""What this process has compiled and captured: how often, how long, how many bytes, and its
release."""

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SLOWEST = 5  # kernels that a receipt names
_WHOLE = "_compile.compile_inner"  # torch.compile's name of a graph, from bytecode to machine code


@functools.cache
def _triton() -> list[tuple[str, float]]:
    """The Triton kernels compiled since the first call, each with its seconds; a kernel read from
    a cache is none.

    Takes Triton's one listener, and calls the listener that was there before.
    """
    import triton

    compiled, earlier = [], triton.knobs.compilation.listener

    def listen(*, src: Any, times: Any, cache_hit: bool, **more: Any) -> None:
        if not cache_hit:
            compiled.append((src.name, times.total / 1e6))
        if earlier:
            earlier(src=src, times=times, cache_hit=cache_hit, **more)

    triton.knobs.compilation.listener = listen
    return compiled


def triton_cache_entries() -> int:
    """In Triton's cache: with 0 this process will compile every kernel."""
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    return len(os.listdir(cache)) if cache.is_dir() else 0


def compilations() -> int:
    """Triton kernels compiled, torch.compile's graphs made, and CUDA graphs of a step captured.

    The first call begins to count Triton's.
    """
    import torch

    return (
        len(_triton())
        + torch._dynamo.utils.counters["stats"]["unique_graphs"]
        + sum(graph is not None for graph in _steps())
    )


def compile_times() -> dict[str, int | float | str]:
    """Where this process's time of compilation went, as results of its receipt: Triton's kernels,
    the slowest of them, and torch.compile, Triton's time within it included.

    The kernels that torch.compile's own workers compile are in its time alone; what others compile
    (FlashAttention-4, cuDNN's searches) is in the first step's alone.
    """
    from torch._dynamo.utils import compilation_time_metrics

    kernels = sorted(_triton(), key=lambda kernel: -kernel[1])
    found = {
        "triton_kernels_compiled": len(kernels),
        "triton_compile_s": round(sum(seconds for _, seconds in kernels), 3),
        "torch_compile_s": round(sum(compilation_time_metrics.get(_WHOLE, ())), 3),
    }
    if kernels:
        slowest = (f"{name} {seconds:.1f} s" for name, seconds in kernels[:_SLOWEST])
        found["slowest_kernels_compiled"] = ", ".join(slowest)
    return found


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
