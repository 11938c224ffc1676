"""Calls of the CUDA runtime that wait for the GPU, counted in a profile of torch.profiler."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch.autograd import DeviceType

WAITING = frozenset(
    {
        "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy",
        "cudaMemcpy2D", "cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize",
    }
)  # fmt: skip


def waits_inside(events: Iterable[Any], span: str) -> dict[str, int]:
    """Of `profile.events()`: the waiting calls between beginning and end of every range that
    `record_function(span)` made, by name. Those of the profiler itself lie outside. A range's time
    is the host's: the profile also has one of its kernels, which a GPU that is late runs later.

    Raises ValueError where there is no such range: nothing would be counted.
    """
    events = list(events)
    spans = [
        event.time_range
        for event in events
        if event.name == span and event.device_type == DeviceType.CPU
    ]
    if not spans:
        raise ValueError(f"the profile has no range {span!r}")
    found = (
        event.name
        for event in events
        if event.name in WAITING
        and any(one.start <= event.time_range.start <= one.end for one in spans)
    )
    return dict(Counter(found))
