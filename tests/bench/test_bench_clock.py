"""The bench's clocks: calls that take turns, times on the host and on a device, floors."""

import gc
import itertools
import time

import pytest
import torch

from megacpp_mcore.bench import clock as clocks


class FakeClock(clocks.Clock):
    """A call takes as long as it says; what was asked is kept."""

    device = "cpu"

    def __init__(self):
        self.taken = []

    def wait(self):
        pass

    def cold(self, call):
        return call()

    def sample(self, call):
        milliseconds = call()
        self.taken.append(milliseconds)
        return milliseconds


class TestTurns:
    def test_calls_take_turns_and_slow_ones_fewer(self):
        clock = FakeClock()
        samples = clocks.interleave(clock, {"a": lambda turn: 10.0, "b": lambda turn: 40.0}, 0.8)
        assert {name: len(taken.ms) for name, taken in samples.items()} == {"a": 40, "b": 10}
        # b comes every fourth round, before or after the a of that round
        rounds = [clock.taken[start : start + 5] for start in range(0, 50, 5)]
        assert all(taken.count(40.0) == 1 for taken in rounds)
        assert {taken.index(40.0) for taken in rounds} == {0, 1}
        assert samples["a"].rounds == [*range(40)] and samples["b"].rounds == [*range(0, 40, 4)]

    def test_calls_meet_in_as_many_rounds_as_the_slower_one_is_in(self):
        calls = {
            name: lambda turn, ms=ms: ms for name, ms in (("a", 19.0), ("b", 24.0), ("c", 90.0))
        }
        taken = clocks.interleave(FakeClock(), calls, 2.0)
        a, b, c = (taken[name].rounds for name in "abc")
        assert len(a) > len(b) > len(c) and {*c} < {*b} < {*a}
        # and evenly: no stretch of three times the mean distance is without the slowest
        assert max(after - before for before, after in itertools.pairwise(c)) < 3 * len(a) / len(c)

    def test_never_fewer_than_a_comparison_needs_nor_more_than_enough(self):
        calls = {"slow": lambda turn: 1e6, "fast": lambda turn: 1e-6}
        samples = clocks.interleave(FakeClock(), calls, 1.0)
        assert {n: len(s.ms) for n, s in samples.items()} == {
            "slow": clocks.FEWEST, "fast": clocks.MOST,
        }  # fmt: skip

    def test_inputs_rotate_and_the_first_calls_are_not_samples(self):
        turns = []
        clocks.interleave(FakeClock(), {"a": lambda turn: turns.append(turn) or 200.0}, 1.0)
        assert turns[:2] == [0, 1]
        assert turns[2:] == [1, 2, 3, 4, 5]

    def test_the_hosts_clock_measures(self):
        clock = clocks.clock_for("cpu")
        assert 9 < clock.sample(lambda: time.sleep(0.01)) < 100
        assert clock.peak_memory_bytes(lambda: None) is None

    def test_cuda_events_stand_behind_a_pause_as_long_as_the_host_needs(self, monkeypatch):
        """The queue, as the device would see it."""
        queue, host_s = [], 0.004

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                queue.append("event")

            def elapsed_time(self, end):
                return 1.25

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: queue.append("wait"))
        monkeypatch.setattr(torch.cuda, "_sleep", queue.append)
        clock = clocks.clock_for("cuda")

        def call():
            queue.append("call")
            time.sleep(host_s)

        assert clock.sample(call) == clock.sample(call) == 1.25
        waits = [index for index, entry in enumerate(queue) if entry == "wait"]
        first, second = queue[: waits[1] + 1], queue[waits[1] + 1 :]
        for order, at_least_ms in ((first, 1.0), (second, 1.5 * host_s * 1000)):
            kinds = [entry if isinstance(entry, str) else "pause" for entry in order]
            assert kinds == ["wait", "pause", "event", "call", "event", "wait"]
            assert order[1] >= at_least_ms * 2e6

    def test_memory_of_a_call_does_not_depend_on_what_was_before(self, monkeypatch):
        """Neither on garbage, nor on what a first call leaves behind."""
        memory = {"now": 0, "most": 0}

        class Block:
            def __init__(self, size):
                self.itself, self.size = self, size  # only the garbage collector frees it
                memory["now"] += size
                memory["most"] = max(memory["most"], memory["now"])

            def __del__(self):
                memory["now"] -= self.size

        for name, function in {
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
            "memory_allocated": lambda: memory["now"],
            "max_memory_allocated": lambda: memory["most"],
            "reset_peak_memory_stats": lambda: memory.update(most=memory["now"]),
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

        workspace = []

        def call():
            gc.collect()
            workspace.append(None if workspace else Block(50))  # that the first call allocates
            return Block(5)

        was_on = gc.isenabled()
        gc.disable()
        try:
            Block(100)
            assert clocks.clock_for("cuda").peak_memory_bytes(call) == 5
            Block(100), workspace.clear()
            assert clocks.clock_for("cuda").kept_memory_bytes(call) == 5
        finally:
            if was_on:
                gc.enable()

    def test_the_floor_is_the_longer_of_operations_and_bytes(self):
        rates = clocks.Rates(flops_per_s=1e12, bytes_per_s=1e9)
        assert rates.floor_ms(2e9, 0) == pytest.approx(2.0)
        assert rates.floor_ms(2e9, 5e6) == pytest.approx(5.0)
        assert str(rates) == "1 TFLOP/s, copy 1 GB/s"

    def test_rates_of_this_machine(self):
        rates = clocks.measure_rates(clocks.clock_for("cpu"), torch.float32)
        assert 1e8 < rates.flops_per_s < 1e14 and 1e8 < rates.bytes_per_s < 1e12
