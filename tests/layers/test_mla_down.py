"""MLA's two down projections in one product: values, gradients and main_grad."""

from types import SimpleNamespace

import pytest
import torch

from megacpp_mcore.layers import mla_down

TOKENS, HIDDEN, Q, KV = 37, 24, 5, 7
CONFIG = SimpleNamespace(fp8=None, fp4=None)


def linears(dtype, accumulates=False):
    """Two linears, and how Transformer Engine's say that they add gradients to main_grad."""
    modules = [torch.nn.Linear(HIDDEN, rows, bias=False, dtype=dtype) for rows in (Q, KV)]
    for module in modules:
        module.fuse_wgrad_accumulation = accumulates
    return modules


def gradients(modules, x, directions):
    """Outputs and gradients of two linears one after the other, in float64."""
    x = x.double().requires_grad_()
    weights = [m.weight.detach().double().requires_grad_() for m in modules]
    outputs = [x @ w.t() for w in weights]
    torch.autograd.backward(outputs, [d.double() for d in directions])
    return [*(y.detach() for y in outputs), x.grad, *(w.grad for w in weights)]


def close(found, expected, dtype, terms):
    """One rounding to dtype, and sums of `terms` products in float32 or wider, in any order."""
    sums = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * terms
    bound = (torch.finfo(dtype).eps + sums) * expected.abs().max()
    assert (found.double() - expected).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("accumulates", [False, True])
def test_one_product_is_two(dtype, accumulates):
    modules = linears(dtype, accumulates)
    x = torch.randn(TOKENS, 2, HIDDEN, dtype=dtype, requires_grad=True)
    directions = [torch.randn(TOKENS, 2, rows, dtype=dtype) for rows in (Q, KV)]
    outputs = mla_down.one_product(*modules, x)
    torch.autograd.backward(outputs, directions)
    found = [*outputs, x.grad, *(m.weight.grad for m in modules)]
    expected = gradients(modules, x.detach(), directions)
    for values, wanted in zip(found, expected, strict=True):
        close(values, wanted, dtype, 2 * TOKENS)


def test_gradients_add_up_in_main_grad_unrounded():
    modules = linears(torch.bfloat16, accumulates=True)
    for module in modules:
        module.weight.main_grad = torch.ones(module.weight.shape)
        module.weight.grad_added_to_main_grad = False
    expected = [torch.ones(rows, HIDDEN, dtype=torch.float64) for rows in (Q, KV)]
    for _ in range(3):
        x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
        directions = [torch.randn(TOKENS, rows, dtype=torch.bfloat16) for rows in (Q, KV)]
        torch.autograd.backward(mla_down.one_product(*modules, x), directions)
        for total, one in zip(expected, gradients(modules, x, directions)[3:], strict=True):
            total += one
    for module, wanted in zip(modules, expected, strict=True):
        assert module.weight.grad_added_to_main_grad
        close(module.weight.main_grad, wanted, torch.float32, 3 * TOKENS)


def test_only_plain_linears_of_whole_weights():
    modules = linears(torch.float32)
    assert mla_down.can_be_one(CONFIG, *modules, Q + KV)
    assert not mla_down.can_be_one(CONFIG, *modules, 2 * (Q + KV))  # one rank's half of the weights
    assert not mla_down.can_be_one(SimpleNamespace(fp8="hybrid", fp4=None), *modules, Q + KV)
    modules[1].bias = torch.nn.Parameter(torch.zeros(KV))
    assert not mla_down.can_be_one(CONFIG, *modules, Q + KV)
