"""What `megacpp train --gpus N` hands to its ranks, and what it says of their end."""

import os
from types import SimpleNamespace

import pytest

from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.training import heartbeat
from megacpp_mcore.training.gpu import launcher, torchrun
from megacpp_mcore.training.gpu.torchrun import RanksOutcome


@pytest.fixture
def started(monkeypatch):
    """The words of the ranks, which are not started."""
    words = []

    def run_ranks(module, argv, gpus):
        words.extend(argv)
        return RanksOutcome(0)

    monkeypatch.setattr(launcher, "run_ranks", run_ranks)
    monkeypatch.setattr(launcher, "check_packages", lambda recipe, yardstick: None)
    monkeypatch.setattr(launcher, "_check", lambda recipe, gpus, resume: None)
    return words


@pytest.mark.parametrize("yardstick", [False, True])
def test_the_yardstick_has_m_in_the_place_of_r(started, yardstick):
    launcher.launch_ranks("nam56r", (), 1, "out", yardstick=yardstick)
    pattern = started[started.index("--hybrid-layer-pattern") + 1]
    ours = load_recipe("nam56r").plan.megatron_pattern
    assert "G" in ours and pattern == (ours.replace("G", "M") if yardstick else ours)
    assert ("--megacpp-yardstick" in started) is yardstick


@pytest.fixture
def failed(tmp_path):
    """failed(exitcode, said): a rank's failure as torchrun's agent tells it, each later."""
    clock = iter(range(1, 100))

    def make(exitcode: int, said: str | None = None) -> SimpleNamespace:
        at = next(clock)
        file = tmp_path / f"{at}.json"
        if said is not None:
            file.touch()
            os.utime(file, (at, at))
        return SimpleNamespace(exitcode=exitcode, error_file=str(file), timestamp=at, message=said)

    return make


def test_the_rank_that_a_heartbeat_names_is_the_reason(failed):
    """The agent ends a stopped rank with SIGKILL, as it does not heed SIGTERM."""
    named = "HungError: rank 1 on a has made no progress for 31 s"
    stopped = {1: failed(-9), 0: failed(heartbeat.EXIT_STATUS, named)}
    assert torchrun._outcome(stopped, 2) == RanksOutcome(75, f"rank 0 of 2 failed: {named}")
    killed = {0: failed(1, "RuntimeError: Connection closed"), 1: failed(-9)}
    assert torchrun._outcome(killed, 2).reason.startswith("rank 1 of 2 was killed by SIGKILL")


def test_a_rank_that_ends_only_by_sigkill_after_another_failed_is_not_the_reason(failed):
    refused, late = failed(2, "ResumeError: a.distcp is damaged"), failed(-9)
    late.timestamp += torchrun.GRACE_S
    for ranks in ({0: refused, 1: late}, {0: late, 1: refused}):
        assert torchrun._outcome(ranks, 2) == RanksOutcome(
            2, f"rank {0 if ranks[0] is refused else 1} of 2 failed: {refused.message}"
        )


def test_a_refusal_keeps_its_status_when_the_agent_ends_the_rank_that_was_first(failed):
    differ = "DispatchError: ranks chose different backends"
    for codes in ((-15, 2), (2, -15), (-6, 2), (2, 2)):
        ranks = {rank: failed(code, differ) for rank, code in enumerate(codes)}
        assert torchrun._outcome(ranks, 2) == RanksOutcome(2, f"rank 0 of 2 failed: {differ}")
    assert torchrun._outcome({0: failed(-6, differ)}, 2).status == 1
