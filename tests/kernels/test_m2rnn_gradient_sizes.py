"""The gradients of M2RNN's CUDA kernels whatever the size of what they are made of, on the CPU.

Powers of two pass through the recurrence backwards exactly, so that most of this is bit for bit.
"""

import math

import pytest
import torch
from test_m2rnn_on_cpu import V, directions, draw, kernels, on_cpu, reference  # noqa: F401
from test_m2rnn_on_cpu import pytestmark as can_run

from megacpp_mcore.kernels.m2rnn import cuda

# On one multiprocessor a chain is undone in segments, so that what is carried is handed on, too.
pytestmark = [
    *can_run,
    pytest.mark.usefixtures("on_cpu"),
    pytest.mark.parametrize("on_cpu", [1], indirect=True, ids=[""]),
]

NAMES = ("q", "k", "v", "W", "f", "initial")
BF16 = torch.bfloat16
# What a sum of products with both factors in fp16 is off by, and its sum in bfloat16, in norm.
ROUNDED = 2**-8


def gradients(inputs, dy, d_final, *, bounds=None, chunk=32, clamp=None):
    *tensors, initial = inputs
    *_, kept = cuda.forward._init_fn(*tensors, initial, bounds, chunk, None, True)
    found = cuda.backward._init_fn(dy, d_final, *tensors, bounds, kept, chunk, clamp)
    return dict(zip(NAMES, found, strict=True))


def truth(inputs, dy, d_final, bounds=None, clamp=None):
    leaves = [x.double().requires_grad_() for x in inputs]
    outputs = reference(*leaves[:5], initial_state=leaves[5], cu_seqlens=bounds, grad_clamp=clamp)
    along = [dy.double(), d_final.double()]
    return dict(zip(NAMES, torch.autograd.grad(outputs, leaves, along), strict=True))


def along(inputs):
    return directions(inputs[2], inputs[5])


def off(got, want, kept=()):
    """The norm of the error in units of the truth's, for each place of the dimensions `kept`."""
    summed = [d for d in range(want.dim()) if d not in kept]
    error, size = ((x.double() ** 2).sum(summed).sqrt() for x in (got - want, want))
    return error / size


def assert_each_step(got, want):
    for name in ("q", "k", "v", "f"):
        worst = off(got[name], want[name], kept=(1,)).max()
        # A step's gradient of f is one number a head, and cancels.
        allowed = 2**-2 if name == "f" else 8 * ROUNDED
        assert worst <= allowed, f"{name}: {worst:.2e}"


def scaled(x, power):
    return x * 2.0**power


@pytest.mark.parametrize("clamp", [None, 0.25])
@pytest.mark.parametrize("power", [-100, -14, 9, 90])
def test_gradients_grow_with_what_comes_in(power, clamp):
    inputs = draw(1, 75, 2, dtype=BF16)
    dy, d_final = along(inputs)
    small = gradients(inputs, dy, d_final, clamp=clamp)
    large = gradients(
        inputs, scaled(dy, power), scaled(d_final, power), clamp=clamp and scaled(clamp, power)
    )
    for name in NAMES:
        assert small[name].count_nonzero() > 0
        assert torch.equal(large[name], scaled(small[name], power)), name


@pytest.mark.parametrize(
    ("powers", "grown"),
    [
        ({"q": 40, "dy": -40}, {"q": -40}),
        ({"q": -50, "dy": 50}, {"q": 50}),
        ({"k": 45, "v": -45}, {"k": -45, "v": 45}),
        ({"k": -20, "v": 20}, {"k": 20, "v": -20}),
    ],
    ids=str,
)
def test_factors_of_any_size(powers, grown):
    """A product is the same whichever of its factors is small: so are the gradients it enters."""
    q, k, v, *rest = inputs = draw(1, 41, 2, k_dim=32, dtype=BF16)
    dy, d_final = along(inputs)
    plain = gradients(inputs, dy, d_final)
    factors = {"q": q, "k": k, "v": v, "dy": dy}
    q, k, v, dy = (scaled(x, powers.get(name, 0)) for name, x in factors.items())
    other = gradients([q, k, v, *rest], dy, d_final)
    for name in NAMES:
        assert torch.equal(other[name], scaled(plain[name], grown.get(name, 0))), name


@pytest.mark.parametrize("growth", [-1, 1])
def test_dy_of_each_step_its_size(growth):
    inputs = draw(1, 100, 2, dtype=BF16)
    dy, d_final = along(inputs)
    dy = dy * 2.0 ** (growth * torch.arange(-50, 50)).view(1, 100, 1, 1).to(BF16)
    d_final = scaled(d_final, 50 * growth)
    got, want = gradients(inputs, dy, d_final), truth(inputs, dy, d_final)
    assert_each_step(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("step", [0, 7, 8, 15, 16, 24, 40])
def test_one_step_with_a_large_dy(step, dtype):
    """Before it all gradients are as large as its own, behind it none is."""
    inputs = draw(1, 41, 2, k_dim=32, dtype=dtype)
    dy, d_final = along(inputs)
    dy, d_final = scaled(dy, -4), scaled(d_final, -4)
    dy[:, step] *= 2**12
    got, want = gradients(inputs, dy, d_final), truth(inputs, dy, d_final)
    assert_each_step(got, want)
    assert off(got["W"], want["W"]) <= 2 * ROUNDED
    assert off(got["initial"], want["initial"]) <= ROUNDED


def test_rows_of_any_size():
    """The state's rows know nothing of each other, those of different warps not even a scale."""
    inputs = draw(1, 41, 2, dtype=BF16)
    dy, d_final = along(inputs)
    sizes = 2.0 ** torch.tensor([-60, 40, 0, 20]).repeat_interleave(16)
    inputs[0] = inputs[0] * sizes.to(BF16)
    d_final = d_final * sizes[:, None]
    got, want = gradients(inputs, dy, d_final), truth(inputs, dy, d_final)
    for rows in torch.arange(64).split(16):
        assert off(got["k"][..., rows], want["k"][..., rows]) <= 2 * ROUNDED
        assert off(got["initial"][:, :, rows], want["initial"][:, :, rows]) <= ROUNDED


def test_documents_of_any_size():
    bounds = torch.tensor([0, 1, 34, 34, 50, 91], dtype=torch.int32)
    q, k, v, W, f, initial = inputs = draw(1, 91, 2, k_dim=32, dtype=BF16, states=5)
    dy, d_final = along(inputs)
    for document, power in enumerate((0, 80, -80, -70, 30)):
        start, end = bounds[document : document + 2].tolist()
        dy[:, start:end] *= 2.0**power
        d_final[document] *= 2.0**power
    packed = gradients(inputs, dy, d_final, bounds=bounds)
    for document in range(5):
        start, end = bounds[document : document + 2].tolist()
        if start == end:
            assert torch.equal(packed["initial"][document], d_final[document])
            continue
        own = gradients(
            [*(x[:, start:end] for x in (q, k, v)), W, f[:, start:end], initial[[document]]],
            dy[:, start:end].contiguous(), d_final[[document]],
        )  # fmt: skip
        assert torch.equal(packed["initial"][[document]], own["initial"])
        for name in ("q", "k", "v", "f"):
            assert torch.equal(packed[name][:, start:end], own[name]), name


@pytest.mark.parametrize("chunk", [16, 32])
def test_states_near_the_largest_of_fp16(chunk):
    inputs = draw(1, 41, 2, k_dim=32, dtype=BF16)
    inputs[5] = 6e4 * inputs[5].sign()
    inputs[4] = inputs[4].clamp(max=0.5)
    dy, d_final = along(inputs)
    got, want = gradients(inputs, dy, d_final, chunk=chunk), truth(inputs, dy, d_final)
    # 11 bits of such a state do not say where tanh is: what goes through it has its error then.
    assert all(x.isfinite().all() for x in got.values())
    for name in ("q", "f", "initial"):
        assert off(got[name], want[name]) <= 4 * ROUNDED, name
    for name in ("q", "k", "v"):
        assert off(got[name][:, 24:], want[name][:, 24:]) <= 4 * ROUNDED, name


@pytest.mark.parametrize(("row", "f"), [(1, 0.5), (4, 0.97), (8, 0.999), (8, 0.99999)])
def test_rows_of_W_of_any_sum(row, f):
    """The gradient might grow `row` times in a step, and what tanh's argument gets of it is
    1 - f of that at most."""
    inputs = draw(1, 41, 2, dtype=BF16)
    inputs[3] = row * inputs[3] / inputs[3].abs().sum(-1, keepdim=True)
    inputs[4] = torch.full_like(inputs[4], f)
    dy, d_final = along(inputs)
    got, want = gradients(inputs, dy, d_final), truth(inputs, dy, d_final)
    for name in NAMES:
        assert off(got[name], want[name]) <= 2 * ROUNDED, f"{name}: {off(got[name], want[name])}"


def test_rows_of_W_that_only_seem_to_let_gradients_grow():
    """The state's last column, which is 0 throughout, goes into all others, and no other anywhere:
    what one step makes of the gradient, large as it is, goes no further."""
    inputs = draw(1, 41, 2, dtype=BF16)
    inputs[2][..., -1] = 0
    inputs[3] = torch.zeros_like(inputs[3])
    inputs[3][..., -1, :-1] = 4
    inputs[4], inputs[5] = torch.zeros_like(inputs[4]), torch.zeros_like(inputs[5])
    dy, d_final = along(inputs)
    got, want = gradients(inputs, dy, d_final), truth(inputs, dy, d_final)
    for name in ("q", "k"):
        assert off(got[name], want[name]) <= 2 * ROUNDED, f"{name}: {off(got[name], want[name])}"
    assert off(got["v"][..., :-1], want["v"][..., :-1]) <= 2 * ROUNDED


@pytest.mark.parametrize("late", [False, True])
def test_gradients_that_do_grow(late):
    """As much as W lets them: by 4 in each step, or by 40 in two of them, after which the kernel
    changes its scale. The state is 0, so that tanh is nowhere flat."""
    inputs = draw(1, 41, 2, k_dim=32, dtype=BF16)
    inputs[2], inputs[5] = torch.zeros_like(inputs[2]), torch.zeros_like(inputs[5])
    inputs[3] = torch.eye(V).roll(5, 1).expand(2, V, V) * (40 if late else 4)
    inputs[4] = torch.zeros_like(inputs[4])
    if late:
        inputs[4] = inputs[4] + (torch.arange(41) % 24 // 2 != 4).view(1, 41, 1)
    dy, d_final = along(inputs)
    got, want = gradients(inputs, dy, d_final), truth(inputs, dy, d_final)
    assert off(got["initial"], want["initial"]) <= ROUNDED
    moving = inputs[4][0, :, 0] < 1
    worst = off(got["v"][:, moving], want["v"][:, moving], kept=(1,)).max()
    assert worst <= 4 * ROUNDED, f"{worst:.2e}"


@pytest.mark.parametrize("seed", range(4))
def test_one_element_has_a_gradient(seed):
    """In each head and each of the warps' 16 rows another one."""
    inputs = draw(1, 9, 4, dtype=BF16)
    generator = torch.Generator().manual_seed(seed)
    _, d_final = along(inputs)
    d_final.zero_()
    for head in range(4):
        for first in range(0, 64, 16):
            row, column = torch.randint(16, (2,), generator=generator).tolist()
            d_final[0, head, first + row, column] = 1
    dy = torch.zeros_like(inputs[2])
    got, want = gradients(inputs, dy, d_final), truth(inputs, dy, d_final)
    for rows in torch.arange(64).split(16):
        worst = off(got["initial"][:, :, rows], want["initial"][:, :, rows], kept=(1,)).max()
        assert worst <= ROUNDED, f"{worst:.2e}"


def test_a_gradient_that_lasts():
    """Nothing rounds the same way at every step, 1 - f neither, which lies halfway between two
    numbers of fp16 here. The state is so small that tanh is the identity, and fp16 has W."""
    steps = 400
    inputs = draw(1, steps, 1, k_dim=32, dtype=BF16)
    inputs[2] = torch.zeros_like(inputs[2])
    turns = torch.tensor([[61.0, 19.0], [-19.0, 61.0]]) / 64
    inputs[3] = torch.block_diag(*[turns] * (V // 2))[None]
    inputs[4] = torch.full_like(inputs[4], 1 - (0.1 + 2**-15 - 0.1 % 2**-14))
    inputs[5] = 2.0**-10 * inputs[5]
    dy, d_final = torch.zeros_like(inputs[2]), along(inputs)[1]
    got, want = gradients(inputs, dy, d_final), truth(inputs, dy, d_final)
    error = off(got["initial"], want["initial"])
    assert error <= 2**-9, f"{error:.2e}"


@pytest.mark.parametrize("clamp", [None, 0.25])
@pytest.mark.parametrize("given", [False, True])
def test_nothing_comes_of_nothing(given, clamp):
    inputs = draw(1, 41, 2, k_dim=32, dtype=BF16)
    dy, d_final = (torch.zeros_like(x) if given else None for x in along(inputs))
    for name, gradient in gradients(inputs, dy, d_final, clamp=clamp).items():
        assert torch.equal(gradient, torch.zeros_like(gradient)), name


def test_only_the_first_steps_have_a_gradient():
    inputs = draw(1, 75, 2, k_dim=32, dtype=BF16)
    dy, _ = along(inputs)
    dy[:, 20:] = 0
    got = gradients(inputs, dy, None)
    first = gradients([*(x[:, :20] for x in inputs[:3]), inputs[3], inputs[4][:, :20], inputs[5]],
                      dy[:, :20].contiguous(), None)  # fmt: skip
    for name in ("q", "k", "v", "f"):
        assert torch.equal(got[name][:, :20], first[name]), name
        assert got[name][:, 20:].count_nonzero() == 0, name
    assert torch.equal(got["initial"], first["initial"])


@pytest.mark.parametrize("where", ["dy", "d_final"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows(bad, where):
    """It reaches all gradients before it; other heads and units behind it have nothing of it."""
    inputs = draw(1, 41, 2, dtype=BF16)
    dy, d_final = along(inputs)
    plain = gradients(inputs, dy, d_final)
    step = 20 if where == "dy" else 40
    if where == "dy":
        dy[0, step, 0, 3] = bad
    else:
        d_final[0, 0, :, 3] = bad
    got = gradients(inputs, dy, d_final)
    for name in ("k", "v", "f"):
        before = got[name][:, : step + 1, 0]
        lost = before.isfinite().flatten(2).any(-1) if before.dim() > 2 else before.isfinite()
        assert not lost.any(), name
    assert not got["initial"][0, 0].isfinite().any()
    assert not got["W"][0].isfinite().any()
    for name in ("v", "f"):
        assert torch.equal(got[name][:, :, 1], plain[name][:, :, 1]), name
        assert torch.equal(got[name][:, 24:, 0] if where == "dy" else plain[name][:, 24:, 0],
                           plain[name][:, 24:, 0]), name  # fmt: skip
    assert torch.equal(got["W"][1], plain["W"][1])
    assert torch.equal(got["initial"][0, 1], plain["initial"][0, 1])


def test_what_the_clamp_cannot_reach_is_as_without_it():
    inputs = draw(1, 75, 2, dtype=BF16)
    dy, d_final = (scaled(x, -12) for x in along(inputs))
    plain, clamped = (gradients(inputs, dy, d_final, clamp=clamp) for clamp in (None, 1.0))
    assert all(torch.equal(plain[name], clamped[name]) for name in NAMES)


@pytest.mark.parametrize("power", [-2, 0, 2])
def test_a_clamp_that_some_units_reach(power):
    """Units of 8 steps leave the clamp out where a bound of the gradient's size is below it."""
    inputs = draw(1, 150, 2, dtype=BF16)
    inputs[4] = 0.8 * inputs[4]  # a gradient is gone after a unit
    dy, d_final = along(inputs)
    sizes = torch.tensor([0, -12, -3, -6, -1, -9]).repeat_interleave(25)
    dy = dy * 2.0 ** (sizes + power).view(1, 150, 1, 1).to(BF16)
    got, want = (f(inputs, dy, scaled(d_final, power), clamp=0.5) for f in (gradients, truth))
    assert_each_step(got, want)
    free = truth(inputs, dy, scaled(d_final, power))
    assert off(free["k"], want["k"], kept=(1,)).max() > 0.1  # something is clamped


@pytest.mark.parametrize("gate", [5.0, -8.0])
def test_with_a_clamp_of_one_large_gates_keep_finite_gradients(gate):
    """f + (1 - f) W of at least 5, around a state of zero, where tanh does not limit it: a gradient
    grows by 2^18 within 8 steps. The shipped recipes clamp at 1, as XMA does."""
    q, k, v, W, f, initial = draw(1, 64, 2, dtype=BF16)
    f = torch.full_like(f, 0.25)
    W = torch.eye(V).expand_as(W) * (gate - 0.25) / 0.75
    inputs = [q, torch.zeros_like(k), v, W.contiguous(), f, torch.zeros_like(initial)]
    dy, d_final = along(inputs)
    grown = gradients(inputs, dy, d_final)
    assert not all(x.isfinite().all() for x in grown.values())
    held = gradients(inputs, dy, d_final, clamp=1.0)
    assert all(x.isfinite().all() for x in held.values())
    want = truth(inputs, dy, d_final, clamp=1.0)
    # Nearly every element stands at the limit, which both have exactly. A state of zero gives q, v,
    # W and f none.
    for name, expected in want.items():
        if name in ("k", "initial"):
            assert off(held[name], expected) <= 8 * ROUNDED, name
        else:
            assert not expected.any() and not held[name].any(), name
