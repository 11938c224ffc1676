"""A launch as of torchrun's one rank, for the tests of this folder."""

import sys
from pathlib import Path

import pytest
from launched import CACHES, NAMES, RANK, FakeLoop, arguments, megatron

from megacpp_mcore.receipts.goodput import Goodput
from megacpp_mcore.recipe import Recipe, load_recipe
from megacpp_mcore.training.gpu.rank_setup import launch


@pytest.fixture(autouse=True)
def a_rank_of_one(monkeypatch):
    """The environment torchrun makes; what a launch sets is taken back at the end."""
    for name in ("MEGACPP_RECIPE", "MEGACPP_BACKENDS", "NOTE", "OTHER", *CACHES):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["pretrain"])


@pytest.fixture
def overrides(small_recipe: Path) -> list[str]:
    """The small recipe as if for one GPU."""
    return [
        "launch.device=cuda", "launch.environment.NOTE=recipe", "launch.environment.OTHER=recipe",
        "moe.moe_grouped_gemm=true",
        "checkpoint.save_interval=null",
    ]  # fmt: skip


@pytest.fixture
def gpu_recipe(small_recipe: Path, overrides: list[str]) -> Recipe:
    return load_recipe(str(small_recipe), overrides)


@pytest.fixture
def watched(gpu_recipe, tmp_path, monkeypatch):
    """A Watch around a fake loop: (watch, loop)."""
    from megatron.training import training

    from megacpp_mcore.training.gpu.watch import Watch
    from megacpp_mcore.training.heartbeat import Heartbeat

    launched = launch(["--megacpp-out", str(tmp_path / "out"), *arguments(gpu_recipe)])
    loop = FakeLoop(training, steps=3)
    for name in NAMES:
        monkeypatch.setattr(training, name, getattr(loop, name))
    with megatron(launched) as args:
        args.iteration = 0
        yield Watch(launched, Goodput(), Heartbeat(tmp_path / "heartbeat", 0, None)), loop
