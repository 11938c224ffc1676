"""MLA's up-projections with RoPE: admission of every backend, the definition, rounding,
strides, refusals, and kernels that are wrong."""

import dataclasses
import itertools

import admission
import numpy as np
import pytest
import torch
import triton.language as tl
from admission_probes import far_apart
from triton.runtime import interpreter

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels import mla_rope, parity
from megacpp_mcore.kernels.mla_rope import RotaryTable
from megacpp_mcore.kernels.mla_up import MLAUpInputError, launches, mla_up, triton
from megacpp_mcore.kernels.mla_up.case import MLAUpCase

test_admission = admission.suite("mla_up", beyond_dispatch=("triton",))

slow = pytest.mark.slow  # Triton's interpreter
BACKENDS = [mla_up, pytest.param(triton.mla_up, marks=slow)]
EPS = torch.finfo(torch.float32).eps
PLAIN, POS, V, Q_RANK, KV_RANK = 4, 6, 5, 7, 9
WEIGHTS = ("q_weight", "kv_weight")


def draw(*rows, heads=3, dtype=torch.float32):
    """Arguments of token rows, by name, and a table for them."""
    angles = torch.arange(rows[0]).double()[:, None] * 0.7 ** torch.arange(POS // 2)
    shapes = {
        "q_latent": (*rows, Q_RANK), "kv_latent": (*rows, KV_RANK), "k_pos": (*rows, POS),
        "q_weight": (heads * (PLAIN + POS), Q_RANK), "kv_weight": (heads * (PLAIN + V), KV_RANK),
    }  # fmt: skip
    tensors = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    table = RotaryTable(*(x.float() for x in RotaryTable.of(angles)))
    return {**tensors, "rotary": table, "qk_head_dim": PLAIN}


def leaves_of(arguments):
    names = ("q_latent", "kv_latent", "k_pos", *WEIGHTS)
    return [arguments[name] for name in names]


def with_leaves(arguments):
    """The same with gradients."""
    leaf = {n: x.detach().clone().requires_grad_() for n, x in arguments.items()
            if isinstance(x, torch.Tensor) and x.is_floating_point()}  # fmt: skip
    return arguments | leaf


@pytest.fixture
def rounds_to_nearest(monkeypatch):
    """As a GPU does. Triton's interpreter cuts off what bfloat16 has no room for; told to round, it
    loses the carry into the exponent."""
    others = interpreter._convert_float

    def convert(x, old, new, mode):
        if (old, new) != (tl.float32, tl.bfloat16):
            return others(x, old, new, mode)
        bits = np.frombuffer(x.tobytes(), np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return rounded.astype(np.uint16).reshape(x.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("function", BACKENDS)
def test_a_head_against_complex_numbers(function, interleaved):
    """Pair (a, b) of a product's rotary part at position p is a + ib times e^(ip f)."""
    arguments = draw(5, 2)
    q, k, v = function(**arguments, interleaved=interleaved)
    wide = {n: x.double() for n, x in arguments.items() if isinstance(x, torch.Tensor)}
    table = arguments["rotary"]
    turn = torch.complex(table.cos.double(), table.sin.double())[:, None, None]

    def turned(x):
        pairs = x.unflatten(-1, (3, 2)) if interleaved else torch.stack(x.chunk(2, -1), -1)
        z = torch.view_as_complex(pairs.contiguous()) * turn
        return torch.cat([z.real, z.imag], -1)

    for head in range(3):
        rows = wide["q_weight"][head * (PLAIN + POS) : (head + 1) * (PLAIN + POS)]
        q_head = wide["q_latent"] @ rows.t()
        rows = wide["kv_weight"][head * (PLAIN + V) : (head + 1) * (PLAIN + V)]
        kv_head = wide["kv_latent"] @ rows.t()
        expected = (
            torch.cat([q_head[..., :PLAIN], turned(q_head[..., None, PLAIN:])[..., 0, :]], -1),
            torch.cat([kv_head[..., :PLAIN], turned(wide["k_pos"][..., None, :])[..., 0, :]], -1),
            kv_head[..., PLAIN:],
        )
        for found, value in zip((q, k, v), expected, strict=True):
            # Values up to 16 of sums of 9, and a turn.
            off = (found[:, :, head].double() - value).abs().max()
            assert off <= 16 * 16 * EPS


@pytest.mark.parametrize("function", BACKENDS)
def test_documents_are_as_if_alone(function):
    bounds = [0, 0, 3, 4, 4, 9]
    arguments = draw(9)
    apart = torch.tensor(bounds).repeat_interleave(2)[::2]
    packed = function(**arguments, cu_seqlens=apart)
    for start, end in itertools.pairwise(bounds):
        alone = {n: x[start:end, None] for n, x in arguments.items()
                 if n in ("q_latent", "kv_latent", "k_pos")}  # fmt: skip
        if start == end:
            continue
        for whole, part in zip(packed, function(**(arguments | alone)), strict=True):
            # A product's sum may have another order where it has other rows.
            torch.testing.assert_close(whole[start:end, None], part, rtol=0, atol=16 * 16 * EPS)


@slow
@pytest.mark.parametrize("documents", [0, 2])
def test_rounding_is_no_worse_than_of_the_linears_and_mla_rope(documents, rounds_to_nearest):
    """In bf16: there q and kv are rounded before the rotation and after it, here once; gradients
    are rounded alike. Of so many values, chance takes a ratio of rms some hundredths up."""
    case = MLAUpCase(2, 48, 8, 32, 32, 32, 32, 32, documents)
    tensors = parity.drawn(case, torch.bfloat16, "cpu", seed=1)
    truth = parity.truth_of(case, tensors, torch.bfloat16, torch.float64)

    def rms(operator):
        bound = case.bind(operator, "cpu", torch.bfloat16)
        values = parity.run(case, bound, tensors, truth.directions)
        return {n: (values[n].double() - x).square().mean().sqrt() for n, x in truth.values.items()}

    ours, todays = rms(triton.mla_up), rms(mla_up)
    for name, error in todays.items():
        assert ours[name] <= 1.05 * error, name
    # A turn of rounded values has both roundings: the root of two times the error.
    assert ours["q"] < 0.9 * todays["q"]


@slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_splits_of_several_tiles_add_up(monkeypatch, dtype):
    """Tiles of a split are summed in its program, splits by another kernel: with two splits of
    several tiles, the last of them shorter, the sums are those of many of one."""
    case = MLAUpCase(3, 110, 2, 4, 6, 5, 7, 9)
    tensors = parity.drawn(case, dtype, "cpu", seed=2)
    truth = parity.truth_of(case, tensors, dtype, torch.float64)
    bound = case.bind(triton.mla_up, "cpu", dtype)
    for programs in (4, 512):
        monkeypatch.setattr(launches, "_PROGRAMS", programs)
        values = parity.run(case, bound, tensors, truth.directions)
        for error in parity.errors(case, values, truth, dtype):
            assert error.share <= 1, f"{programs}: {error}"


@slow
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["tokens", "rows", "heads"])
def test_offsets_of_more_than_31_bits(axis):
    """As of a gradient whose rows, or heads, are each in one piece: those of attention are."""
    rows = (3 if i == axis else 1 for i in range(2))
    arguments = draw(*rows, dtype=torch.bfloat16)
    found = []
    for arrange in (lambda x: x, lambda x: far_apart(x, axis)):
        given = {n: arrange(x) if n not in WEIGHTS and axis < 2 else x for n, x in arguments.items()
                 if isinstance(x, torch.Tensor)}  # fmt: skip
        given = arguments | {n: x.requires_grad_() for n, x in given.items()}
        outputs = triton.mla_up(**given)
        directions = [arrange(torch.ones_like(y)) for y in outputs]
        found.append([*outputs, *torch.autograd.grad(outputs, leaves_of(given), directions)])
    for near, far in zip(*found, strict=True):
        assert torch.equal(near, far)


def backwards(function):
    """A rotation by the wrong sign."""
    return lambda rotary, **more: function(rotary=RotaryTable(rotary.cos, -rotary.sin), **more)


def other_halves(function):
    """Pairs of other rows of the weights."""
    return lambda interleaved, **more: function(interleaved=not interleaved, **more)


def a_tile_of_zeros(function):
    """The last tokens and heads are left out, and so are their gradients."""

    def wrong(**given):
        values = [y.clone() for y in function(**given)]
        for y in values:
            y[-8:, ..., -1:, :] = 0
        return values

    return wrong


@slow
@pytest.mark.parametrize("wrong", [backwards, other_halves, a_tile_of_zeros])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_are_wrong_are_refused(wrong, dtype):
    """Of the tensors that it changes, every one is found by itself."""
    case = MLAUpCase.samples()["plain"]
    tensors = parity.drawn(case, dtype, "cpu", seed=4)
    truth = parity.truth_of(case, tensors, dtype, torch.float64, by_region=True)
    changed = {"q", "k", "dq_latent", "dk_pos", "dq_weight"}
    if wrong is a_tile_of_zeros:
        changed |= {"v", "dkv_latent", "dkv_weight"}
    for operator, expected in ((triton.mla_up, set()), (wrong(triton.mla_up), changed)):
        bound = case.bind(operator, "cpu", dtype)
        values = parity.run(case, bound, tensors, truth.directions)
        refused = set()
        for name, value in values.items():
            alone = dataclasses.replace(truth, values={name: truth.values[name]})
            (error,) = parity.errors(case, {name: value}, alone, dtype)
            refused |= {name} if error.share > 1 else set()
        assert refused == expected


def each(table, change):
    return RotaryTable(*(change(x) for x in table))


@pytest.mark.parametrize("function", [mla_up, triton.mla_up])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"q_latent": a["q_latent"][0]}, r"q_latent is \(2, 7\) without cu_seqlens"),
        (lambda a: a | {"cu_seqlens": torch.tensor([0, 5])}, "with cu_seqlens; it must be"),
        (lambda a: a | {"kv_latent": a["kv_latent"][1:]}, r"kv_latent is \(4, 2, 9\); with"),
        (lambda a: a | {"k_pos": a["k_pos"][:, 1:]}, r"k_pos is \(5, 1, 6\); with"),
        (lambda a: a | {"q_weight": a["q_weight"][1:]}, r"q_weight is \(29, 7\).*heads \* 10, 7"),
        (lambda a: a | {"q_weight": a["q_weight"][:, 1:]}, r"q_weight is \(30, 6\)"),
        (lambda a: a | {"kv_weight": a["kv_weight"][1:]}, r"kv_weight is \(26, 9\); with 3 heads"),
        (lambda a: a | {"kv_weight": a["kv_weight"][:12]}, r"kv_weight is \(12, 9\)"),
        (lambda a: a | {"qk_head_dim": 0}, "qk_head_dim 0 .1 or more"),
        (lambda a: a | {"k_pos": a["k_pos"].double()}, "k_pos is torch.float64.*one dtype"),
        (lambda a: a | {"kv_latent": a["kv_latent"].to("meta")}, "on cpu, meta; they must be on"),
        (lambda a: a | {"rotary": each(a["rotary"], lambda x: x[1:])}, "4 positions"),
        (lambda a: a | {"rotary": each(a["rotary"], lambda x: x.repeat(1, 2))}, "at most 6"),
    ],
)
def test_refusals(function, change, message):
    with pytest.raises(mla_rope.MLARopeInputError, match=message):
        function(**change(draw(5, 2)))


@pytest.mark.parametrize("function", [mla_up, triton.mla_up])
def test_bounds_are_integers(function):
    with pytest.raises(MegacppError, match="one row of integers"):
        function(**draw(5), cu_seqlens=torch.tensor([0.0, 5.0]))


def test_what_the_kernels_do_not_take():
    with pytest.raises(MLAUpInputError, match=r"is torch\.float64; the kernels"):
        triton.mla_up(**draw(5, 2, dtype=torch.float64))
    arguments = draw(5, 2)
    narrow = each(arguments["rotary"], lambda x: x[:, :2])
    with pytest.raises(MLAUpInputError, match="turns 4 of 6 dims"):
        triton.mla_up(**arguments | {"rotary": narrow})
    assert mla_up(**arguments | {"rotary": narrow})[0].shape == (5, 2, 3, PLAIN + POS)
    wide = arguments | {"q_latent": torch.randn(5, 2, 65), "q_weight": torch.randn(30, 65)}
    with pytest.raises(MLAUpInputError, match="take 64 of each at most"):
        triton.mla_up(**wide)
