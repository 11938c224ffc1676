"""Waits are counted inside the range that is asked for, and a step that may not wait is guarded."""

import json
from types import SimpleNamespace

import no_sync_rank
import pytest
import torch
from synchronisations import waits_inside
from torch.autograd import DeviceType


def event(name: str, start: int, end: int, device: DeviceType = DeviceType.CPU) -> SimpleNamespace:
    time_range = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=time_range, device_type=device)


PROFILE = [
    event("cudaDeviceSynchronize", 1, 2),  # of the profiler's start
    event("a step", 10, 20),
    event("cudaLaunchKernel", 11, 12),
    event("cudaMemcpyAsync", 12, 13),
    event("cudaStreamWaitEvent", 13, 14),
    event("cudaStreamSynchronize", 14, 15),
    event("cudaStreamSynchronize", 19, 25),
    event("a step", 18, 35, DeviceType.CUDA),  # its kernels end while the host reads
    event("a read", 30, 40),
    event("cudaEventSynchronize", 31, 39),
    event("cudaDeviceSynchronize", 50, 51),
]


def test_waits_are_those_that_begin_inside():
    assert waits_inside(PROFILE, "a step") == {"cudaStreamSynchronize": 2}
    assert waits_inside(iter(PROFILE), "a read") == {"cudaEventSynchronize": 1}
    assert waits_inside([event("a step", 0, 5)], "a step") == {}
    with pytest.raises(ValueError, match="no range 'another'"):
        waits_inside(PROFILE, "another")


def test_a_profile_of_torch_has_the_range():
    """The names and times that the count takes are those of this torch."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with (
        torch.profiler.profile(activities=[cpu]) as profiler,
        torch.profiler.record_function("a step"),
    ):
        torch.ones(3).sum()
    assert waits_inside(profiler.events(), "a step") == {}


def test_a_step_is_guarded_from_the_fifth_on(monkeypatch):
    modes, seen = ["default"], []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def step(fails: bool = False) -> str:
        seen.append(modes[-1])
        if fails:
            raise RuntimeError("called a synchronizing CUDA operation")
        return "done"

    guarded = no_sync_rank.guarded(step)
    assert [guarded() for _ in range(5)] == ["done"] * 5
    with pytest.raises(RuntimeError):
        guarded(fails=True)
    assert seen == ["default"] * 4 + ["error"] * 2 and modes[-1] == "default"


def test_the_seventh_step_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(no_sync_rank, "profiled", lambda step: (step(), {"step": {}, "read": {}}))
    path = tmp_path / "waits-0.json"
    steps = no_sync_rank.counted(lambda number: number, path)
    for number in range(1, 9):
        assert steps(number) == number
        assert path.exists() == (number >= 7)
    assert json.loads(path.read_text()) == {"step": {}, "read": {}}
