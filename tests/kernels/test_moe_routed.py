"""The experts from tokens to tokens: against float64, whatever the router does."""

from types import SimpleNamespace

import pytest
import torch
from admission_probes import poisoned_memory, strided
from torch.nn import functional

from megacpp_mcore.kernels.moe_experts import hopper_products, torch_products
from megacpp_mcore.kernels.moe_experts.activation import SQUARED_RELU, SWIGLU
from megacpp_mcore.kernels.moe_experts.fused import (
    Experts,
    experts_routed,
    experts_sorted,
)
from megacpp_mcore.kernels.moe_experts.readers import readers
from megacpp_mcore.kernels.moe_experts.routing import allocated, route, to_tokens

NAMES = ("x", "probs", "w1", "w2", "addend", "residual")


def padded(align):
    """torch's products for rows that are padded, as Hopper's want them."""
    return SimpleNamespace(**{**vars(torch_products), "ALIGN": align})


def draw(
    tokens, experts, topk, h=16, f=24, dtype=torch.float32, skew=0.0, dropped=0.0,
    activation=SWIGLU,
):  # fmt: skip
    """Inputs, with 90 % of the tokens on expert 0 for a skew, and without `dropped` of the pairs.

    The last of four or more experts gets nothing.
    """
    scores = torch.rand(tokens, experts)
    scores[:, 0] += (torch.rand(tokens) < skew) * 2.0
    if experts - 1 >= max(topk, 3):
        scores[:, -1] = -1.0
    chosen = torch.zeros(tokens, experts, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(topk, dim=1).indices, True)
    chosen &= torch.rand(tokens, experts) >= dropped
    values = {
        "x": torch.randn(tokens, h), "probs": torch.rand(tokens, experts) * chosen,
        "w1": torch.randn(experts, (2 if activation == SWIGLU else 1) * f, h) * h**-0.5,
        "w2": torch.randn(experts, h, f) * f**-0.5, "addend": torch.randn(tokens, h),
        "residual": torch.randn(tokens, h),
    }  # fmt: skip
    leaves = {n: v if n == "probs" else v.to(dtype) for n, v in values.items()}
    direction = torch.randn(tokens, h).to(dtype)
    return {n: v.requires_grad_() for n, v in leaves.items()}, chosen, direction


def definition(leaves, chosen, direction, activation=SWIGLU):
    """Each expert on its tokens, and the sum, in float64: output and gradients."""
    wide = {n: v.detach().double().requires_grad_() for n, v in leaves.items()}
    y = wide["addend"] + wide["residual"]
    for expert in range(chosen.shape[1]):
        t = chosen[:, expert].nonzero().flatten()
        h = wide["x"][t] @ wide["w1"][expert].t()
        if activation == SWIGLU:
            gate, up = h.chunk(2, dim=-1)
            a = functional.silu(gate) * up
        else:
            a = functional.relu(h) ** 2
        a = a * wide["probs"][t, expert, None]
        y = y.index_add(0, t, a @ wide["w2"][expert].t())
    y.backward(direction.double())
    return {"y": y.detach()} | {n: v.grad for n, v in wide.items()}


def run(leaves, chosen, direction, topk, products=torch_products, activation=SWIGLU):
    experts = Experts(leaves["w1"], leaves["w2"], products=products, activation=activation)
    x, probs, addend, residual = (leaves[n] for n in ("x", "probs", "addend", "residual"))
    y = experts_routed(x, chosen, probs, experts, topk, addend, residual)
    y.backward(direction)
    found = {"y": y.detach()} | {n: v.grad for n, v in leaves.items()}
    for value in leaves.values():
        value.grad = None
    return found


def assert_near(found, expected, dtype, terms):
    """Five roundings to the dtype forward and as many back; float32 sums of `terms` terms."""
    bound = 10 * torch.finfo(dtype).eps / 2 + terms * torch.finfo(torch.float32).eps
    for name, truth in expected.items():
        assert found[name].shape == truth.shape
        scale = truth.abs().amax() if truth.numel() else 0.0
        assert ((found[name].double() - truth).abs() <= bound * scale).all(), name


CASES = {
    "plain": {"tokens": 37, "experts": 5, "topk": 2},
    "one-token": {"tokens": 1, "experts": 4, "topk": 3},
    "one-expert": {"tokens": 9, "experts": 1, "topk": 1},
    "every-expert": {"tokens": 19, "experts": 8, "topk": 8},
    "skewed": {"tokens": 90, "experts": 6, "topk": 1, "skew": 0.9},
    "dropped": {"tokens": 40, "experts": 5, "topk": 3, "dropped": 0.4},
    "several-blocks": {"tokens": 140, "experts": 16, "topk": 4, "h": 8, "f": 8},
    "all-on-one": {"tokens": 40, "experts": 7, "topk": 1, "skew": 1.0},
    "256-experts": {"tokens": 70, "experts": 256, "topk": 8, "h": 8, "f": 8},
    "many-experts": {"tokens": 66, "experts": 100, "topk": 6, "h": 8, "f": 8},
    "odd-width": {"tokens": 21, "experts": 3, "topk": 2, "h": 24, "f": 1032},
    "empty": {"tokens": 0, "experts": 3, "topk": 2},
}


@pytest.mark.parametrize(
    ("case", "align", "activation"),
    [
        *((case, align, SWIGLU) for case in CASES for align in (1, 8)),
        *((case, 8, SQUARED_RELU) for case in ("plain", "odd-width", "empty")),
    ],
)
def test_it_is_the_definition(case, align, activation):
    sizes = CASES[case]
    leaves, chosen, direction = draw(**sizes, activation=activation)
    expected = definition(leaves, chosen, direction, activation)
    with poisoned_memory("cpu"):
        found = run(leaves, chosen, direction, sizes["topk"], padded(align), activation)
    terms = 2 * (sizes.get("h", 16) + sizes.get("f", 24) + sizes["tokens"])
    assert_near(found, expected, torch.float32, terms)


def test_in_bfloat16_with_float32_probabilities():
    leaves, chosen, direction = draw(60, 5, 2, dtype=torch.bfloat16)
    expected = definition(leaves, chosen, direction)
    found = run(leaves, chosen, direction, 2)
    assert_near(found, expected, torch.bfloat16, 200)
    assert found["y"].dtype == torch.bfloat16 and found["probs"].dtype == torch.float32


@pytest.mark.parametrize("sorted_rows", [False, True], ids=["tokens", "sorted"])
def test_a_graph_that_is_kept_gives_the_same_gradients_again(sorted_rows):
    """A last backward pass overwrites what the forward pass has kept."""
    leaves, chosen, direction = draw(33, 5, 2)
    experts = Experts(leaves["w1"], leaves["w2"])
    if sorted_rows:
        counts = torch.tensor([3, 0, 20, 6, 4])
        out = experts_sorted(leaves["x"], counts, leaves["probs"].amax(1), experts)
    else:
        out = experts_routed(leaves["x"], chosen, leaves["probs"], experts, 2)
    sources = [leaves[name] for name in ("x", "probs", "w1", "w2")]
    passes = [
        torch.autograd.grad(out, sources, direction, retain_graph=kept)
        for kept in (True, True, False)
    ]
    for gradients in zip(*passes, strict=True):
        assert all(torch.equal(gradients[0], other) for other in gradients[1:])


def test_inputs_of_any_strides():
    leaves, chosen, direction = draw(33, 5, 2)
    expected = definition(leaves, chosen, direction)
    for name in ("x", "probs", "addend", "residual"):
        leaves[name] = strided(leaves[name].detach()).requires_grad_()
    wide = torch.ones(33, 10, dtype=torch.bool)
    wide[:, ::2] = chosen
    found = run(leaves, wide[:, ::2], strided(direction), 2)
    assert_near(found, expected, torch.float32, 200)


@pytest.mark.parametrize("align", [1, 8])
def test_rows_are_sorted_by_expert_then_by_token(align):
    leaves, chosen, _ = draw(140, 7, 3)
    routing = route(chosen, leaves["probs"].detach(), 3, align)
    ends, start = routing.ends.tolist(), 0
    for expert, end in enumerate(ends):
        tokens = chosen[:, expert].nonzero().flatten()
        rows = routing.token[start:end]
        assert torch.equal(rows[: len(tokens)].long(), tokens)
        assert (rows[len(tokens) :] == -1).all() and len(rows) == -(-len(tokens) // align) * align
        probs = leaves["probs"].detach()[tokens, expert]
        assert torch.equal(routing.row_probs[start : start + len(tokens)], probs)
        start = end
    for token, rows in enumerate(routing.rows.tolist()):
        assert [int(routing.token[row]) for row in rows] == [token] * 3 and rows == sorted(rows)
    assert routing.size == allocated(140, 3, 7, align)


def test_the_same_bits_whenever_it_is_run():
    leaves, chosen, direction = draw(50, 6, 2, dtype=torch.bfloat16, skew=0.9)
    first, second = (run(leaves, chosen, direction, 2) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("wide", [True, False])
def test_readers_get_the_sum_of_all_gradients(wide):
    """And fc1's weight its own, in its main_grad or not."""
    leaves, chosen, direction = draw(37, 5, 2)
    router, shared = torch.randn(16), torch.randn(16)

    def run_with(readers_of):
        x = leaves["x"].detach().requires_grad_()
        w1, w2 = (leaves[name].detach() for name in ("w1", "w2"))
        w1.requires_grad_().main_grad = torch.zeros_like(w1)
        experts = Experts(w1, w2, wide)
        found = readers_of(x, experts)
        more = {name: getattr(found, name) for name in ("rows", "hidden")} if found else {}
        more |= {"readers": found} if found else {}
        y = experts_routed(x, chosen, leaves["probs"], experts, 2, **more)
        total = (y * direction).sum()
        total = total + ((found.router if found else x) * router).sum()
        total = total + ((found.shared if found else x) * shared).sum()
        total.backward()
        return x.grad, w1.main_grad if wide else w1.grad

    size = allocated(37, 2, 5, torch_products.ALIGN)
    plain, of_w1 = run_with(lambda *given: None)
    fused, late = run_with(lambda x, experts: readers(x, size, experts))
    assert torch.equal(of_w1, late)
    # Three terms that are added in another order, once rounded less.
    torch.testing.assert_close(fused, plain, rtol=0, atol=4 * 2**-24 * plain.abs().max().item())


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("zeroed", [False, True])
def test_weight_gradients_are_added_to_main_grad(sort, zeroed):
    leaves, chosen, direction = draw(37, 5, 2)
    expected = definition(leaves, chosen, direction)
    before = {}
    for name in ("w1", "w2"):
        weight = leaves[name]
        weight.main_grad = torch.randn(weight.shape)
        weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, zeroed
        before[name] = weight.main_grad.clone()
    experts = Experts(leaves["w1"], leaves["w2"], into_main_grad=True)
    if sort:
        token, expert = chosen.t().nonzero().flip(1).unbind(1)
        rows, probs = leaves["x"][token], leaves["probs"][token, expert]
        y = experts_sorted(rows, chosen.sum(0), probs, experts)
        y = torch.zeros(37, 16).index_add(0, token, y)
    else:
        y = experts_routed(leaves["x"], chosen, leaves["probs"], experts, 2)
    y.backward(direction)
    for name, start in before.items():
        weight = leaves[name]
        added = {name: weight.main_grad - start}
        # and the rounding of a sum with what was there
        assert_near(added, {name: expected[name]}, torch.float32, 400)
        assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape
        if zeroed:
            assert not weight.grad.any()


def test_frozen_weights_and_tokens_get_no_gradient():
    leaves, chosen, direction = draw(20, 4, 2)
    for name in ("x", "w1", "addend"):
        leaves[name].requires_grad_(False)
    found = run(leaves, chosen, direction, 2)
    assert [name for name in NAMES if found[name] is not None] == ["probs", "w2", "residual"]


@pytest.mark.parametrize("added", [(), ("addend",), ("residual",), ("addend", "residual")])
def test_each_addend_is_added_once_and_its_gradient_is_the_outputs(added):
    """The sum of what there is in float32, rounded once; gradients without a copy.

    In float16: Triton's interpreter cuts a value off where it should round it to bfloat16.
    """
    leaves, chosen, direction = draw(21, 5, 2, dtype=torch.float16)
    routing = route(chosen, leaves["probs"].detach(), 2)
    rows = torch.randn(routing.size, 16).half()
    places = {name: leaves[name].detach() for name in added}
    terms = [rows[routing.rows[:, k].long()] for k in range(2)] + list(places.values())
    once = sum(term.float() for term in terms).half()
    found = to_tokens(rows, routing, places.get("addend"), places.get("residual"))
    assert torch.equal(found, once)
    if added:  # of several roundings the test would say so
        assert not torch.equal(found, sum(terms[1:], terms[0]))

    seen = {}
    given = {name: leaves[name] * 1 for name in added}
    for name, value in given.items():
        value.register_hook(lambda gradient, name=name: seen.update({name: gradient.data_ptr()}))
    weights = Experts(leaves["w1"], leaves["w2"])
    y = experts_routed(leaves["x"], chosen, leaves["probs"], weights, 2, **given)
    y.backward(direction)
    assert seen == dict.fromkeys(added, direction.data_ptr())
    assert all(torch.equal(leaves[name].grad, direction) for name in added)


def test_a_third_addend_is_refused():
    leaves, chosen, _ = draw(5, 3, 2)
    routing = route(chosen, leaves["probs"].detach(), 2)
    with pytest.raises(TypeError):
        to_tokens(torch.zeros(routing.size, 16), routing, *[torch.zeros(5, 16)] * 3)


def test_hoppers_products_say_why_they_do_not_serve(monkeypatch):
    monkeypatch.setattr(hopper_products.nvcc.Library, "reason", lambda library: None)
    assert hopper_products.reason(torch.bfloat16, 256) is None
    assert "256" in hopper_products.reason(torch.bfloat16, 257)
    assert "bfloat16" in hopper_products.reason(torch.float32, 16)
