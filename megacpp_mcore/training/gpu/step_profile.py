"""Which kernels a step runs: the `profile` of a run's receipt (`megacpp train --profile STEP`).

Recorded by torch's profiler, kernels of a captured step included, and kept as sums by name: the
trace itself, hundreds of megabytes, is not written.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from megacpp_mcore.receipts.kernel_families import EXCHANGE, family

_NAME = 200  # characters of a kernel's name: a template's arguments can be thousands


class Span(NamedTuple):
    """A kernel, copy or fill on the GPU; nanoseconds of one clock."""

    name: str
    start: int
    end: int


class StepProfile:
    """Profiles step `wanted` (counted from 1, None: none). found: what was seen of it, then."""

    def __init__(self, wanted: int | None) -> None:
        self._wanted = wanted
        self.found: dict[str, Any] | None = None

    def run(self, step: int, call: Callable[[], Any]) -> Any:
        """What `call`, which is `step`, returns. The profiled one is waited for, so that all its
        kernels, and no other step's, are in the profile."""
        if step != self._wanted:
            return call()
        done, spans = recorded(call)
        self.found = {"step": step} | summary(spans)
        return done


def recorded(call: Callable[[], Any]) -> tuple[Any, list[Span]]:
    """What `call` returns, and what ran on the GPU for it."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        done = call()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()
    return done, [
        Span(event.name(), event.start_ns(), event.end_ns())
        for event in events
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
    ]


def summary(spans: Iterable[Span]) -> dict[str, Any]:
    """Milliseconds from the first kernel's start to the last one's end (span_ms), of them with a
    kernel on the GPU (busy_ms), and with one that is no collective (compute_ms); and of each name
    its launches and their sum, the longest first. Kernels may overlap: the sums may be more."""
    spans = sorted(spans, key=lambda span: span.start)
    by_name: defaultdict[str, list[int]] = defaultdict(list)
    for span in spans:
        by_name[span.name[:_NAME]].append(span.end - span.start)
    kernels = [
        {"name": name, "launches": len(times), "ms": _ms(sum(times))}
        for name, times in by_name.items()
    ]
    exchanges = {name for name in by_name if family(name) == EXCHANGE}
    compute = [span for span in spans if span.name[:_NAME] not in exchanges]
    first = spans[0].start if spans else 0
    return {
        "span_ms": _ms(max((span.end for span in spans), default=0) - first),
        "busy_ms": _ms(_covered(spans)),
        "compute_ms": _ms(_covered(compute)),
        "kernels": sorted(kernels, key=lambda kernel: -kernel["ms"]),
    }


def _covered(spans: Iterable[Span]) -> int:
    """Nanoseconds in which at least one of spans, sorted by their start, runs."""
    covered = until = 0
    for span in spans:
        covered += max(0, span.end - max(span.start, until))
        until = max(until, span.end)
    return covered


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 6)
