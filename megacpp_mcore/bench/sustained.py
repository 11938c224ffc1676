"""What a call takes when the GPU does nothing else for a while, as it does in a training step.

Samples with pauses between them find the GPU rested, at its highest clock. A step of large products
runs at the card's power limit instead, at a lower clock: there a call takes longer, the more the
more energy it needs.
"""

import math
import threading
import time
from collections.abc import Mapping, Sequence

from megacpp_mcore.bench.clock import Call, Clock
from megacpp_mcore.receipts.power import PowerMeter

_TURNS = 2
_HEATED_S, _MEASURED_S = 0.25, 0.75  # of a turn
_POLL_S = 0.002


def sustained(
    clock: Clock, calls: Mapping[str, Call], ms: Mapping[str, float]
) -> dict[str, dict[str, float | None]]:
    """Each call again and again, in two turns of about a second: `sustained_ms`, and `joules` of
    the whole card for one call, None where NVML does not count them. {} on a CPU.

    ms: what a call takes by its samples, from which the number of calls follows.
    """
    if clock.device != "cuda":
        return {}
    meter, found = PowerMeter(), {name: [] for name in calls}
    for _ in range(_TURNS):
        for name, call in calls.items():
            _repeat(clock, call, math.ceil(1000 * _HEATED_S / ms[name]))
            count = math.ceil(1000 * _MEASURED_S / ms[name])
            with _Watts(meter) as watts:
                started = time.perf_counter()
                _repeat(clock, call, count)
                seconds = time.perf_counter() - started
            found[name].append((count, seconds, watts.mean()))
    return {name: _mean(turns) for name, turns in found.items()}


def _repeat(clock: Clock, call: Call, count: int) -> None:
    for turn in range(count):
        call(turn)
    clock.wait()


def _mean(turns: Sequence[tuple[int, float, float | None]]) -> dict[str, float | None]:
    counts, seconds, watts = zip(*turns, strict=True)
    joules = None
    if None not in watts:
        joules = sum(s * w for s, w in zip(seconds, watts, strict=True)) / sum(counts)
    return {"sustained_ms": 1000 * sum(seconds) / sum(counts), "joules": joules}


class _Watts:
    """The mean power inside the block. NVML's counter grows in steps, some ten a second: what is
    between its first and its last step here is known exactly."""

    def __init__(self, meter: PowerMeter) -> None:
        self._meter, self._steps = meter, []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def _poll(self) -> None:
        before = self._meter.read().joules
        while before is not None and not self._ended.wait(_POLL_S):
            joules = self._meter.read().joules
            if joules != before:
                self._steps.append((time.perf_counter(), joules))
                before = joules

    def __enter__(self) -> "_Watts":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def mean(self) -> float | None:
        if len(self._steps) < 2:
            return None
        (first, least), *_, (last, most) = self._steps
        return (most - least) / (last - first)
