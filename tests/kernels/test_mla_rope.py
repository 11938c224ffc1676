"""MLA's RoPE: admission of every backend, the definition, Megatron's own, and refusals."""

import itertools

import admission
import pytest
import torch
from admission_probes import far_apart
from torch.utils.checkpoint import checkpoint

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels import mla_rope as public
from megacpp_mcore.kernels.mla_rope import RotaryTable, mla_rope, triton, unfused

test_admission = admission.suite("mla_rope", beyond_dispatch=("triton",))

BACKENDS = [mla_rope, triton.mla_rope, unfused.mla_rope]
EPS = torch.finfo(torch.float32).eps


def draw(*rows, heads=3, plain=4, pos=6, v=5, rotary=6, dtype=torch.float32, table=None):
    """q, kv, k_pos of token rows, and a table for the first of them."""
    angles = torch.arange(table or rows[0]).double()[:, None] * 0.7 ** torch.arange(rotary // 2)
    return (
        torch.randn(*rows, heads, plain + pos, dtype=dtype),
        torch.randn(*rows, heads, plain + v, dtype=dtype),
        torch.randn(*rows, pos, dtype=dtype),
        RotaryTable(*(x.float() for x in RotaryTable.of(angles))),
    )


def each(table, change):
    return RotaryTable(*(change(x) for x in table))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("function", BACKENDS)
def test_a_token_against_complex_numbers(function, interleaved):
    """Pair (a, b) at position p is a + ib times e^(ip f), whatever the order of the pairs."""
    q, kv, k_pos, table = draw(5, 2)
    q_out, k, v = function(q, kv, k_pos, table, qk_head_dim=4, interleaved=interleaved)
    turn = torch.complex(table.cos.double(), table.sin.double())[:, None, None]

    def turned(x):
        pairs = x.unflatten(-1, (3, 2)).double() if interleaved else torch.stack(
            x.double().chunk(2, -1), -1
        )  # fmt: skip
        z = torch.view_as_complex(pairs.contiguous()) * turn
        return torch.cat([z.real, z.imag], -1)

    # Values up to 8; cos and sin, products and a sum rounded, and the other side's widening.
    close = {"rtol": 0, "atol": 4 * 8 * EPS}
    torch.testing.assert_close(q_out[..., 4:].double(), turned(q[..., 4:]), **close)
    expected = turned(k_pos[..., None, :]).expand(5, 2, 3, 6)
    torch.testing.assert_close(k[..., 4:].double(), expected, **close)
    assert torch.equal(q_out[..., :4], q[..., :4]) and torch.equal(k[..., :4], kv[..., :4])
    assert torch.equal(v, kv[..., 4:])


@pytest.mark.parametrize("function", BACKENDS)
def test_documents_are_as_if_alone(function):
    bounds = [0, 0, 3, 4, 4, 9]
    q, kv, k_pos, table = draw(9)
    apart = torch.tensor(bounds).repeat_interleave(2)[::2]
    packed = function(q, kv, k_pos, table, qk_head_dim=4, cu_seqlens=apart)
    for start, end in itertools.pairwise(bounds):
        alone = [x[start:end, None] for x in (q, kv, k_pos)]
        for whole, part in zip(packed, function(*alone, table, qk_head_dim=4), strict=True):
            torch.testing.assert_close(whole[start:end, None], part, rtol=0, atol=0)


@pytest.mark.parametrize("function", BACKENDS)
def test_scores_depend_on_distances_only_and_on_no_order_of_the_pairs(function):
    """RoPE's own property, through the rotary part of q and k of two tokens further on."""
    q, kv, k_pos, table = draw(1, 1, table=20)
    shifted = RotaryTable(*(x[7:] for x in table))
    later = RotaryTable(*(x[5:] for x in table))

    def score(at_q, at_k):
        q_out, _, _ = function(q, kv, k_pos, at_q, qk_head_dim=4)
        _, k, _ = function(q, kv, k_pos, at_k, qk_head_dim=4)
        return (q_out * k)[..., 4:].sum(-1)

    first = score(RotaryTable(*(x[2:] for x in table)), table)
    torch.testing.assert_close(score(shifted, later), first, rtol=0, atol=6 * 16 * 4 * EPS)


def test_the_unfused_one_is_megatrons():
    """Bit for bit in bf16, forward and backward, rows and packed documents."""
    from megatron.core.models.common.embeddings import rope_utils

    for packed in (False, True):
        rows, bounds = ((11,), torch.tensor([0, 4, 11])) if packed else ((7, 2), None)
        q, kv, k_pos, _ = draw(*rows, dtype=torch.bfloat16)
        angles = torch.arange(11).float()[:, None] * 0.7 ** torch.arange(3)
        emb = torch.cat([angles, angles], -1)[:, None, None]
        ours, theirs = ([x.clone().requires_grad_() for x in (q, kv, k_pos)] for _ in range(2))

        def apply(x, emb=emb, bounds=bounds, rows=rows):
            options = {"mla_rotary_interleaved": True, "mscale": 1.25}
            if bounds is None:
                return rope_utils._apply_rotary_pos_emb_bshd(x, emb[: rows[0]], **options)
            group = type("Group", (), {"size": lambda self: 1, "rank": lambda self: 0})()
            # a longer table than the row: else Megatron does not start anew
            longer = torch.cat([emb, emb])
            return rope_utils._apply_rotary_pos_emb_thd(
                x, bounds, longer, cp_group=group, **options
            )

        table = RotaryTable.of(angles, 1.25)
        found = unfused.mla_rope(*ours, table, qk_head_dim=4, cu_seqlens=bounds)
        q2, kv2, pos2 = theirs
        turned = apply(pos2.unsqueeze(-2)).expand(*rows, 3, 6)
        expected = (
            torch.cat([q2[..., :4], apply(q2[..., 4:])], -1),
            torch.cat([kv2[..., :4], turned], -1),
            kv2[..., 4:],
        )
        along = [torch.randn_like(x) for x in expected]
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
        gradients = [
            torch.autograd.grad(y, x, along) for y, x in ((found, ours), (expected, theirs))
        ]
        for a, b in zip(*gradients, strict=True):
            assert torch.equal(a, b)


def test_the_table_is_exact_far_out():
    """In float32 from float32 angles; position 131071 turns by as much as it should."""
    angles = torch.tensor([[131071.0, 1.0]])
    table = RotaryTable.of(angles, 1.5)
    exact = RotaryTable.of(angles.double(), 1.5)
    for found, expected in zip(table, exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2 * 1.5 * EPS)


@pytest.mark.parametrize("function", BACKENDS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"q": a["q"][0]}, r"q is \(2, 3, 10\) without cu_seqlens"),
        (lambda a: a | {"cu_seqlens": torch.tensor([0, 5])}, "with cu_seqlens; it must be"),
        (lambda a: a | {"kv": a["kv"][:, :, 1:]}, r"kv is \(5, 2, 2, 9\)"),
        (lambda a: a | {"qk_head_dim": 9}, r"kv is \(5, 2, 3, 9\).*qk_head_dim 9"),
        (lambda a: a | {"k_pos": a["k_pos"][..., 1:]}, r"k_pos is \(5, 2, 5\)"),
        (lambda a: a | {"k_pos": a["k_pos"].double()}, "one dtype"),
        (lambda a: a | {"kv": a["kv"].to("meta")}, "on cpu, meta; they must be on one device"),
        (lambda a: a | {"rotary": each(a["rotary"], lambda x: x[1:])}, "4 positions"),
        (lambda a: a | {"rotary": each(a["rotary"], lambda x: x.bfloat16())}, "or wider"),
        (lambda a: a | {"rotary": each(a["rotary"], lambda x: x.repeat(1, 2))}, "at most 6"),
    ],
)
def test_refusals(function, change, message):
    q, kv, k_pos, table = draw(5, 2)
    arguments = change({"q": q, "kv": kv, "k_pos": k_pos, "rotary": table, "qk_head_dim": 4})
    with pytest.raises(public.MLARopeInputError, match=message):
        function(**arguments)


@pytest.mark.parametrize("function", BACKENDS)
def test_bounds_are_integers(function):
    q, kv, k_pos, table = draw(5)
    with pytest.raises(MegacppError, match="one row of integers"):
        function(q, kv, k_pos, table, qk_head_dim=4, cu_seqlens=torch.tensor([0.0, 5.0]))


def test_the_kernel_takes_no_float64():
    q, kv, k_pos, table = draw(5, 2, dtype=torch.float64)
    with pytest.raises(MegacppError, match="float64; the kernel"):
        triton.mla_rope(q, kv, k_pos, table, qk_head_dim=4)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary", [6, 4])
def test_in_place_has_the_same_bits(interleaved, rotary):
    """q's rotary half and its gradient's are turned in their own memory; the rest is untouched."""
    *inputs, table = draw(3, 2, heads=5, rotary=rotary)
    options = {"qk_head_dim": 4, "interleaved": interleaved}
    found = []
    for in_place in (False, True):
        leaves = [x.clone().requires_grad_() for x in inputs]
        own = leaves[0] * 1  # as a projection's output: nobody reads it after the rotation
        outputs = triton.mla_rope(own, *leaves[1:], table, in_place=in_place, **options)
        assert (outputs[0].data_ptr() == own.data_ptr()) == in_place
        directions = [torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
                      for x in outputs]  # fmt: skip
        torch.autograd.backward(outputs, directions)
        found.append([*(x.detach() for x in outputs), *(x.grad for x in leaves)])
    for plain, same in zip(*found, strict=True):
        assert torch.equal(plain, same)


def test_what_saved_the_queries_before_they_are_turned_in_place_is_refused_its_gradient():
    q, *others, table = draw(3, 2, heads=5)
    own = q.requires_grad_() * 1
    saved = own.square().sum()
    turned, *_ = triton.mla_rope(own, *others, table, qk_head_dim=4, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (saved + turned.sum()).backward()


def test_in_place_under_a_checkpoint_that_hands_out_saved_tensors_once():
    *inputs, table = draw(3, 2, heads=5)
    found = []
    for reentrant in (True, False):
        leaves = [x.clone().requires_grad_() for x in inputs]

        def turned(q, kv, k_pos):
            return triton.mla_rope(q * 1, kv, k_pos, table, qk_head_dim=4, in_place=True)

        outputs = checkpoint(turned, *leaves, use_reentrant=reentrant)
        sum(y.square().sum() for y in outputs).backward()
        found.append([x.grad for x in leaves])
    for plain, same in zip(*found, strict=True):
        assert torch.equal(plain, same)


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["tokens", "rows", "heads"])
def test_offsets_of_more_than_31_bits(axis):
    """As of a gradient whose rows, or heads, are each in one piece: those of attention are."""
    rows = (3 if i == axis else 1 for i in range(2))
    *inputs, table = draw(*rows, heads=3, dtype=torch.bfloat16)
    found = []
    for arrange in (lambda x: x, lambda x: far_apart(x, axis)):
        leaves = [arrange(x).requires_grad_() if x.dim() > axis + 1 else x for x in inputs]
        outputs = triton.mla_rope(*leaves, table, qk_head_dim=4)
        directions = [arrange(torch.ones_like(y)) for y in outputs]
        wanted = [x for x in leaves if x.requires_grad]
        found.append([*outputs, *torch.autograd.grad(outputs, wanted, directions)])
    for near, far in zip(*found, strict=True):
        assert torch.equal(near, far)
