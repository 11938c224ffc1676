"""A gradient of a gradient is right or refused: kernels have no second derivative."""

import importlib
from pathlib import Path

import pytest
import torch
from test_moe_routed import draw

import megacpp_mcore
from megacpp_mcore.kernels.backward_pass import SecondDerivativeError, no_second_derivative
from megacpp_mcore.kernels.linear_cross_entropy.reference import _Sum
from megacpp_mcore.kernels.m2rnn.reference import _ClampGradient
from megacpp_mcore.kernels.moe_experts import torch_products
from megacpp_mcore.kernels.moe_experts.fused import Experts, experts_routed, experts_sorted
from megacpp_mcore.kernels.moe_experts.grouped_mm import _DenseGradient
from megacpp_mcore.kernels.norm.triton import rms_norm
from megacpp_mcore.kernels.router_gating.fp32_output import router_gating

# Of torch's operations, or handing the gradient on as it is: autograd differentiates them again.
DIFFERENTIABLE = {_ClampGradient, _DenseGradient, _Sum}


def ours():
    """Every autograd function of the package."""
    root = Path(megacpp_mcore.__file__).parent
    for path in root.rglob("*.py"):
        if "autograd.Function)" in path.read_text():
            importlib.import_module(".".join(path.relative_to(root.parent).with_suffix("").parts))
    kinds = torch.autograd.Function.__subclasses__()
    return {kind for kind in kinds if kind.__module__.startswith("megacpp_mcore.")}


def test_every_function_says_that_it_is_differentiated_once():
    found = ours()
    assert found > DIFFERENTIABLE and len(found) >= 18
    marked = no_second_derivative(lambda ctx: None).__code__
    missing = {kind for kind in found - DIFFERENTIABLE if kind.backward.__code__ is not marked}
    assert not missing


def routed():
    leaves, chosen, _ = draw(9, 5, 2, h=8, f=4)
    experts = Experts(leaves["w1"], leaves["w2"], products=torch_products)
    return leaves["x"], experts_routed(leaves["x"], chosen, leaves["probs"], experts, 2)


def of_sorted():
    leaves, _, _ = draw(6, 3, 1, h=8, f=4)
    experts, counts = Experts(leaves["w1"], leaves["w2"]), torch.tensor([2, 0, 4])
    return leaves["x"], experts_sorted(leaves["x"], counts, torch.rand(6), experts)


def normed():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8)
    return x, rms_norm(x, weight, 1e-5)


def gated():
    x, weight = torch.randn(4, 8).bfloat16().requires_grad_(), torch.randn(2, 8).bfloat16()
    return x, router_gating(x, weight)


@pytest.mark.parametrize("of", [routed, of_sorted, normed, gated])
def test_a_second_derivative_is_refused(of):
    """Also where another part of the loss has one: the sum would be wrong, without a word."""
    x, y = of()
    loss = y.float().square().sum() + x.float().pow(3).sum()
    with pytest.raises((SecondDerivativeError, RuntimeError), match=r"no (second|autograd)"):
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        torch.autograd.grad(gradient.float().square().sum(), x)
