"""GQA's RoPE: admission of every backend, the definition, Megatron's own, documents, refusals."""

import itertools
from types import SimpleNamespace

import admission
import pytest
import torch
from admission_probes import far_apart
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

from megacpp_mcore import dispatch
from megacpp_mcore.kernels.rope_qk import REFERENCE, RopeQKInputError, megatron, triton
from megacpp_mcore.surfaces.workload import Workload

test_admission = admission.suite("rope_qk", beyond_dispatch=("triton",))

BACKENDS = {"reference": REFERENCE, "triton": triton.ROPE_QK, "megatron": megatron.ROPE_QK}
OURS = pytest.mark.parametrize("rope", [REFERENCE, triton.ROPE_QK], ids=["reference", "triton"])
ALL = pytest.mark.parametrize("rope", BACKENDS.values(), ids=BACKENDS)
EPS = torch.finfo(torch.float32).eps


def angles_of(positions, rotary, base=10.0):
    return torch.outer(torch.arange(positions).double(), base ** -torch.arange(rotary // 2)).float()


def draw(*rows, heads=6, groups=2, dim=10):
    return torch.randn(*rows, groups, (heads // groups + 2) * dim)


def cut(qkv, heads, dim=10):
    """q, k and v of Megatron's projection, as its SelfAttention cuts them."""
    groups = qkv.shape[-2]
    q, k, v = qkv.split([heads // groups * dim, dim, dim], dim=-1)
    return q.reshape(*qkv.shape[:-2], heads, dim), k, v


@pytest.mark.parametrize("interleaved", [True, False])
@ALL
def test_a_token_against_complex_numbers(rope, interleaved):
    """Pair (a, b) at position p is a + ib times m e^(ip f); what is behind the pairs stays."""
    qkv, angles = draw(5, 2), angles_of(5, 6)
    q, k, v = rope.projected(qkv, angles, heads=6, interleaved=interleaved, mscale=1.25)
    turn = torch.polar(torch.tensor(1.25).double(), angles.double())[:, None, None]

    def turned(x):
        x = x[..., :6].double()
        pairs = x.unflatten(-1, (3, 2)) if interleaved else torch.stack(x.chunk(2, -1), -1)
        z = torch.view_as_complex(pairs.contiguous()) * turn
        parts = [z.real, z.imag]
        return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)

    expected_q, expected_k, expected_v = cut(qkv, 6)
    # Values up to 8; cos and sin, times mscale, products and a sum rounded.
    close = {"rtol": 0, "atol": 5 * 8 * 1.25 * EPS}
    for found, given in ((q, expected_q), (k, expected_k)):
        torch.testing.assert_close(found[..., :6].double(), turned(given), **close)
        assert torch.equal(found[..., 6:], given[..., 6:])
    assert torch.equal(v, expected_v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [True, False])
@OURS
def test_megatrons_own_function_agrees(rope, interleaved, dtype):
    """Outputs and gradients; Megatron rounds sine, cosine, both products and their sum."""
    qkv = draw(7, 2).to(dtype)
    table = angles_of(7, 8)
    doubled = torch.stack([table, table], -1).flatten(1) if interleaved else table.repeat(1, 2)
    config = SimpleNamespace(
        apply_rope_fusion=False, rotary_interleaved=interleaved, mrope_section=None
    )
    one_rank = SimpleNamespace(size=lambda: 1, rank=lambda: 0)

    def upstream(x):
        freqs = doubled[:, None, None]
        return apply_rotary_pos_emb(x, freqs, config, None, 1.0, one_rank)

    found, expected = [], []
    for outcome, turn in ((found, None), (expected, upstream)):
        leaf = qkv.clone().requires_grad_()
        if turn is None:
            outputs = rope.projected(leaf, table, heads=6, interleaved=interleaved)
        else:
            q, k, v = cut(leaf, 6)
            outputs = turn(q), turn(k), v
        along = [torch.ones_like(y).cumsum(0) / 4 for y in outputs]
        outcome += [*outputs, *torch.autograd.grad(outputs, leaf, along)]
    for a, b in zip(found, expected, strict=True):
        atol = 5 * b.abs().max().item() * torch.finfo(dtype).eps
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


@ALL
def test_documents_are_as_if_alone(rope):
    bounds = [0, 0, 3, 4, 4, 9]
    qkv, angles = draw(9), angles_of(9, 6)
    packed = rope.projected(qkv, angles, heads=6, cu_seqlens=torch.tensor(bounds))
    for start, end in itertools.pairwise(bounds):
        if end == start:
            continue
        alone = rope.projected(qkv[start:end, None], angles, heads=6)
        for whole, part in zip(packed, alone, strict=True):
            assert torch.equal(whole[start:end, None], part)


@OURS
def test_a_position_without_an_angle_is_left_alone(rope):
    """Padding behind the last document may run past the table, which nobody reads further."""
    angles = torch.cat([angles_of(4, 6), torch.full((3, 3), float("nan"))])[:4]
    q, k, _ = rope.projected(
        qkv := draw(9), angles, heads=6, cu_seqlens=torch.tensor([0, 3]), mscale=2.0
    )
    expected_q, expected_k, _ = cut(qkv, 6)
    for found, given in ((q, expected_q), (k, expected_k)):
        assert torch.equal(found[7:], given[7:])  # positions 4 and 5 of what follows offset 3
        assert not torch.equal(found[4:7], given[4:7])


@OURS
def test_scores_depend_on_distances_only(rope):
    """RoPE's own property, of a query and a key seven positions further on."""
    qkv, angles = draw(1, 1), angles_of(20, 10, base=3.0)

    def score(at_q, at_k):
        q = rope.projected(qkv, angles[at_q:], heads=6)[0]
        k = rope.projected(qkv, angles[at_k:], heads=6)[1]
        return (q.unflatten(2, (2, 3)) * k.unsqueeze(3)).sum(-1)

    # 10 products of values up to 4, four roundings each, angles up to 19 rounded before.
    torch.testing.assert_close(score(5, 2), score(12, 9), rtol=0, atol=10 * 16 * 23 * EPS)


@ALL
def test_both_forms_are_one_function(rope):
    qkv, angles = draw(5, 2), angles_of(5, 6)
    q, k, _ = rope.projected(qkv, angles, heads=6, mscale=1.5)
    given_q, given_k, _ = cut(qkv, 6)
    again = rope.apart(given_q, given_k, angles, mscale=1.5)
    assert torch.equal(again[0], q) and torch.equal(again[1], k)


@ALL
@pytest.mark.parametrize("used", [0, 1, 2])
def test_one_output_alone_gives_the_whole_gradient(rope, used):
    leaf, angles = draw(4, 1).requires_grad_(), angles_of(4, 6)
    (gradient,) = torch.autograd.grad(rope.projected(leaf, angles, heads=6)[used].sum(), leaf)
    parts = [x.abs().sum() > 0 for x in cut(gradient, 6)]
    assert gradient.isfinite().all() and parts == [i == used for i in range(3)]


@ALL
def test_inputs_are_left_alone(rope):
    qkv, angles = draw(5, 2), angles_of(5, 6)
    given = qkv.clone(), angles.clone()
    rope.projected(qkv, angles, heads=6)
    assert torch.equal(qkv, given[0]) and torch.equal(angles, given[1])


def test_a_turn_far_out_is_exact():
    """The angle of position 131071 in float32 is what it is; its sine must not be worse."""
    angles = torch.tensor([[131071.0, 4096.5]])
    qkv = torch.randn(1, 1, 1, 3 * 4)
    for rope in (REFERENCE, triton.ROPE_QK):
        found = rope.projected(qkv, angles, heads=1)[0]
        expected = REFERENCE.projected(qkv.double(), angles.double(), heads=1)[0]
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=4 * 4 * EPS)


@ALL
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"qkv": a["qkv"][0]}, r"qkv is \(2, 2, 50\); it must be \(s, b, "),
        (lambda a: a | {"cu_seqlens": torch.tensor([0, 5])}, r"must be \(t, heads or groups"),
        (lambda a: a | {"heads": 5}, "with 5 heads"),
        (lambda a: a | {"qkv": a["qkv"][..., :49]}, r"\(5, 2, 2, 49\); with 6 heads"),
        (lambda a: a | {"angles": a["angles"][:4]}, "4 positions, the sequence has 5"),
        (lambda a: a | {"angles": a["angles"].bfloat16()}, "float32 or float64"),
        (lambda a: a | {"angles": a["angles"].repeat(1, 2)}, "at most 10"),
    ],
)
def test_refusals(rope, change, message):
    arguments = change({"qkv": draw(5, 2), "angles": angles_of(5, 6), "heads": 6})
    with pytest.raises(RopeQKInputError, match=message):
        rope.projected(**arguments)


@ALL
@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        ((5, 2, 6, 10), (5, 1, 2, 10), "alike but for the heads"),
        ((5, 2, 6, 10), (5, 2, 2, 8), "alike but for the heads"),
        ((5, 2, 6, 10), (5, 2, 4, 10), "6 heads are no multiple of 4 groups"),
        ((5, 6, 10), (5, 2, 10), "without cu_seqlens"),
    ],
)
def test_refusals_of_queries_and_keys_apart(rope, q, k, message):
    with pytest.raises(RopeQKInputError, match=message):
        rope.apart(torch.zeros(q), torch.zeros(k), angles_of(5, 6))
    with pytest.raises(RopeQKInputError, match="integers"):
        bounds = torch.tensor([0.0, 5.0])
        rope.apart(torch.zeros(5, 4, 6), torch.zeros(5, 2, 6), angles_of(5, 6), cu_seqlens=bounds)


def test_the_kernel_takes_no_float64():
    with pytest.raises(RopeQKInputError, match="float64 is not served by the kernel"):
        triton.ROPE_QK.projected(draw(5, 2).double(), angles_of(5, 6), heads=6)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"context_parallel_size": 2}, "context_parallel_size 2"),
        ({"needs": ("attention_output_gate",)}, "attention_output_gate: Megatron's own path"),
        ({}, None),
    ],
)
def test_what_is_left_to_megatrons_own_path(sizes, reason):
    verdicts = dispatch.verdicts("rope_qk", Workload.of("cuda", "bfloat16", **sizes))
    assert verdicts["megatron"] is None
    for backend in ("triton", "reference"):
        assert verdicts[backend] is None if reason is None else reason in verdicts[backend]
    assert "on cpu" in dispatch.verdicts("rope_qk", Workload.of("cpu", "bfloat16"))["triton"]


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["tokens", "rows", "heads"])
def test_offsets_of_more_than_31_bits(axis):
    """As of a gradient whose rows, or heads, are each in one piece: those of attention are."""
    qkv = draw(*(3 if i == axis else 1 for i in range(2)), heads=3, groups=3).bfloat16()
    found = []
    for arrange in (lambda x: x, lambda x: far_apart(x, axis)):
        leaf = arrange(qkv).requires_grad_()
        outputs = triton.ROPE_QK.projected(leaf, angles_of(3, 6), heads=3)
        directions = [arrange(torch.ones_like(y)) for y in outputs]
        found.append([*outputs, *torch.autograd.grad(outputs, leaf, directions)])
    for near, far in zip(*found, strict=True):
        assert torch.equal(near, far)
