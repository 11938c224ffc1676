"""Taking times: cold once, then warm and interleaved, on a CPU or by CUDA's own events.

`triton.testing.do_bench` and `torch.utils.benchmark` time one call at a time. A comparison needs
what they do not have: contenders alternating, so that a drift of the machine affects all of them
alike, the samples in the order taken with the round of each, inputs that rotate, the first (cold)
call on its own, peak memory, and one way for CPU and GPU.
"""

import gc
import itertools
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

FEWEST, MOST = 5, 40  # samples; five a side are the fewest that a comparison can judge
_WARM_UP = 2
Call = Callable[[int], object]  # called with the number of the turn, to rotate its inputs


class Clock:
    """Milliseconds of one call, and its memory, on the CPU; base of the GPU's clock."""

    device = "cpu"

    def wait(self) -> None:
        """Return when the device has done all that was launched."""

    def cold(self, call: Callable[[], object]) -> float:
        """One call with all that a first one brings: host time, from an idle device to an idle."""
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        return (time.perf_counter() - start) * 1000

    def sample(self, call: Callable[[], object]) -> float:
        """One warm call."""
        return self.cold(call)

    def allocated_bytes(self) -> int:
        """Device memory in use when nothing runs; 0 on a CPU."""
        return 0

    def peak_memory_bytes(self, call: Callable[[], object]) -> int | None:
        """Most memory that a call had allocated, beyond what was before it; None if unknown."""
        return None

    def kept_memory_bytes(self, call: Callable[[], object]) -> int | None:
        """What a call's result keeps in memory, itself included; None if unknown."""
        return None


class CudaClock(Clock):
    """CUDA events around a call that the host has queued after a pause of the device.

    The pause is as long as the host needed to queue the slowest of all calls so far, so that the
    device does not wait for the host in between, as in a training step, where the host runs ahead.
    It is the same for all: a GPU that has rested is faster, and a call that makes the host wait
    would be the only one to rest.
    """

    device = "cuda"
    _CYCLES_PER_MS = 2_000_000  # at 2 GHz: an H200's boost clock is 1.98
    _LONGEST_PAUSE_MS = 20.0

    def __init__(self) -> None:
        self._host_ms: dict[int, float] = {}

    def wait(self) -> None:
        torch.cuda.synchronize()

    def sample(self, call: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.wait()
        slowest = max(self._host_ms.values(), default=1.0)
        pause = min(1.5 * max(slowest, 1.0), self._LONGEST_PAUSE_MS)
        torch.cuda._sleep(int(pause * self._CYCLES_PER_MS))
        began = time.perf_counter()
        start.record()
        call()
        end.record()
        self._host_ms[id(call)] = (time.perf_counter() - began) * 1000
        self.wait()
        return start.elapsed_time(end)

    def allocated_bytes(self) -> int:
        gc.collect()
        self.wait()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    def peak_memory_bytes(self, call: Callable[[], object]) -> int | None:
        before = self._allocated_after(call)
        torch.cuda.reset_peak_memory_stats()
        call()
        self.wait()
        return torch.cuda.max_memory_allocated() - before

    def kept_memory_bytes(self, call: Callable[[], object]) -> int | None:
        before = self._allocated_after(call)
        kept = call()
        self.wait()
        after = torch.cuda.memory_allocated()
        del kept
        return after - before

    def _allocated_after(self, call: Callable[[], object]) -> int:
        """What is in use before the next call: a first one may leave something behind, such as a
        workspace, and the next would collect garbage that was counted."""
        call()
        return self.allocated_bytes()


def clock_for(device: str) -> Clock:
    """The clock of "cpu" or "cuda"."""
    return CudaClock() if device == "cuda" else Clock()


@dataclass(frozen=True)
class Samples:
    """One call's, in the order taken. ms: warm. rounds: the round of each, growing."""

    ms: list[float]
    rounds: list[int]


def interleave(clock: Clock, calls: Mapping[str, Call], seconds: float) -> dict[str, Samples]:
    """Warm samples of every call, alternating, in about `seconds`.

    A call gets from FEWEST to MOST samples, as its share of the time allows, each in a round of its
    own; so a temporary slowdown of the machine affects them all. A round has an order of its
    own: a GPU that one call has heated is slower for the next.
    """
    wanted, turns = {}, {}
    for name, call in calls.items():
        for turn in range(_WARM_UP - 1):
            call(turn)
        took = clock.cold(lambda call=call: call(_WARM_UP - 1))
        fitting = seconds / len(calls) / (took / 1000) if took else MOST
        wanted[name] = max(FEWEST, min(MOST, math.floor(fitting)))
        numbers = itertools.count(1)
        turns[name] = lambda call=call, numbers=numbers: call(next(numbers))
    rounds = max(wanted.values(), default=0)
    samples = {name: Samples([], _rounds_of(count, rounds)) for name, count in wanted.items()}
    order = random.Random(0)
    for index in range(rounds):
        due = [name for name, taken in samples.items() if index in taken.rounds]
        for name in order.sample(due, len(due)):
            samples[name].ms.append(clock.sample(turns[name]))
    return samples


def _rounds_of(count: int, rounds: int) -> list[int]:
    """Which of `rounds` a call is in that gets `count` samples: spread over all of them, and those
    of a lower count among those of a higher one, so that calls meet as often as they can."""
    digits = max(1, (rounds - 1).bit_length())
    backwards = sorted(range(rounds), key=lambda index: f"{index:0{digits}b}"[::-1])
    return sorted(backwards[:count])


@dataclass(frozen=True)
class Rates:
    """What this device does now: FLOP/s of a large matrix product, bytes/s of a copy."""

    flops_per_s: float
    bytes_per_s: float

    def floor_ms(self, flops: float, bytes_moved: float) -> float:
        """The least time for that many operations and bytes, whichever is longer."""
        return 1000 * max(flops / self.flops_per_s, bytes_moved / self.bytes_per_s)

    def __str__(self) -> str:
        return f"{self.flops_per_s / 1e12:.3g} TFLOP/s, copy {self.bytes_per_s / 1e9:,.0f} GB/s"


def measure_rates(clock: Clock, dtype: torch.dtype) -> Rates:
    """The best of ten products and ten copies, each far larger than any cache."""
    on_gpu = clock.device == "cuda"
    size, count = (8192, 2**30) if on_gpu else (512, 2**26)
    a, b = (torch.randn(size, size, device=clock.device).to(dtype) for _ in range(2))
    source = torch.zeros(count, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    calls = {"product": lambda turn: a @ b, "copy": lambda turn: target.copy_(source)}
    best = {n: min(taken.ms) / 1000 for n, taken in interleave(clock, calls, 0.2).items()}
    return Rates(2 * size**3 / best["product"], 2 * count / best["copy"])
