"""The router's gating product: admission of every backend, and its gradient's parts."""

import admission
import pytest
import torch

from megacpp_mcore.kernels.router_gating import fp32_output
from megacpp_mcore.kernels.router_gating.fp32_output import RouterGatingError, router_gating

test_admission = admission.suite("router_gating", beyond_dispatch=("fp32_output",))


def test_three_bf16_parts_are_the_gradient_to_the_bit():
    wide = torch.randn(64, 16) * torch.logspace(-20, 20, 16)
    parts = fp32_output._bf16_parts(wide).view(64, 3, 16).double()
    assert torch.equal(parts.sum(1), wide.double())


def test_a_gradient_of_infinity_shows():
    wide = torch.tensor([[float("inf"), 1.0]])
    assert not fp32_output._bf16_parts(wide).isfinite().all()


@pytest.mark.parametrize("wrong", ["x", "weight"])
def test_another_dtype_is_refused(wrong):
    tensors = {"x": torch.ones(2, 8).bfloat16(), "weight": torch.ones(8, 8).bfloat16()}
    tensors[wrong] = tensors[wrong].float()
    with pytest.raises(RouterGatingError, match=r"both must be torch\.bfloat16"):
        router_gating(**tensors)
