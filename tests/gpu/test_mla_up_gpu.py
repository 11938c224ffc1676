"""MLA's up-projections with RoPE at NAM56R's full size: how close, the same bits every time, and
against the linears and `mla_rope`, which it is to replace."""

import functools
from statistics import median

import pytest
import torch
from torch.nn.functional import linear

from megacpp_mcore.bench.clock import clock_for, interleave
from megacpp_mcore.kernels import mla_rope, parity
from megacpp_mcore.kernels.mla_rope import triton as rope
from megacpp_mcore.kernels.mla_up import triton
from megacpp_mcore.kernels.mla_up.case import MLAUpCase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

NAM56R = {"batch": 4, "seq": 4096, "heads": 56, "plain": 64, "pos": 64, "v": 64, "q_rank": 64,
          "kv_rank": 64}  # fmt: skip
REPEATS = 50
# What packed documents take more than whole rows: eight small launches that look their angles up.
MOST_FOR_DOCUMENTS = 8 * 0.010  # ms


def linears_and_rope(
    q_latent, kv_latent, k_pos, q_weight, kv_weight, rotary, *, qk_head_dim, in_place=False,
    **options,
):  # fmt: skip
    """As the layer does it without `mla_up`, but for the linears' own gradient accumulation."""
    heads = len(q_weight) // (qk_head_dim + k_pos.shape[-1])
    q = linear(q_latent, q_weight).unflatten(-1, (heads, -1))
    kv = linear(kv_latent, kv_weight).unflatten(-1, (heads, -1))
    return rope.mla_rope(
        q, kv, k_pos, rotary, qk_head_dim=qk_head_dim, in_place=in_place, **options
    )


@pytest.mark.parametrize("documents", [0, 8])
def test_float32_to_a_hundred_thousandth(documents):
    case = MLAUpCase(**NAM56R, documents=documents)
    tensors = parity.drawn(case, torch.float32, "cuda", seed=3)
    truth = parity.truth_of(case, tensors, torch.float32, torch.float64)
    bound = case.bind(triton.mla_up, "cuda", torch.float32)
    values = parity.run(case, bound, tensors, truth.directions)
    for error in parity.errors(case, values, truth, torch.float32):
        assert error.error <= min(1e-5, error.tolerance), error


@pytest.mark.parametrize("documents", [0, 8])
def test_rounding_is_no_worse_than_of_the_linears_and_mla_rope(documents):
    """Root mean squares of errors, of a hundred million values: the ratio leaves nothing to chance
    but in k_pos's gradient and the weights', of a million and less."""
    case = MLAUpCase(**NAM56R, documents=documents)
    tensors = parity.drawn(case, torch.bfloat16, "cuda", seed=4)
    truth = parity.truth_of(case, tensors, torch.bfloat16, torch.float64)

    def rms(operator):
        bound = case.bind(operator, "cuda", torch.bfloat16)
        values = parity.run(case, bound, tensors, truth.directions)
        return {n: (values[n].double() - x).square().mean().sqrt() for n, x in truth.values.items()}

    ours, todays = rms(triton.mla_up), rms(linears_and_rope)
    for name, error in todays.items():
        assert ours[name] <= 1.02 * error, f"{name}: {ours[name]:.3e}, {error:.3e}"
    assert ours["q"] < 0.9 * todays["q"]


def test_the_same_bits_every_time():
    case = MLAUpCase(**NAM56R)
    tensors = parity.drawn(case, torch.bfloat16, "cuda", seed=5)
    given = {n: t.requires_grad_() if n in case.inputs else t for n, t in tensors.items()}
    weights = [given["q_weight"], given["kv_weight"]]
    rotary = mla_rope.RotaryTable(given.pop("cos"), given.pop("sin"))
    along = None

    def values():
        nonlocal along
        for tensor in given.values():
            tensor.grad = None
        for weight in weights:
            weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
        outputs = triton.mla_up(
            **given, rotary=rotary, qk_head_dim=case.plain, into_main_grad=True
        )  # fmt: skip
        along = along or [torch.randn_like(y) for y in outputs]
        torch.autograd.backward(outputs, along)
        gradients = [given[n].grad for n in ("q_latent", "kv_latent", "k_pos")]
        return [*(y.detach() for y in outputs), *gradients, *(w.main_grad for w in weights)]

    expected = values()
    for _ in range(REPEATS):
        for found, value in zip(values(), expected, strict=True):
            assert torch.equal(found, value)


@pytest.mark.alone
def test_it_is_faster_than_what_it_replaces():
    clock = clock_for("cuda")
    calls, in_place = {}, functools.partial(linears_and_rope, in_place=True)
    for name, operator in (("ours", triton.mla_up), ("linears and rope", in_place)):
        for documents in (0, 8):
            case = MLAUpCase(**NAM56R, documents=documents)
            tensors = parity.drawn(case, torch.bfloat16, "cuda", seed=6)
            leaves = {n: t.requires_grad_() if n in case.inputs else t for n, t in tensors.items()}
            call = case.bind(operator, "cuda", torch.bfloat16).call
            inputs = [leaves[n] for n in case.inputs]
            along = [torch.randn_like(y) for y in call(**leaves).values()]

            def forward(turn, call=call, leaves=leaves):
                return call(**leaves)

            def both(turn, call=call, leaves=leaves, inputs=inputs, along=along):
                # q's gradient is turned where it is: turned again and again it keeps its size.
                return torch.autograd.grad(list(call(**leaves).values()), inputs, along)

            calls |= {(name, "forward", documents): forward, (name, "both", documents): both}
    times = {name: median(taken.ms) for name, taken in interleave(clock, calls, 8.0).items()}
    for phase in ("forward", "both"):
        for documents in (0, 8):
            assert times["ours", phase, documents] < times["linears and rope", phase, documents], (
                times
            )
        packed = times["ours", phase, 8]
        assert packed <= times["ours", phase, 0] + MOST_FOR_DOCUMENTS, times
