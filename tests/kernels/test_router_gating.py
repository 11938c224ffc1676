"""The router's gating product: admission of every backend, and its gradient's parts."""

import admission
import pytest
import torch

from megacpp_mcore.kernels.router_gating import fp32_output, one_pass
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


@pytest.mark.parametrize(
    ("tokens", "hidden", "experts"), [(70, 96, 16), (33, 72, 8), (1, 136, 40), (40, 64, 200)]
)
def test_one_pass_is_the_definition(tokens, hidden, experts):
    """Sums in float32; a gradient is rounded to bf16 once. Logits' gradients of any size."""
    x, weight = torch.randn(tokens, 1, hidden).bfloat16(), torch.randn(experts, hidden).bfloat16()
    direction = torch.randn(tokens, 1, experts) * torch.logspace(-6, 6, experts)
    leaves = [t.requires_grad_() for t in (x, weight)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    logits = one_pass.router_gating(*leaves)
    expected = wide[0] @ wide[1].t()
    found = logits, *torch.autograd.grad(logits, leaves, direction)
    truth = expected, *torch.autograd.grad(expected, wide, direction.double())
    magnitudes = (
        wide[0].abs() @ wide[1].abs().t(),
        direction.double().abs() @ wide[1].abs(),
        direction[:, 0].double().abs().t() @ wide[0][:, 0].abs(),
    )
    # The interpreter cuts off where a GPU rounds: twice half an epsilon.
    for a, b, size, rounded in zip(found, truth, magnitudes, (0, 2, 1), strict=True):
        terms = max(tokens, hidden, 3 * experts)
        bound = rounded * torch.finfo(torch.bfloat16).eps / 2 * b.abs()
        bound = bound + terms * torch.finfo(torch.float32).eps * size
        assert ((a.double() - b).abs() <= bound).all()
