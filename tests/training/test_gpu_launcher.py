"""What `megacpp train --gpus N` hands to its ranks."""

import pytest

from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.training.gpu import launcher
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
