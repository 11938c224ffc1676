"""M and R between their projections on a GPU, at NAM56R's dims: packed documents, long rows, and
what a CUDA graph replays."""

import math

import pytest
import torch

from megacpp_mcore.kernels import m2rnn_core, mamba3_core, parity
from megacpp_mcore.kernels.m2rnn_core.case import M2RNNCoreCase
from megacpp_mcore.kernels.mamba3_core.case import Mamba3CoreCase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

DOCUMENTS = [0, 1, 3, 3, 60, 120, 192, 199]  # of a row of 230 tokens
M = {
    "heads": "heads", "head_dim": "head_dim", "groups": "groups", "state_dim": "state_dim",
    "angles": "angles", "decay": "decay", "decay_floor": "decay_floor", "eps": "eps",
}  # fmt: skip
R = {
    "heads": "heads", "k_dim": "k_head_dim", "v_dim": "v_head_dim", "eps": "eps",
    "chunk_size": "chunk_size", "grad_clamp": "grad_clamp", "tanh": "tanh",
}  # fmt: skip


def operators(letter):
    """The fused operator, the definition, and what the case gives to either."""
    if letter.startswith("M"):
        from megacpp_mcore.kernels.mamba3_core import triton

        return triton.mamba3_core, mamba3_core.mamba3_core, M
    from megacpp_mcore.kernels.m2rnn_core import triton

    return triton.m2rnn_core, m2rnn_core.m2rnn_core, R


def with_gradients(function, case, names, tensors, direction=None, **more):
    leaves = [tensors[n].detach().requires_grad_() for n in case.inputs]
    y = function(*leaves, **{key: getattr(case, n) for key, n in names.items()}, **more)
    if direction is None:
        direction = torch.randn_like(y)
    gradients = torch.autograd.grad(y, leaves, direction.to(y.dtype))
    found = zip(("y", *(f"d{n}" for n in case.inputs)), (y.detach(), *gradients), strict=True)
    return dict(found), direction


def assert_within(case, found, expected):
    for name, got in found.items():
        bound = case.tolerance(name, torch.bfloat16)
        off = (got.double() - expected[name].double()).abs().max()
        assert off <= bound * expected[name].abs().max(), f"{name}: {off:.3e}, {bound:.3e}"


CASES = {
    "M": Mamba3CoreCase(1, 230, 8, 2, 64, 64, 16),
    "M-wide": Mamba3CoreCase(1, 230, 112, 8, 64, 128, 32),
    "R": M2RNNCoreCase(1, 230, 6, 64, 16, 32, grad_clamp=1.0),
}


@pytest.mark.parametrize("letter", CASES)
def test_documents_start_from_zero(letter):
    case, (fused, definition, names) = CASES[letter], operators(letter)
    tensors = parity.drawn(case, torch.bfloat16, "cuda", seed=5)
    bounds = [*DOCUMENTS, case.seq] if letter == "R" else DOCUMENTS
    offsets = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    found, direction = with_gradients(fused, case, names, tensors, cu_seqlens=offsets)
    wide = {n: t.double() for n, t in tensors.items()}
    expected, _ = with_gradients(definition, case, names, wide, direction, cu_seqlens=offsets)
    assert_within(case, found, expected)


@pytest.mark.parametrize("letter", CASES)
def test_a_captured_call_gives_the_bits_of_an_eager_one(letter):
    """A step is one CUDA graph: nothing may be read on the host, and nothing depends on what the
    memory held before."""
    case, (fused, _, names) = CASES[letter], operators(letter)
    tensors = parity.drawn(case, torch.bfloat16, "cuda", seed=6)
    others = parity.drawn(case, torch.bfloat16, "cuda", seed=7)
    expected, direction = with_gradients(fused, case, names, others)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            with_gradients(fused, case, names, tensors, direction)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = with_gradients(fused, case, names, tensors, direction)
    for name, tensor in tensors.items():
        tensor.copy_(others[name])
    graph.replay()
    torch.cuda.synchronize()
    for name, got in captured.items():
        assert torch.equal(got, expected[name]), name


def long_row():
    """65,536 tokens of steps of up to a tenth: a state outlives hundreds of them."""
    case = Mamba3CoreCase(1, 65536, 8, 2, 64, 64, 16)
    tensors = parity.drawn(case, torch.bfloat16, "cuda", seed=8)
    tensors["dt_bias"] -= 3
    return case, tensors


def test_a_row_of_65536_tokens_is_four_that_carry_the_state():
    """Against the definition in float64, which carries its state over 16 parts."""
    fused, definition, names = operators("M")
    case, tensors = long_row()
    options = {key: getattr(case, n) for key, n in names.items()}

    def in_parts(function, tensors, count):
        state, found = None, []
        for rows in tensors["projected"].chunk(count):
            part = tensors | {"projected": rows}
            y, state = function(**part, **options, initial_state=state, return_final_state=True)
            found.append(y)
        return torch.cat(found), state

    expected, last = in_parts(definition, {n: t.double() for n, t in tensors.items()}, 16)
    y, state = in_parts(fused, tensors, 4)
    whole = fused(**tensors, **options)
    assert_within(case, {"y": y}, {"y": expected})
    assert_within(case, {"y": whole}, {"y": expected})
    for name in ("ssm", "k", "v"):
        got, want = getattr(state, name).double(), getattr(last, name)
        assert (got - want).abs().max() <= case.tolerance("y", torch.bfloat16) * want.abs().max()
    off = (state.angle.double() - last.angle) / (2 * math.pi)
    assert 2 * math.pi * (off - off.round()).abs().max() < 1e-3


@pytest.mark.parametrize("letter", ["M", "M-wide"])
def test_pieces_hand_on_state_and_gradient(letter):
    """Against the definition in float64, which takes the row at once."""
    case, (fused, definition, names) = CASES[letter], operators(letter)
    tensors = parity.drawn(case, torch.bfloat16, "cuda", seed=9)
    tensors["dt_bias"] -= 3  # so slow that a state outlives the pieces
    options = {key: getattr(case, n) for key, n in names.items()}
    direction = torch.randn(case.seq, 1, case.heads * case.head_dim, device="cuda").bfloat16()
    _, state = definition(**tensors, **options, return_final_state=True)
    directions = [torch.randn_like(x) for x in state]

    def run(function, tensors, ends):
        leaves = {n: t.detach().requires_grad_() for n, t in tensors.items()}
        wide = torch.promote_types(leaves["projected"].dtype, torch.float32)
        before = [x.detach().to(wide).requires_grad_() for x in state]
        after, outputs, begin = type(state)(*before), [], 0
        for end in ends:
            part = leaves | {"projected": leaves["projected"][begin:end]}
            y, after = function(**part, **options, initial_state=after, return_final_state=True)
            outputs, begin = [*outputs, y], end
        found = (torch.cat(outputs), *after)
        along = [d.to(x.dtype) for d, x in zip((direction, *directions), found, strict=True)]
        return *found, *torch.autograd.grad(found, [*leaves.values(), *before], along)

    expected = run(definition, {n: t.double() for n, t in tensors.items()}, (case.seq,))
    fields = ("angle", "ssm", "k", "v")
    keys = ("y", *fields, *(f"d{n}" for n in tensors), *(f"d{n}" for n in fields))
    for ends in ((case.seq,), (77, 78, 142, case.seq)):
        for name, got, want in zip(keys, run(fused, tensors, ends), expected, strict=True):
            bound = case.tolerance(name if name == "y" else "dprojected", torch.bfloat16)
            off = got.double() - want
            if name == "angle":
                off = off - 2 * math.pi * (off / (2 * math.pi)).round()
            assert off.abs().max() <= bound * want.abs().max(), (name, ends)


def test_angles_after_65536_steps():
    """Summed modulo 2 pi, within 1e-3 rad."""
    from megacpp_mcore.kernels.mamba3_core import around

    case, tensors = long_row()
    sizes = around.Sizes(8, 64, 2, 64, 16, "softplus", 1e-4, 1e-5)
    projected, *parameters, _ = tensors.values()
    found = around.steps(projected, *parameters, None, sizes).theta
    parts = projected.transpose(0, 1).double().split(
        [*case.parts, projected.shape[-1] - sum(case.parts)], -1
    )  # fmt: skip
    dt = torch.nn.functional.softplus(parts[4] + tensors["dt_bias"].double())
    turned = (math.pi * parts[7].tanh()[:, :, None] * dt[..., None]).cumsum(1)
    off = (found.double() - turned) / (2 * math.pi)
    assert 2 * math.pi * (off - off.round()).abs().max() < 1e-3
