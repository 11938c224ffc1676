"""The sum of a block's output and its residual: Megatron's bits, and none of its compilation."""

import pytest
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

from megacpp_mcore.layers import residual
from megacpp_mcore.layers.residual import get_residual_add


def tensors(dtype, residual_dtype):
    x = torch.randn(5, 2, 8, dtype=dtype, requires_grad=True)
    return x, torch.randn(5, 2, 8, dtype=residual_dtype, requires_grad=True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("dtype", "residual_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32),
     (torch.bfloat16, torch.float32)],
)  # fmt: skip
def test_values_and_gradients_are_megatrons_to_the_bit(dtype, residual_dtype, training):
    x, stream = tensors(dtype, residual_dtype)
    direction = torch.randn(x.shape).to(residual_dtype)
    found = []
    for get in (get_residual_add, get_bias_dropout_add):
        y = get(training, False)((x, None), stream, 0.0)
        found.append((y, *torch.autograd.grad(y, (x, stream), direction)))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("fused", [True, False])
def test_megatrons_is_asked_for_dropout_and_a_bias_alone(monkeypatch, fused):
    asked = []

    def theirs(*how):
        asked.append(how)
        return lambda output, stream, probability: "Megatron's"

    monkeypatch.setattr(residual, "get_bias_dropout_add", theirs)
    x, stream = tensors(torch.float32, torch.float32)
    for training, probability in ((True, 0.0), (False, 0.0), (False, 0.1)):
        y = get_residual_add(training, fused)((x, None), stream, probability)
        assert torch.equal(y, x + stream) and not asked
    assert get_residual_add(True, fused)((x, None), stream, 0.1) == "Megatron's"
    assert get_residual_add(False, fused)((x, stream[0]), stream, 0.0) == "Megatron's"
    assert asked == [(True, fused), (False, fused)]
