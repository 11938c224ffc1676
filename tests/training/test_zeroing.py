"""Gradient buffers that are zeroed only where a step's first gradient is added, on the CPU: in a
HybridModel and Megatron's data-parallel wrapper."""

import pytest
import torch
import zeroing_rank
from made_once import made_once

pytestmark = pytest.mark.slow


def outcomes_in(folder):
    folder.mkdir()
    zeroing_rank.run(folder)


@pytest.fixture(scope="module")
def outcomes():
    path = made_once("zeroing", outcomes_in)
    return {kind: zeroing_rank.found(path, kind) for kind in zeroing_rank.KINDS}


@pytest.mark.parametrize("kind", ["ours", "ours-overlap", "apart"])
def test_gradients_of_every_step_are_megatrons_to_the_bit(outcomes, kind):
    """The buffers held NaN before each step. Two micro batches: the first written, then added."""
    for found, expected in zip(
        outcomes[kind]["main_grad"], outcomes["megatron"]["main_grad"], strict=True
    ):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert gradient.any(), name
            assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("kind", ["ours", "apart"])
def test_the_experts_weights_alone_are_not_zeroed(outcomes, kind):
    found = outcomes[kind]
    assert found["buffers"] == [1, int(kind == "apart")]
    assert found["experts"] and found["spared"] == found["bytes"]
    assert found["left"] == [found["experts"]] * zeroing_rank.STEPS
    assert outcomes["megatron"]["left"] == [set()] * zeroing_rank.STEPS


def test_weights_that_no_pass_has_reached_end_as_zeros(outcomes):
    found = outcomes["idle"]
    idle = {name for name in found["experts"] if name.startswith(zeroing_rank.IDLE)}
    assert idle and idle < found["experts"] and found["due"] == []
    for step in found["main_grad"]:
        for name, gradient in step.items():
            assert bool(gradient.any()) == (not name.startswith(zeroing_rank.IDLE)), name
            assert gradient.isfinite().all()


def test_nothing_changes_where_parts_of_layers_are_captured(outcomes):
    assert outcomes["local"]["spared"] == 0
    assert outcomes["local"]["left"] == [set()] * zeroing_rank.STEPS
