"""Calls without a pause, on a GPU of this test's own making: its calls take time and energy."""

import itertools
import time

import pytest

from megacpp_mcore.bench import sustained
from megacpp_mcore.bench.clock import Clock
from megacpp_mcore.receipts.power import Reading


class FakeGpu(Clock):
    """A call takes half a second; 700 W in it, and 100 W in the quarter of a second before it."""

    device = "cuda"

    def __init__(self):
        self.now, self.joules, self.calls = 0.0, 9e9, []

    def call(self, name, seconds, watts):
        self.calls.append(name)
        self.now += seconds
        self.joules += watts * seconds


@pytest.fixture
def gpu(monkeypatch):
    gpu = FakeGpu()
    monkeypatch.setattr(time, "perf_counter", lambda: gpu.now)
    meter = type("Meter", (), {"read": lambda self: Reading(gpu.joules, None)})
    monkeypatch.setattr(sustained, "PowerMeter", meter)
    return gpu


def test_a_call_has_its_time_and_energy_without_those_of_heating(gpu):
    def hot(turn):  # slower once the card is hot, as it has been asked for
        gpu.call("hot", 0.004 if turn < 50 else 0.005, 700)

    def cool(turn):
        gpu.call("cool", 0.004, 350)

    found = sustained.sustained(gpu, {"hot": hot, "cool": cool}, {"hot": 4.0, "cool": 4.0})
    # 250 ms of calls to heat, then 750: 188 calls, the first 50 of them faster
    assert found["hot"]["sustained_ms"] == pytest.approx((50 * 4 + 138 * 5) / 188)
    assert found["hot"]["joules"] == pytest.approx(0.7 * (50 * 4 + 138 * 5) / 188, rel=1e-3)
    assert found["cool"] == {
        "sustained_ms": pytest.approx(4.0), "joules": pytest.approx(1.4, rel=1e-3),
    }  # fmt: skip
    assert [name for name, _ in itertools.groupby(gpu.calls)] == ["hot", "cool", "hot", "cool"]


def test_a_cpu_has_none():
    assert sustained.sustained(Clock(), {"a": lambda turn: 1 / 0}, {"a": 1.0}) == {}


def test_energy_that_is_not_counted_is_none(gpu, monkeypatch):
    meter = type("Meter", (), {"read": lambda self: Reading(None, None)})
    monkeypatch.setattr(sustained, "PowerMeter", meter)
    found = sustained.sustained(gpu, {"a": lambda turn: gpu.call("a", 0.1, 1)}, {"a": 100.0})
    assert found["a"] == {"sustained_ms": pytest.approx(100.0), "joules": None}
