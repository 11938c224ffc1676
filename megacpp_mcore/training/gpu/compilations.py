"""How often this process has compiled a kernel or captured a step, to tell which steps did."""

import functools
import sys


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

    captured = sys.modules.get("megatron.core.full_cuda_graph")
    graphs = captured.FullCudaGraphWrapper.cuda_graph.values() if captured else ()
    return (
        _triton()[0]
        + torch._dynamo.utils.counters["stats"]["unique_graphs"]
        + sum(graph is not None for graph in graphs)
    )


def captured_bytes() -> int:
    """Bytes of the memory pools of CUDA graphs, which serve nothing else."""
    import torch

    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0)
    )
