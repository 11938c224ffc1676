"""The experts' products for Hopper, and the layer's operator in a CUDA graph."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from expert_checkpoints import load_from
from megatron.core.activations import squared_relu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import MoETransformerLayer

from megacpp_mcore.bench import load_for_bench
from megacpp_mcore.bench.layer import layer_overrides
from megacpp_mcore.bench.variants import Variant, build
from megacpp_mcore.kernels.moe_experts import hopper_products, torch_products
from megacpp_mcore.kernels.moe_experts.activation import (
    ACTIVATIONS,
    SWIGLU,
    activate,
    activate_backward,
)
from megacpp_mcore.kernels.moe_experts.fused import Experts, experts_routed
from megacpp_mcore.kernels.moe_experts.routing import Gathered, route, to_rows
from megacpp_mcore.layers.experts import FusedExperts
from megacpp_mcore.layers.parts import te_experts
from megacpp_mcore.training.cpu.megatron_setup import quiet, single_process
from megacpp_mcore.training.one_process import in_half_precision

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


def near(found, expected, dtype=torch.bfloat16, terms=4096):
    """One rounding to the dtype, and float32 sums; of the norm, as values may cancel."""
    bound = torch.finfo(dtype).eps / 2 + terms**0.5 * torch.finfo(torch.float32).eps
    distance = (found.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    assert distance <= bound, f"{distance:.2e} > {bound:.2e}"


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


# tokens, hidden size, experts, top-k, whether tokens have fewer experts, a shared expert
TOKENS = {
    "full-size": (4099, 3584, 16, 4, False, True),
    "one-token": (1, 64, 5, 2, False, True),
    "fewer-experts": (777, 328, 7, 3, True, True),
    "widest": (1000, 3840, 16, 8, True, True),
    "not-shared": (500, 8, 3, 1, True, False),
    "by-two-kernels": (130, 4096, 16, 4, True, True),
    "odd-width": (70, 36, 6, 2, True, True),
}


@pytest.mark.parametrize("case", TOKENS)
def test_the_tokens_gradient_before_their_norm(case):
    """In one pass where the shapes are taken, of rows that hold NaN where nobody may read."""
    if why := hopper_products.reason(torch.bfloat16, 16):
        pytest.skip(why)
    tokens, h, experts, topk, fewer, shared = TOKENS[case]
    chosen = torch.zeros(tokens, experts, dtype=torch.bool, device="cuda")
    chosen.scatter_(1, torch.rand(tokens, experts, device="cuda").topk(topk, 1).indices, True)
    if fewer:
        chosen &= torch.rand(tokens, experts, device="cuda") < 0.6
    routing = route(chosen, chosen.float(), topk, hopper_products.ALIGN)
    rows, there = routing.rows.long(), routing.rows >= 0

    def normal(*shape):
        return torch.randn(shape, device="cuda").bfloat16()

    d_rows = torch.full((routing.size, h), float("nan"), device="cuda").bfloat16()
    d_rows[rows[there]] = normal(int(there.sum()), h)
    d_shared = normal(tokens, h) if shared else None
    x, d_residual, gate, weight = (normal(*s) for s in ((tokens, h),) * 2 + ((experts, h), (h,)))
    d_logits, rstd = torch.randn(tokens, experts, device="cuda"), torch.rand(tokens, device="cuda")
    given = [d_rows, routing, d_shared, d_logits, gate, x, d_residual, weight, rstd]
    dx, d_weight = hopper_products.tokens_gradient(*given)

    dy = (d_rows[rows.clamp(min=0)].double().nan_to_num() * there[..., None]).sum(1)
    dy += d_logits.double() @ gate.double() + (d_shared.double() if shared else 0)
    normed, scaled = x.double() * rstd.double()[:, None], dy * weight.double()
    mean = (scaled * normed).mean(1, keepdim=True)
    wide = rstd.double()[:, None] * (scaled - normed * mean) + d_residual.double()
    # Two kernels round dy, too: of errors that know nothing of each other the norm is below twice.
    near(dx, wide)
    near(d_weight, (dy * normed).sum(0))
    again = hopper_products.tokens_gradient(*given)
    assert torch.equal(dx, again[0]) and torch.equal(d_weight, again[1])
    for place in (3, 5, 6, 7):  # the test notices what is wrong with each
        other = [*given[:place], given[place].flip(-1), *given[place + 1 :]]
        with pytest.raises(AssertionError):
            near(hopper_products.tokens_gradient(*other)[0], wide)


# tokens, hidden size, experts
NORMS = {
    "full-size": (4099, 3584, 16),
    "one-token": (1, 64, 5),
    "fewer-experts": (777, 328, 7),
    "widest": (1000, 3840, 16),
    "one-chunk": (9, 8, 3),
    "by-two-kernels": (130, 4096, 16),
    "odd-width": (70, 36, 6),
}


@pytest.mark.parametrize("case", NORMS)
def test_the_norm_and_the_logits_of_its_output(case):
    """In one pass where the shapes are taken; a token of NaN is its own alone."""
    if why := hopper_products.reason(torch.bfloat16, 16):
        pytest.skip(why)
    tokens, h, experts = NORMS[case]
    x, weight, gate = (torch.randn(s, device="cuda") for s in ((tokens, h), (h,), (experts, h)))
    x, weight, gate = x.bfloat16() * 3, weight.bfloat16(), gate.bfloat16()
    x[tokens // 2] *= 1e-3  # eps counts there
    y, rstd, logits = hopper_products.norm_and_logits(x, weight, 1e-5, gate)

    wide = (x.double().square().mean(1) + 1e-5).rsqrt()
    normed = x.double() * wide[:, None] * weight.double()
    near(y, normed)
    # Sums of h terms in float32, of the rounded values: an error of a term is one of theirs.
    terms = y.abs().double() @ gate.abs().double().t()
    expected, bound = y.double() @ gate.double().t(), torch.finfo(torch.float32).eps * h**0.5
    assert (((logits - expected) / terms).abs() <= bound).all()
    assert ((rstd / wide - 1).abs() <= bound).all()
    again = hopper_products.norm_and_logits(x, weight, 1e-5, gate)
    assert all(torch.equal(a, b) for a, b in zip((y, rstd, logits), again, strict=True))
    x[0, -1] = float("nan")
    with_nan = hopper_products.norm_and_logits(x, weight, 1e-5, gate)
    for found, before in zip(with_nan, (y, rstd, logits), strict=True):
        assert found[0].isnan().all() and torch.equal(found[1:], before[1:])
    for wrong in (gate.flip(0), gate.flip(1), torch.cat([gate[:, h // 2 :], gate[:, : h // 2]], 1)):
        found = hopper_products.norm_and_logits(x[1:], weight, 1e-5, wrong)[2]
        assert not (((found - expected[1:]) / terms[1:]).abs() <= bound).all() or tokens == 1


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


def test_each_pass_has_one_matrix_of_rows():
    """Forward H, A and the rows of the output; backward dH, in H's place, and those of dx. Neither
    the rows of x nor those of dy."""
    tokens, experts, topk, h, f = 4096, 8, 4, 1024, 256
    if why := hopper_products.reason(torch.bfloat16, experts):
        pytest.skip(why)
    scores = torch.rand(tokens, experts, device="cuda")
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(1, scores.topk(topk, dim=1).indices, True)
    x, w1, w2 = (
        torch.randn(shape, device="cuda").bfloat16().requires_grad_()
        for shape in ((tokens, h), (experts, 2 * f, h), (experts, h, f))
    )
    for weight in (w1, w2):
        weight.main_grad = torch.zeros(weight.shape, device="cuda")
    weights, direction = Experts(w1, w2, True, hopper_products), torch.randn_like(x)
    rows = route(chosen, scores, topk, hopper_products.ALIGN).size
    of_row, small = 2 * rows, 64 * rows  # bytes of a column of the rows; the routing

    def beyond(call, *arguments):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        return call(*arguments), torch.cuda.max_memory_allocated() - before

    for _ in range(2):  # with the first, torch and Triton allocate what is theirs
        y, forward = beyond(experts_routed, x, chosen, scores, weights, topk)
        _, backward = beyond(y.backward, direction)
        x.grad = None
    assert forward <= of_row * (2 * f + f + h) + small
    # and what autograd gets for w2
    assert backward <= of_row * h + 2 * x.numel() + 2 * w2.numel() + small


@pytest.mark.parametrize("gated", [True, False])
def test_transformer_engines_experts_load_ours_and_ours_theirs(gated):
    """The same outputs from the same checkpoint, up to bf16's roundings, in both directions."""
    pytest.importorskip("transformer_engine")
    activation = {"activation_func": torch.nn.functional.silu if gated else squared_relu}
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=1, num_moe_experts=4, ffn_hidden_size=96,
        moe_ffn_hidden_size=96, gated_linear_unit=gated, add_bias_linear=False, bf16=True,
        params_dtype=torch.bfloat16, bias_activation_fusion=False, **activation,
    )  # fmt: skip
    x, probs = torch.randn(50, 64, device="cuda").bfloat16(), torch.rand(50, device="cuda")
    counts = torch.tensor([20, 0, 13, 17])
    with single_process(1, "cuda"):
        groups = ProcessGroupCollection.use_mpu_process_groups()
        ours, theirs, again = (
            kind(num_local_experts=4, config=config, pg_collection=groups)
            for kind in (FusedExperts, te_experts, FusedExperts)
        )
        load_from(ours, theirs)
        load_from(theirs, again)
        for name, value in ours.named_parameters():
            assert torch.equal(again.get_parameter(name), value)
        outputs = [built(x, counts, probs)[0].double() for built in (ours, theirs)]
    distance = (outputs[0] - outputs[1]).norm() / outputs[1].norm()
    assert distance <= 5 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("products", [torch_products, hopper_products], ids=lambda p: p.NAME)
def test_a_graph_routes_anew_at_every_replay(products):
    """What the host knows of a captured step is its sizes alone."""
    if products is hopper_products and (why := hopper_products.reason(torch.bfloat16, 8)):
        pytest.skip(why)
    tokens, experts, topk, h, f = 1000, 8, 2, 256, 64

    def draw():
        scores = torch.rand(tokens, experts, device="cuda")
        chosen = torch.zeros(tokens, experts, dtype=torch.bool, device="cuda")
        chosen.scatter_(1, scores.topk(topk, dim=1).indices, True)
        return torch.randn(tokens, h, device="cuda").bfloat16(), chosen, scores * chosen

    w1 = (torch.randn(experts, 2 * f, h, device="cuda") * h**-0.5).bfloat16().requires_grad_()
    w2 = (torch.randn(experts, h, f, device="cuda") * f**-0.5).bfloat16().requires_grad_()
    for weight in (w1, w2):
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight).float(), False
    static = draw()
    x, probs = static[0].requires_grad_(), static[2].requires_grad_()
    direction = torch.randn(tokens, h, device="cuda").bfloat16()

    def step():
        y = experts_routed(x, static[1], probs, Experts(w1, w2, True, products), topk)
        return y, *torch.autograd.grad(y, (x, probs, w1, w2), direction)[:2]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        with torch.no_grad():
            for buffer, value in zip((x, static[1], probs), draw(), strict=True):
                buffer.copy_(value)
        sums = []
        for run in (graph.replay, step):
            for weight in (w1, w2):
                weight.main_grad.zero_()
            values = run() or captured
            sums.append([*(v.clone() for v in values), w1.main_grad.clone(), w2.main_grad.clone()])
        for replayed, eager in zip(*sums, strict=True):
            assert torch.equal(replayed, eager)


FULL_SIZE = [*layer_overrides("E"), "backends.moe_experts=fused_moe"]


def test_the_residual_in_the_experts_sum_at_full_size():
    """NAM56R's E layer: Megatron's output but for the experts' rounding, and its gradients; and the
    same where norm and logits are one kernel, which sums in another order."""
    recipe = load_for_bench("nam56r", FULL_SIZE)
    with quiet(), single_process(1, "cuda"):
        model, args = build(Variant(recipe))
        in_half_precision(model, args)
        (layer,) = model.decoder.layers
        residuals, routed = [], layer.mlp.experts.routed

        def watched(tokens, routing_map, probs, addend, residual, *more):
            residuals.append(residual is not None)
            return routed(tokens, routing_map, probs, addend, residual, *more)

        layer.mlp.experts.routed = watched
        shape = args.seq_length, args.micro_batch_size, args.hidden_size
        x, direction = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))

        def step(call):
            leaf = x.clone().requires_grad_()
            y = call(leaf)
            y.backward(direction)
            named = [("x", leaf), *layer.named_parameters()]
            gradients = {name: value.grad for name, value in named}
            for _, value in named:
                value.grad = None
            return y.detach(), gradients

        joined, joined_gradients = step(layer._forward_mlp)
        layer.mlp.normed = lambda norm, hidden_states: (*norm(hidden_states), None)
        y, found = step(layer._forward_mlp)
        megatrons, expected = step(lambda leaf: MoETransformerLayer._forward_mlp(layer, leaf))
        with torch.no_grad():
            normed, _ = layer.pre_mlp_layernorm(x)
            experts, _ = layer.mlp(normed)
    assert residuals == [True, True, False, False]
    assert (y != megatrons).any()  # they are not the same sum
    # Half an epsilon each for the two roundings of Megatron's and the one of ours, and of the next
    # order as much again as any of them is off.
    half = torch.finfo(torch.bfloat16).eps / 2
    bound = half * (1 + 4 * half) * sum(value.double().abs() for value in (experts, y, megatrons))
    assert ((y.double() - megatrons.double()).abs() <= bound).all()
    # The same kernels from the same inputs; where one adds with atomics, and where norm and logits
    # are one kernel, roundings to bf16 of sums in different orders.
    assert distance(joined, y) <= 2 * half
    for name, gradient in expected.items():
        assert distance(found[name], gradient) <= 2 * half, name
        assert distance(joined_gradients[name], gradient) <= 2 * half, name
        assert gradient.any(), name


def distance(found, expected) -> float:
    """Of two tensors, relative to the second's norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
