"""The gradients of `mla_up`'s weights in main_grad, by the contract of `kernels.main_grad`."""

import pytest
import torch
from test_mla_up import WEIGHTS, draw, rounds_to_nearest, slow, with_leaves  # noqa: F401

from megacpp_mcore.kernels.mla_rope import RotaryTable
from megacpp_mcore.kernels.mla_up import mla_up, triton

pytestmark = [slow, pytest.mark.usefixtures("rounds_to_nearest")]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "strided"])
def test_gradients_are_added_to_main_grad(kind):
    """Before they are rounded, whatever main_grad is; autograd gets what nobody reads."""
    arguments = with_leaves(draw(40, 2, heads=5, dtype=torch.bfloat16))
    for name in WEIGHTS:
        weight = arguments[name]
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        weight.main_grad = torch.ones(weight.shape, dtype=dtype)
        if kind == "strided":
            weight.main_grad = torch.ones(weight.shape[::-1]).t()
        weight.grad_added_to_main_grad = False
    wide = with_leaves({n: x.double() if isinstance(x, torch.Tensor) else x
                        for n, x in arguments.items()})  # fmt: skip
    wide["rotary"] = RotaryTable(*(x.double() for x in arguments["rotary"]))
    outputs = triton.mla_up(**arguments, into_main_grad=True)
    expected = mla_up(**wide)
    along = [torch.randn_like(y) for y in outputs]
    for _ in range(2):
        torch.autograd.backward(outputs, along, retain_graph=True)
    torch.autograd.backward(expected, [x.double() for x in along])
    for name in WEIGHTS:
        weight, gradient = arguments[name], wide[name].grad
        assert weight.grad_added_to_main_grad
        off = (weight.main_grad.double() - 1 - 2 * gradient).abs().max() / gradient.abs().max()
        # Operands are rounded once, to half of 2^-8 of each; main_grad after each of two sums.
        assert off <= 2**-7 + 4 * torch.finfo(weight.main_grad.dtype).eps
    for name in ("q_latent", "kv_latent", "k_pos"):
        gradient = 2 * wide[name].grad
        off = (arguments[name].grad.double() - gradient).abs().max() / gradient.abs().max()
        assert off <= 2**-6


def test_main_grad_and_returned_gradients_are_the_same_sums():
    """What is returned is what is added, rounded; without a main_grad, or with one weight's alone,
    gradients are returned; a frozen weight gets none."""
    found = []
    for into in ("both", "one", "none", "frozen"):
        torch.manual_seed(3)
        arguments = with_leaves(draw(20, 2, heads=5, dtype=torch.bfloat16))
        weights = [arguments[name] for name in WEIGHTS]
        for weight in weights[: {"both": 2, "frozen": 2, "one": 1, "none": 0}[into]]:
            weight.main_grad = torch.zeros(weight.shape)
            weight.zero_out_wgrad = True
        if into == "frozen":
            weights[1].requires_grad_(False)
        outputs = triton.mla_up(**arguments, into_main_grad=True)
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
        if into == "frozen":
            assert weights[1].grad is None and not weights[1].main_grad.any()
            assert not weights[0].grad.any() and weights[0].main_grad.any()
        else:
            there = [w.main_grad if into == "both" else w.grad for w in weights]
            if into == "both":
                assert not any(w.grad.any() for w in weights)
                assert not any(torch.equal(x, x.bfloat16().float()) for x in there)
            found.append([x.bfloat16() for x in there])
    for values in found[1:]:
        for one, other in zip(found[0], values, strict=True):
            assert torch.equal(one, other)
