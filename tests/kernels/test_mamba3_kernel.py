"""Mamba-3 scan: the recurrence in numpy, chunked against sequential, states and documents."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.mamba3 import Mamba3State, mamba3_scan, mamba3_step
from megacpp_mcore.kernels.mamba3.inputs import prepare
from megacpp_mcore.kernels.mamba3.reference import mamba3_sequential

# B, S, H, G, N, P, A, R (None: SISO). A full, partial and single rotation; groups 1, some, H.
SHAPES = {
    "siso": (2, 37, 4, 2, 8, 5, 4, None),
    "siso-partial-rope": (1, 29, 3, 1, 10, 4, 2, None),
    "mimo": (2, 21, 4, 4, 8, 3, 4, 3),
    "mimo-partial-rope": (1, 33, 6, 2, 12, 2, 1, 2),
    "mimo-rank-1": (1, 9, 2, 1, 4, 2, 2, 1),
}
PER_TOKEN = ("q", "k", "v", "adt", "dt", "trap", "angles", "z")


def make(shape, dtype=torch.float64, seed=0, angle_heads=None):
    """Random leaf arguments of mamba3_scan."""
    B, S, H, G, N, P, A, R = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    rank = () if R is None else (R,)
    dt = F.softplus(normal(B, S, H) - 1)
    arguments = {
        "q": normal(B, S, *rank, G, N),
        "k": normal(B, S, *rank, G, N),
        "v": normal(B, S, H, P),
        "adt": -F.softplus(normal(B, S, H)) * dt,
        "dt": dt,
        "trap": normal(B, S, H),
        "angles": normal(B, S, angle_heads or H, A),
        "q_bias": normal(H, *rank, N),
        "k_bias": normal(H, *rank, N),
        "D": normal(H),
        "z": normal(B, S, H, P),
    }
    if R is not None:
        arguments |= {f"mimo_{name}": normal(H, R, P) for name in ("v", "z", "out")}
    keep_wide = () if dtype == torch.float64 else ("adt", "dt")
    return {
        name: tensor.to(torch.float32 if name in keep_wide else dtype).requires_grad_()
        for name, tensor in arguments.items()
    }


def random_state(shape, seed=1):
    B, _, H, _, N, P, A, R = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()

    rank = () if R is None else (R,)
    return Mamba3State(normal(B, H, A), normal(B, H, P, N), normal(B, *rank, H, N), normal(B, H, P))


def reduction(shape):
    """The longest sum behind any value or gradient: all tokens, times the dot over N R or P R."""
    B, S, _, _, N, P, _, R = shape
    return B * S + max(N, P) * (R or 1)


def assert_close(actual, expected, shape, dtype=torch.float64, what=""):
    """A sum of n terms rounds at most n times by eps of the largest, and a value passes through
    three such sums (scores, state, output). Storing it in `dtype` rounds once more, by half an
    eps."""
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    stored = torch.finfo(dtype).eps / 2
    tolerance = (3 * eps * reduction(shape) + stored) * expected.detach().abs().max().double()
    error = (actual.detach().double() - expected.detach().double()).abs().max()
    assert error <= tolerance, f"{what}: error {error:.3e} > tolerance {tolerance:.3e}"


def assert_same_gradients(outputs, expected_outputs, leaves, expected_leaves, shape, **kwargs):
    """Gradients of one random projection of all outputs, exact in their dtype, for every leaf."""
    generator = torch.Generator().manual_seed(7)
    directions = [
        torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in outputs
    ]
    both = []
    for ys, xs in ((outputs, leaves), (expected_outputs, expected_leaves)):
        loss = sum((y.double() * d).sum() for y, d in zip(ys, directions, strict=True))
        both.append(torch.autograd.grad(loss, list(xs.values())))
    for name, actual, expected in zip(expected_leaves, *both, strict=True):
        assert expected.abs().max() > 0, f"{name} gets no gradient: nothing was tested"
        assert_close(actual, expected, shape, what=f"d{name}", **kwargs)


def recurrence(arguments, state=None):
    """The recurrence of the paper for one row and head at a time, in numpy, rank by rank."""
    a = {name: tensor.detach().numpy() for name, tensor in arguments.items()}
    mimo = "mimo_v" in a
    q, k = (a["q"], a["k"]) if mimo else (a["q"][:, :, None], a["k"][:, :, None])
    q_bias, k_bias = (a[n] if mimo else a[n][:, None] for n in ("q_bias", "k_bias"))
    B, S, R, G, N = q.shape
    H, P = a["v"].shape[2:]
    A = a["angles"].shape[-1]
    pairs = [(i, i + N // 2) if mimo else (2 * i, 2 * i + 1) for i in range(A)]

    def turn(x, theta):
        x = x.copy()
        for (i, j), angle in zip(pairs, theta, strict=True):
            x[i], x[j] = (
                x[i] * math.cos(angle) - x[j] * math.sin(angle),
                x[i] * math.sin(angle) + x[j] * math.cos(angle),
            )
        return x

    out = np.zeros((B, S, H, P))
    for b, h in np.ndindex(B, H):
        g, up = h // (H // G), a["mimo_v"][h] if mimo else np.ones((1, P))
        theta, ssm = np.zeros(A), np.zeros((P, N))
        last_k, last_v = np.zeros((R, N)), np.zeros(P)
        if state is not None:
            theta, ssm, last_k, last_v = (
                tensor[b, ..., h, :].detach().numpy() if i == 2 else tensor[b, h].detach().numpy()
                for i, tensor in enumerate(state)
            )
            last_k = last_k.reshape(R, N)
        for t in range(S):
            dt, lam = a["dt"][b, t, h], 1 / (1 + math.exp(-a["trap"][b, t, h]))
            alpha = math.exp(a["adt"][b, t, h])
            raw = a["angles"][b, t, h % a["angles"].shape[2]]
            theta = (theta + math.pi * np.tanh(raw) * dt) % (2 * math.pi)
            now_k = np.stack([turn(k[b, t, r, g] + k_bias[h, r], theta) for r in range(R)])
            v = a["v"][b, t, h]
            ssm = alpha * ssm
            for r in range(R):
                ssm = ssm + (1 - lam) * dt * alpha * np.outer(last_v * up[r], last_k[r])
                ssm = ssm + lam * dt * np.outer(v * up[r], now_k[r])
            for r in range(R):
                y = ssm @ turn(q[b, t, r, g] + q_bias[h, r], theta) + a["D"][h] * v * up[r]
                z = a["z"][b, t, h] * (a["mimo_z"][h, r] if mimo else 1)
                y = y * z / (1 + np.exp(-z))
                out[b, t, h] += y * (a["mimo_out"][h, r] if mimo else 1)
            last_k, last_v = now_k, v
    return torch.from_numpy(out)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("angle_heads", [None, 1], ids=["angles-own", "angles-shared"])
def test_sequential_and_chunked_are_the_recurrence(shape, angle_heads):
    arguments = make(shape, angle_heads=angle_heads)
    expected = recurrence(arguments)
    y, _ = mamba3_sequential(prepare(**arguments))
    assert_close(y, expected, shape, what="sequential")
    assert_close(mamba3_scan(**arguments, chunk_size=8), expected, shape, what="chunked")


def test_a_state_enters_the_recurrence():
    for shape in (SHAPES["siso"], SHAPES["mimo"]):
        arguments, state = make(shape), random_state(shape)
        expected = recurrence(arguments, state)
        y, _ = mamba3_sequential(prepare(**arguments), state)
        assert_close(y, expected, shape)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("chunk_size", [1, 8, 64])
def test_chunked_is_sequential_forward_and_backward(shape, chunk_size):
    """In float64, outputs, final states and the gradient of every argument, initial state too."""
    arguments, state = make(shape), random_state(shape)
    truth, final = mamba3_sequential(prepare(**arguments), state)
    y, observed = mamba3_scan(
        **arguments, chunk_size=chunk_size, initial_state=state, return_final_state=True
    )
    assert_close(y, truth, shape, what="y")
    for name, actual, expected in zip(final._fields, observed, final, strict=True):
        assert_close(actual, expected, shape, what=f"final {name}")
    leaves = arguments | {f"state_{name}": tensor for name, tensor in state._asdict().items()}
    assert_same_gradients((y, *observed), (truth, *final), leaves, leaves, shape)


@pytest.mark.parametrize("shape", [SHAPES["siso"], SHAPES["mimo"]], ids=["siso", "mimo"])
def test_no_gate_and_no_skip(shape):
    arguments = make(shape)
    for name in ("D", "z", "mimo_z"):
        arguments.pop(name, None)
    truth, _ = mamba3_sequential(prepare(**arguments))
    y = mamba3_scan(**arguments, chunk_size=8)
    assert_close(y, truth, shape)
    assert_same_gradients((y,), (truth,), arguments, arguments, shape)


@pytest.mark.parametrize("shape", [SHAPES["siso"], SHAPES["mimo"]], ids=["siso", "mimo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_low_precision_inputs_against_float64(shape, dtype):
    """The same rounded inputs in float64 are the truth: left is float32 arithmetic inside, and
    rounding y and the gradients to the inputs' dtype."""
    low = make(shape, dtype)
    high = {name: tensor.detach().double().requires_grad_() for name, tensor in low.items()}
    truth, _ = mamba3_sequential(prepare(**high))
    y = mamba3_scan(**low, chunk_size=8)
    assert y.dtype == dtype
    assert_close(y, truth, shape, dtype)
    assert_same_gradients((y,), (truth,), low, high, shape, dtype=dtype)


@pytest.mark.parametrize("shape", [SHAPES["siso"], SHAPES["mimo"]], ids=["siso", "mimo"])
def test_steps_continue_a_prompt(shape):
    """Prompt by scan, the rest token by token: the outputs of one scan over everything."""
    arguments = make(shape)
    whole, final = mamba3_scan(**arguments, chunk_size=8, return_final_state=True)
    prompt = shape[1] // 2

    def part(start, stop):
        return {n: t[:, start:stop] if n in PER_TOKEN else t for n, t in arguments.items()}

    y, state = mamba3_scan(**part(0, prompt), chunk_size=4, return_final_state=True)
    outputs = [y]
    for t in range(prompt, shape[1]):
        token = {n: x.squeeze(1) if n in PER_TOKEN else x for n, x in part(t, t + 1).items()}
        y, state = mamba3_step(**token, state=state)
        outputs.append(y.unsqueeze(1))
    assert_close(torch.cat(outputs, dim=1), whole, shape)
    for name, actual, expected in zip(state._fields, state, final, strict=True):
        assert_close(actual, expected, shape, what=name)


@pytest.mark.parametrize("shape", [SHAPES["siso"], SHAPES["mimo"]], ids=["siso", "mimo"])
@pytest.mark.parametrize("chunk_size", [4, 16])
@pytest.mark.parametrize("kernel", ["sequential", "chunked"])
def test_packed_documents_are_separate_sequences(shape, chunk_size, kernel):
    """Offsets inside chunks, at chunk borders, an empty and a one-token document, and a tail."""
    shape = (1, *shape[1:])
    arguments = make(shape)
    offsets = [0, 1, 5, 8, 8, 16, shape[1] - 2]
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    separate = torch.cat(
        [
            mamba3_scan(
                **{n: t[:, a:b] if n in PER_TOKEN else t for n, t in arguments.items()},
                chunk_size=64,
            )
            for a, b in zip(offsets, [*offsets[1:], shape[1]], strict=True)
            if b > a
        ],
        dim=1,
    )
    if kernel == "chunked":
        packed = mamba3_scan(**arguments, chunk_size=chunk_size, cu_seqlens=cu_seqlens)
    else:
        packed, _ = mamba3_sequential(prepare(**arguments, cu_seqlens=cu_seqlens))
    assert_close(packed, separate, shape)
    assert_same_gradients((packed,), (separate,), arguments, arguments, shape)


def test_gradcheck():
    """Against finite differences, in every argument and the state."""
    shape = (1, 5, 2, 1, 4, 2, 1, None)
    arguments, state = make(shape), random_state(shape)
    names = list(arguments)

    def scan(*tensors):
        return mamba3_scan(
            **dict(zip(names, tensors[: len(names)], strict=True)),
            chunk_size=3,
            initial_state=Mamba3State(*tensors[len(names) :]),
            return_final_state=True,
        )[0]

    assert torch.autograd.gradcheck(scan, (*arguments.values(), *state), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_strong_decay_and_still_tokens_stay_finite(dtype):
    """Sums of A dt of -1e6 a chunk (their exp's inverse overflows) next to dt = 0 and A dt = 0."""
    shape = (1, 48, 2, 1, 8, 4, 4, None)
    arguments = {n: t.detach().clone() for n, t in make(shape, dtype).items()}
    arguments["adt"][:, ::3] = -5e4
    arguments["adt"][:, 1::6] = 0
    arguments["dt"][:, 1::6] = 0
    arguments["trap"][:, ::5] = 100
    low = {n: t.requires_grad_() for n, t in arguments.items()}
    high = {n: t.detach().double().requires_grad_() for n, t in low.items()}
    for cu_seqlens in (None, torch.tensor([0, 7, 30])):
        truth, _ = mamba3_sequential(prepare(**high, cu_seqlens=cu_seqlens))
        y = mamba3_scan(**low, chunk_size=32, cu_seqlens=cu_seqlens)
        assert_close(y, truth, shape, dtype)
        assert_same_gradients((y,), (truth,), low, high, shape, dtype=dtype)


def test_a_strong_decay_does_not_blur_the_weak_ones_after_it():
    """float32 sums near -1e6 keep steps of 0.06: as their difference each decay would be noise."""
    shape = (1, 32, 1, 1, 4, 2, 2, None)
    arguments = {n: t.detach().clone() for n, t in make(shape, torch.float32).items()}
    arguments["adt"][:, 0] = -1e6
    truth, _ = mamba3_sequential(prepare(**{n: t.double() for n, t in arguments.items()}))
    y = mamba3_scan(**arguments, chunk_size=32)
    assert_close(y, truth, shape, torch.float32)


def test_angles_do_not_drift_with_the_length():
    """In float32, summing S turns adds what summing one chunk rounds (its angle reaches
    chunk * pi * dt), times the root of the number of chunks; one sum over S adds far more."""
    shape = (1, 16384, 1, 1, 4, 1, 2, None)
    arguments = {n: t.detach() for n, t in make(shape, torch.float32).items()}
    arguments["dt"] = torch.full_like(arguments["dt"], 0.1)
    arguments["adt"] = -arguments["dt"]
    arguments["angles"] = arguments["angles"].abs()
    chunk = 64
    _, state = mamba3_scan(**arguments, chunk_size=chunk, return_final_state=True)
    turns = math.pi * torch.tanh(arguments["angles"]) * arguments["dt"].unsqueeze(-1)
    off = torch.remainder(state.angle - turns.double().sum(1) + math.pi, 2 * math.pi) - math.pi
    chunk_error = torch.finfo(torch.float32).eps * chunk * math.pi * 0.1
    assert off.abs().max() <= chunk_error * math.sqrt(shape[1] / chunk)


SISO, MIMO = SHAPES["siso"], SHAPES["mimo"]
REFUSALS = {
    "rank of q": (SISO, {"q": torch.zeros(2, 37, 8)}, "q has 3 dimensions"),
    "mimo tensor for siso": (SISO, {"mimo_v": torch.zeros(4, 3, 5)}, "mimo_v is given"),
    "mimo without output": (MIMO, {"mimo_out": None}, "mimo_v, mimo_z is given"),
    "gate without mimo_z": (MIMO, {"mimo_z": None}, "z and mimo_z go together"),
    "k of another shape": (SISO, {"k": torch.zeros(2, 37, 1, 8)}, "k has shape"),
    "dt transposed": (SISO, {"dt": torch.zeros(2, 4, 37)}, "dt has shape"),
    "dt in bfloat16": (SISO, {"dt": torch.zeros(2, 37, 4).bfloat16()}, "dt is torch.bfloat16"),
    "adt in half": (SISO, {"adt": torch.zeros(2, 37, 4).half()}, "adt is torch.float16"),
    "too many angles": (
        SISO,
        {"angles": torch.zeros(2, 37, 4, 5)},
        "5 angles for a state dim of 8",
    ),
    "angles of some heads": (SISO, {"angles": torch.zeros(2, 37, 2, 4)}, "angles has 2 heads"),
    "angles without heads": (SISO, {"angles": torch.zeros(2, 37, 4)}, "angles has shape"),
    "heads over groups": (SISO, {"v": torch.zeros(2, 37, 3, 5)}, "no multiple of q's 2 groups"),
    "v without heads": (SISO, {"v": torch.zeros(2, 37, 20)}, "v has shape"),
    "odd state": (SISO, {"q": torch.zeros(2, 37, 2, 7)}, "must be even"),
    "empty": (SISO, {"q": torch.zeros(2, 0, 2, 8)}, "sequence is empty"),
    "chunk size": (SISO, {"chunk_size": 0}, "chunk_size is 0"),
    "documents in a batch": (SISO, {"cu_seqlens": torch.tensor([0, 37])}, "the batch is 2"),
    "states and documents": (
        SISO,
        {"cu_seqlens": torch.tensor([0, 37]), "return_final_state": True},
        "one by one",
    ),
    "state of another size": (
        SISO,
        {"initial_state": random_state((2, 1, 4, 1, 8, 6, 4, None))},
        "initial_state.ssm has shape",
    ),
}


@pytest.mark.parametrize("shape, change, message", REFUSALS.values(), ids=REFUSALS)
def test_refusals(shape, change, message):
    with pytest.raises(MegacppError, match=message):
        mamba3_scan(**(make(shape) | change))


@pytest.mark.parametrize("offsets", [[1, 37], [0, 20, 10, 37], [0, 38], [0]])
def test_refuses_bad_offsets(offsets):
    arguments = make((1, *SISO[1:]))
    with pytest.raises(MegacppError, match="cu_seqlens"):
        mamba3_scan(**arguments, cu_seqlens=torch.tensor(offsets))
