"""The experts' products for Hopper, and the kernels of their activation."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rounded import near

from megacpp_mcore.kernels.moe_experts import hopper_products
from megacpp_mcore.kernels.moe_experts.activation import (
    ACTIVATIONS,
    SWIGLU,
    activate,
    activate_backward,
)
from megacpp_mcore.kernels.moe_experts.routing import Gathered, route, to_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

# tokens of the experts, hidden size, ffn: no multiples of a tile or of a step of 64
SIZES = {
    "one-expert": ([300], 256, 64),
    "idle-experts": ([130, 0, 5, 700, 256], 512, 96),
    "odd": ([0, 0, 40], 264, 200),
    "many": ([1, 77, 128, 129, 3, 0, 255, 256, 257] * 28, 128, 120),
    "full-size": ([3000, 5200, 4096, 4088], 3584, 896),
}


@pytest.fixture(params=SIZES)
def problem(request):
    counts, h, f = SIZES[request.param]
    if why := hopper_products.reason(torch.bfloat16, len(counts)):
        pytest.skip(why)
    generator = torch.Generator("cuda").manual_seed(int.from_bytes(request.param.encode()) % 2**31)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    experts, tokens = len(counts), max(1, max(counts))
    chosen = torch.zeros(tokens, experts, dtype=torch.bool, device="cuda")
    for expert, count in enumerate(counts):
        picked = torch.randperm(tokens, generator=generator, device="cuda")[:count]
        chosen[picked, expert] = True
    topk = int(chosen.sum(1).max())
    routing = route(chosen, chosen.float(), topk, hopper_products.ALIGN)
    spans = list(itertools.pairwise([0, *routing.ends.tolist()]))
    real = torch.zeros(routing.size, 1, device="cuda", dtype=torch.bool)
    for before, end in spans:
        real[before:end] = (routing.token[before:end] >= 0)[:, None]
    return routing, spans, (lambda width: normal(routing.size, width) * real), normal, h, f


def rows_by_weights(spans, x, w):
    """x w of each expert's rows; w (E, k, n)."""
    return torch.cat([x[a:b].double() @ w[i].double() for i, (a, b) in enumerate(spans)])


def rows_by_rows(spans, dy, x):
    return torch.stack([dy[a:b].double().t() @ x[a:b].double() for a, b in spans])


def test_rows_times_weights(problem):
    routing, spans, rows, normal, h, f = problem
    experts, used = len(spans), spans[-1][1]
    for n, k in ((2 * f, h), (h, f)):
        w, x, dy = normal(experts, n, k), rows(k), rows(n)
        y = hopper_products.forward(x, w, routing.ends)
        dx = hopper_products.input_gradient(dy, w, routing.ends)
        near(y[:used], rows_by_weights(spans, x, w.transpose(1, 2)))
        near(dx[:used], rows_by_weights(spans, dy, w))
        assert torch.equal(y[:used], hopper_products.forward(x, w, routing.ends)[:used])


def test_tokens_are_gathered(problem):
    """As of a sorted copy, to the bit, without making one."""
    routing, spans, _, normal, h, f = problem
    tokens, used, ends = normal(routing.rows.shape[0], h), spans[-1][1], routing.ends
    copy = to_rows(tokens, routing)
    w1, w2 = normal(len(spans), 2 * f, h), normal(len(spans), h, f)
    for _ in range(3):
        gathered = Gathered(tokens, routing)
        found = hopper_products.forward(gathered, w1, ends)
        assert torch.equal(found[:used], hopper_products.forward(copy, w1, ends)[:used])
        found = hopper_products.input_gradient(gathered, w2, ends)
        assert torch.equal(found[:used], hopper_products.input_gradient(copy, w2, ends)[:used])
        assert "rows" not in vars(gathered)


def _activation(h, activation):
    if activation != SWIGLU:
        return torch.relu(h) ** 2
    gate, up = h.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_activations_kernels(problem, activation):
    routing, spans, rows, normal, _, f = problem
    used, ends = spans[-1][1], routing.ends
    saved = rows(2 * f if activation == SWIGLU else f)
    probs = normal(routing.size).float() * (routing.token >= 0)
    wide = saved[:used].double().requires_grad_()
    weights = probs[:used].double().requires_grad_()
    expected = _activation(wide, activation) * weights[:, None]
    near(activate(saved, probs, ends, activation)[:used], expected)
    da = rows(f)
    expected.backward(da[:used].double())
    dh, a, dprobs = activate_backward(da, saved, probs, ends, activation)
    near(dh[:used], wide.grad)
    near(a[:used], expected)
    near(dprobs[:used], weights.grad, torch.float32)


def test_a_thread_that_has_not_used_the_device(problem):
    """As autograd's before its first launch: it has no context, which a tensor map needs."""
    routing, _, rows, normal, h, f = problem
    arguments = rows(f), normal(routing.ends.shape[0], h, f), routing.ends
    expected, spare = (hopper_products.forward(*arguments) for _ in range(2))
    torch.cuda.synchronize()
    del spare  # the thread gets its memory, without a call to CUDA
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(hopper_products.forward, *arguments).result()
    used = int(routing.ends[-1])
    assert torch.equal(found[:used], expected[:used])


def test_rows_after_the_last_experts_are_not_written(problem):
    routing, spans, rows, normal, h, f = problem
    x, w = rows(h), normal(len(spans), 2 * f, h)
    out = torch.full((routing.size, 2 * f), float("nan"), device="cuda", dtype=torch.bfloat16)
    hopper_products._launch(0, x, w, out, routing.ends, rows=len(x), n=2 * f, k=h)
    assert out[: spans[-1][1]].isfinite().all() and out[spans[-1][1] :].isnan().all()


@pytest.mark.parametrize("gathered", ["dy", "x"])
def test_weight_gradients_stored_and_added(problem, gathered):
    """Of gathered tokens and of rows that hold NaN where nobody may read."""
    routing, spans, rows, normal, h, f = problem
    tokens, used = routing.rows.shape[0], spans[-1][1]
    for n, k in ((2 * f, h), (h, f)):
        dy, x = rows(n), rows(k)
        for y in (dy, x):
            y[used:] = float("nan")
        if gathered == "dy":
            dy = Gathered(normal(tokens, n), routing)
        else:
            x = Gathered(normal(tokens, k), routing)
        copies = (to_rows(y.tokens, routing) if isinstance(y, Gathered) else y for y in (dy, x))
        expected = rows_by_rows(spans, *copies)
        near(hopper_products.weight_gradient(dy, x, routing.ends), expected)
        total = normal(len(spans), n, k).float()
        before = total.double()
        hopper_products.add_weight_gradient(total, dy, x, routing.ends, False)
        # added to values of the order of 1: relative to the sum
        near(total, before + expected, torch.float32)
        total.fill_(float("nan"))  # also where an expert has no rows
        hopper_products.add_weight_gradient(total, dy, x, routing.ends, True)
        near(total, expected, torch.float32)
        again = torch.zeros_like(total)
        hopper_products.add_weight_gradient(again, dy, x, routing.ends, False)
        assert torch.equal(total, again)
        # In two parts, the first of which leaves multiprocessors to an exchange.
        again.fill_(float("nan"))
        hopper_products.add_weight_gradient(again, dy, x, routing.ends, True, True)
        assert torch.equal(total, again)
        in_parts = hopper_products.weight_gradient(dy, x, routing.ends, True)
        assert torch.equal(in_parts, hopper_products.weight_gradient(dy, x, routing.ends))
