"""Calls without a pause, on a GPU of this test's own making: its calls take time and energy."""

import itertools
import time

import pytest

from megacpp_mcore.bench import sustained
from megacpp_mcore.bench.clock import Clock
from megacpp_mcore.receipts.power import Reading

WATTS = {"hot": 700.0, "cool": 350.0, "nothing": 100.0}


class FakeGpu(Clock):
    """What was called last says its power; the counter of energy is brought up to date, like
    NVML's, every 20 ms only."""

    device = "cuda"

    def __init__(self):
        self.calls, self.joules, self.shown = [], 9e9, 9e9
        self.now = self.updated = time.perf_counter()

    def call(self, name, seconds):
        self.calls.append(name)
        self.settle()
        time.sleep(seconds)
        self.settle()

    def settle(self):
        now = time.perf_counter()
        self.joules += WATTS[self.calls[-1] if self.calls else "nothing"] * (now - self.now)
        self.now = now

    def read(self):
        self.settle()
        if self.now - self.updated >= 0.02:
            self.shown, self.updated = self.joules, self.now
        return Reading(self.shown, None)


@pytest.fixture
def gpu(monkeypatch):
    gpu = FakeGpu()
    monkeypatch.setattr(sustained, "PowerMeter", lambda: gpu)
    monkeypatch.setattr(sustained, "_HEATED_S", 0.06)
    monkeypatch.setattr(sustained, "_MEASURED_S", 0.3)
    return gpu


def test_a_call_has_its_time_and_energy_without_those_of_heating(gpu):
    # slower once the GPU is hot, as the calls of heating are not
    calls = {"hot": lambda turn: gpu.call("hot", 0.002 if len(gpu.calls) < 30 else 0.004),
             "cool": lambda turn: gpu.call("cool", 0.002)}  # fmt: skip
    found = sustained.sustained(gpu, calls, {"hot": 2.0, "cool": 2.0})
    assert [name for name, _ in itertools.groupby(gpu.calls)] == ["hot", "cool", "hot", "cool"]
    assert gpu.calls.count("hot") == gpu.calls.count("cool") == 2 * (30 + 150)
    assert found["hot"]["sustained_ms"] >= 4.0 and found["cool"]["sustained_ms"] >= 2.0
    for name, watts in (("hot", 700), ("cool", 350)):
        joules = watts * found[name]["sustained_ms"] / 1000
        assert found[name]["joules"] == pytest.approx(joules, rel=0.01)


def test_a_cpu_has_none():
    assert sustained.sustained(Clock(), {"a": lambda turn: 1 / 0}, {"a": 1.0}) == {}


@pytest.mark.parametrize("joules", [None, 5.0])
def test_energy_that_is_not_counted_is_none(gpu, monkeypatch, joules):
    monkeypatch.setattr(gpu, "read", lambda: Reading(joules, None))
    found = sustained.sustained(gpu, {"hot": lambda turn: gpu.call("hot", 0.02)}, {"hot": 20.0})
    assert found["hot"]["joules"] is None and found["hot"]["sustained_ms"] >= 20
