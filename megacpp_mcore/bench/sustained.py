"""What a call takes when the GPU does nothing else for a while, as it does in a training step.

Samples with pauses between them find the GPU rested, at its highest clock. A step of large products
runs at the card's power limit instead, at a lower clock: there a call takes longer, the more the
more energy it needs.
"""

import math
import time
from collections.abc import Mapping, Sequence

from megacpp_mcore.bench.clock import Call, Clock
from megacpp_mcore.receipts.power import PowerMeter

_TURNS = 2
_HEATED_S, _MEASURED_S = 0.25, 0.75  # of a turn: NVML counts energy some twenty times a second


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
            before, started = meter.read(), time.perf_counter()
            _repeat(clock, call, count)
            seconds = time.perf_counter() - started
            power = before.until(meter.read(), seconds)["power_w"]
            found[name].append((count, seconds, None if power is None else power * seconds))
    return {name: _mean(turns) for name, turns in found.items()}


def _repeat(clock: Clock, call: Call, count: int) -> None:
    for turn in range(count):
        call(turn)
    clock.wait()


def _mean(turns: Sequence[tuple[int, float, float | None]]) -> dict[str, float | None]:
    counts, seconds, joules = zip(*turns, strict=True)
    energy = None if None in joules else sum(joules) / sum(counts)
    return {"sustained_ms": 1000 * sum(seconds) / sum(counts), "joules": energy}
