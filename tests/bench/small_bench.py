"""Benches of small models, with few samples, and a backend for them that is wrong."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor

from megacpp_mcore import dispatch
from megacpp_mcore.bench import clock as clocks
from megacpp_mcore.bench import layer, model, operator
from megacpp_mcore.kernels.mla_rope import unfused
from megacpp_mcore.surfaces.backend import Backend
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.support import always

SMALL = [
    "model.hidden_size=32", "model.seq_length=32", "model.num_attention_heads=4",
    "schedule.micro_batch_size=2", "schedule.global_batch_size=2", "m2rnn.k_head_dim=8",
]  # fmt: skip
WORDS = [word for override in SMALL for word in ("--set", override)]


@functools.cache
def rates_once(device, dtype):
    return clocks.measure_rates(clocks.clock_for(device), dtype)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Few samples, this machine's rates measured once, and the environment as it was."""
    monkeypatch.setattr(
        operator, "measure_rates", lambda clock, dtype: rates_once(clock.device, dtype)
    )
    monkeypatch.setattr(operator, "_SECONDS_A_PHASE", 0.01)
    monkeypatch.setattr(model, "_SECONDS_A_PHASE", 0.01)
    monkeypatch.setattr(layer, "_SECONDS_A_PHASE", 0.01)
    for name in ("MEGACPP_RECIPE", "MEGACPP_BACKENDS", "RANK", "WORLD_SIZE", "LOCAL_RANK",
                 "PET_NNODES", "PET_NPROC_PER_NODE"):  # fmt: skip
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    dispatch.forget()


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: factor * x


def gradient_times(factor: float) -> Callable[[Tensor], Tensor]:
    """The values as they are."""
    return lambda x: x + (factor - 1) * (x - x.detach())


def add_mla_rope(monkeypatch, change: Callable[[Tensor], Tensor]) -> None:
    """A backend `changed`, whose results are those of the unfused one after `change`."""

    def changed(*args, right=unfused.mla_rope, **options):
        return tuple(map(change, right(*args, **options)))

    surface = REGISTRY["mla_rope"]
    entry = Backend("changed", "megacpp_mcore.kernels.mla_rope.unfused:changed", always)
    monkeypatch.setattr(unfused, "changed", changed, raising=False)
    backends = (*surface.backends, entry)
    monkeypatch.setitem(REGISTRY, "mla_rope", replace(surface, backends=backends))
    dispatch.forget()
