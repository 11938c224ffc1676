"""Bias-dropout-add: admission, and dropout, which no comparison of values can see."""

import admission
import pytest
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add as upstream

from megacpp_mcore.layers.residual import get_bias_dropout_add

# Where nothing is compiled Megatron's function is still Megatron's function.
test_admission = admission.suite("residual", beyond_dispatch=("megatron",))


@pytest.mark.parametrize("get", [get_bias_dropout_add, upstream])
def test_dropout_takes_its_share_of_x_and_bias_only(get):
    torch.manual_seed(0)
    x, bias = torch.full((100, 100), 2.0), torch.ones(100)
    y = get(True, False)((x, bias), torch.full((100, 100), 10.0), 0.4)
    kept = 10 + 3 / 0.6
    assert set(y.unique().tolist()) == {10.0, kept}
    # 10,000 draws: five standard deviations of a share of 0.4
    assert abs((y == 10).float().mean().item() - 0.4) < 5 * (0.4 * 0.6 / 10_000) ** 0.5
    y = get(False, False)((x, bias), torch.full((100, 100), 10.0), 0.4)
    assert (y == 13).all()


@pytest.mark.parametrize("get", [get_bias_dropout_add, upstream])
def test_a_float32_residual_stream_stays_float32(get):
    x, bias = torch.randn(4, 8).bfloat16(), torch.randn(8).bfloat16()
    residual = torch.randn(4, 8)
    y = get(True, False)((x, bias), residual, 0.0)
    assert y.dtype == torch.float32
    # One rounding of the sum to float32.
    expected = residual.double() + x.double() + bias.double()
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=3 * 2**-24 * 8)


@pytest.mark.parametrize("get", [get_bias_dropout_add, upstream])
def test_inputs_are_left_alone(get):
    x, residual = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    given = x.detach().clone(), residual.clone()
    get(True, False)((x, None), residual, 0.0)
    assert torch.equal(x, given[0]) and torch.equal(residual, given[1])
