"""M2RNN's CUDA kernels, run on the CPU, against the formulas in float64, forward and backward.

What they compute is tested here, shape by shape, and that no warp's result depends on which warp is
faster; tests/gpu/test_m2rnn_gpu.py has what only a GPU can show.
"""

import contextlib
import ctypes
import math
from types import SimpleNamespace

import cuda_on_cpu
import pytest
import torch

from megacpp_mcore.kernels.m2rnn import cuda, launch, schedule
from megacpp_mcore.kernels.m2rnn import m2rnn as reference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        cuda_on_cpu.reason() is not None, reason=f"kernels cannot run here: {cuda_on_cpu.reason()}"
    ),
]

V = 16
# As in tests/gpu/test_m2rnn_gpu.py: what a step is off by, forward and backward, and how long.
STEP_ERROR = {torch.float32: (2**-19, 2**-19)} | dict.fromkeys(
    (torch.bfloat16, torch.float16), (2**-13 + 2**-11, 2**-10 + 2**-10 + 2**-12)
)
LASTING = 64
TANH = {"approximate": 2**-11, "exact": 2**-20}  # how far from tanh


@pytest.fixture(scope="module")
def kernels():
    library = cuda_on_cpu.library(launch.LIBRARY.source)
    library.m2rnn_error.restype = ctypes.c_char_p
    library.m2rnn_params_size.restype = ctypes.c_int64
    assert library.m2rnn_params_size() == ctypes.sizeof(launch.Params)
    for entry in (library.m2rnn_forward, library.m2rnn_backward):
        entry.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    return library


@pytest.fixture(params=[1, 132], ids="processors{}".format)
def on_cpu(kernels, monkeypatch, request):
    """`run` reaches the kernels through cuda.py, whose tensors are on the CPU now.

    On one multiprocessor chains take turns, and backward has them in segments. A test that chooses
    that by itself has ONE_DEVICE.
    """
    monkeypatch.setattr(launch, "kernels", lambda device: kernels)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    stream = SimpleNamespace(cuda_stream=None)
    monkeypatch.setattr(schedule, "multiprocessors", lambda device: request.param)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *args: stream)
    empty = torch.Tensor.new_empty

    def poisoned(tensor, *args, **kwargs):
        made = empty(tensor, *args, **kwargs)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    return kernels


ONE_DEVICE = pytest.mark.parametrize("on_cpu", [132], indirect=True)


def draw(batch, seq, heads, k_dim=64, q_heads=1, k_heads=1, dtype=torch.bfloat16, states=None):
    generator = torch.Generator().manual_seed(seq)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    W = normal(heads, V, V)
    return [
        normal(batch, seq, q_heads, k_dim).to(dtype),
        normal(batch, seq, k_heads, k_dim).to(dtype),
        normal(batch, seq, heads, V).to(dtype),
        (W / W.abs().sum(-2, keepdim=True) / 2).float(),
        (0.95 * torch.sigmoid(2 * normal(batch, seq, heads))).float(),
        torch.tanh(normal(states or batch, heads, k_dim, V)).float(),
    ]


def directions(v, state):
    generator = torch.Generator().manual_seed(1)
    # Eighths: exact in every dtype.
    return [
        (torch.randint(-16, 17, x.shape, generator=generator) / 8).to(x.dtype) for x in (v, state)
    ]


def run(inputs, bounds=None, chunk_size=32, grad_clamp=None, exact_tanh=False):
    """The outputs, and the gradients by the operators' own functions, which autograd would call."""
    q, k, v, W, f, initial = inputs
    options = (chunk_size, grad_clamp)
    y, final, checkpoints = cuda.forward._init_fn(
        q, k, v, W, f, initial, bounds, *options, exact_tanh
    )
    dy, d_final = directions(y, final)
    gradients = cuda.backward._init_fn(dy, d_final, q, k, v, W, f, bounds, checkpoints, *options)
    return [y, final, *gradients]


def expected(inputs, bounds=None, grad_clamp=None):
    leaves = [x.double().requires_grad_() for x in inputs]
    outputs = reference(
        *leaves[:5], initial_state=leaves[5], cu_seqlens=bounds, grad_clamp=grad_clamp
    )
    along = [x.double() for x in directions(inputs[2], inputs[5])]
    return [x.detach() for x in outputs] + list(torch.autograd.grad(outputs, leaves, along))


NAMES = ("y", "final_state", "dq", "dk", "dv", "dW", "df", "dinitial_state")


def assert_close(actual, truth, dtype):
    for name, got, want in zip(NAMES[: len(truth)], actual, truth, strict=True):
        assert got.shape == want.shape and torch.isfinite(got).all(), name
        own = got.dtype if name in ("final_state", "dinitial_state") else dtype
        step = STEP_ERROR[dtype][name.startswith("d")]
        bound = 2 * torch.finfo(own).eps + LASTING * step
        error = (got.double() - want).norm() / want.norm()
        assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}"


@pytest.mark.parametrize("seq", [1, 8, 9, 17, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matches_float64(on_cpu, dtype, seq):
    inputs = draw(1, seq, 2, dtype=dtype)
    assert_close(run(inputs), expected(inputs), dtype)


@ONE_DEVICE
@pytest.mark.parametrize("tanh", TANH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_forward_stays_within_its_derived_bound(on_cpu, dtype, tanh):
    """Element by element, by docs/m2rnn-kernels.md; the number of steps is not in the bound."""
    inputs = draw(1, 65, 2, dtype=dtype)
    y, state, *_ = run(inputs, exact_tanh=tanh == "exact")
    y64, state64, *_ = expected(inputs)
    off = state_bound(tanh)
    assert ((state - state64).abs() <= off).all()
    # The rows' sum, in float32, reads h, at most 1, rounded to the dtype; y is rounded to it.
    half_eps = torch.finfo(dtype).eps / 2
    reading = inputs[0].double().abs().sum(-1, keepdim=True) * (off + half_eps + 64 * 2**-24)
    assert ((y.double() - y64).abs() <= reading + half_eps * (y64.abs() + reading)).all()


def state_bound(tanh):
    """A column of |W| sums up to 1/2 here, and so one of |W - 1| to 3/2 at most."""
    return (2**-12 * 1.5 + TANH[tanh]) / (1 - 0.5)


@ONE_DEVICE
def test_small_gates_keep_their_digits_in_float32(on_cpu):
    """tanh is off by 2^-21 of itself where it is less than 1/4, else by 2^-21: 2^-19 of itself."""
    q, k, v, W, f, initial = draw(1, 1, 3, dtype=torch.float32)
    k = k * 2.0 ** -torch.arange(k.shape[-1]).remainder(16)
    inputs = [q, k, v, W, f, torch.zeros_like(initial)]
    state, truth = run(inputs)[1], expected(inputs)[1]
    assert ((state - truth).abs() <= 2**-19 * truth.abs()).all()


def test_saturated_gates_keep_the_digits_of_their_slope_in_float32(on_cpu):
    """One row and no state: dv is (1 - z^2) k times the state's gradient, value by value.

    The slope's own error is a few roundings; a relative error of tanh's argument y, three roundings
    here, comes in 2 |y| times: 16 * 3 * 2^-24 < 2^-18.
    """
    q, k, v, W, f, initial = draw(1, 1, 3, dtype=torch.float32)
    k = torch.zeros_like(k)
    k[..., 0] = 1.5
    v = torch.linspace(-5.3, 5.3, v.numel()).view_as(v)
    inputs = [torch.zeros_like(q), k, v, W, f, torch.zeros_like(initial)]
    dv, truth = run(inputs)[NAMES.index("dv")], expected(inputs)[NAMES.index("dv")]
    assert (truth != 0).sum() > 40
    assert ((dv - truth).abs() <= 2**-17 * truth.abs()).all()


@pytest.mark.parametrize("heads", [(1, 3), (3, 1)], ids=str)
def test_heads_of_q_and_k(on_cpu, heads):
    inputs = draw(2, 20, 3, q_heads=heads[0], k_heads=heads[1], dtype=torch.float16)
    assert_close(run(inputs, chunk_size=16), expected(inputs), torch.float16)


@pytest.mark.parametrize("k_dim", [32, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_widths(on_cpu, dtype, k_dim):
    inputs = draw(1, 19, 2, k_dim=k_dim, dtype=dtype)
    assert_close(run(inputs), expected(inputs), dtype)


def test_more_blocks_than_multiprocessors(on_cpu):
    """Of the blocks after the first 132 other warps have the same work."""
    inputs = draw(1, 9, 48, k_dim=96)
    assert_close(run(inputs), expected(inputs), torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "chunk_size"),
    [(torch.float32, 16), (torch.float32, 48), (torch.bfloat16, 16), (torch.bfloat16, 32)],
    ids=str,
)
def test_documents_and_the_clamp(on_cpu, dtype, chunk_size):
    bounds = torch.tensor([0, 1, 1, 60, 76, 90], dtype=torch.int32)
    inputs = draw(1, 90, 1, dtype=dtype, states=5)
    actual = run(inputs, bounds, chunk_size, grad_clamp=0.05)
    assert_close(actual, expected(inputs, bounds, grad_clamp=0.05), dtype)


@ONE_DEVICE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_y_of_any_q(on_cpu, dtype):
    """fp16 has neither bfloat16's largest numbers nor its smallest: each step's q has its scale."""
    q, k, v, W, f, initial = draw(1, 70, 2, dtype=dtype)
    sizes = 2.0 ** torch.arange(-105, 105, 3) if dtype == torch.bfloat16 else torch.ones(70)
    q = q * sizes.view(1, 70, 1, 1).to(dtype)
    q[0, 10], q[0, 20, 0, 5], q[0, 30, 0, 5] = 0, math.inf, math.nan
    y, *_ = cuda.forward._init_fn(q, k, v, W, f, initial, None, 32, None, False)
    y64, _ = reference(*(x.double() for x in (q, k, v, W, f)), initial_state=initial.double())
    finite = torch.ones(70, dtype=torch.bool)
    finite[20:21] = finite[30:31] = False
    off = ((y - y64).norm(dim=-1) / y64.norm(dim=-1))[0, finite].nan_to_num(0)
    bound = 2 * torch.finfo(dtype).eps + LASTING * STEP_ERROR[dtype][0]
    assert off.max() <= bound
    assert torch.equal(y[0, 10], torch.zeros_like(y[0, 10]))
    assert y[0, 20].isinf().all() and y[0, 30].isnan().all()


def forward(inputs, bounds=None, chunk_size=32):
    *tensors, initial = inputs
    return cuda.forward._init_fn(*tensors, initial, bounds, chunk_size, None, False)


@ONE_DEVICE
@pytest.mark.parametrize("chunk_size", cuda.CHUNK_SIZES["bfloat16"])
def test_same_bits_however_chains_are_cut_and_bundled(on_cpu, monkeypatch, chunk_size):
    inputs = draw(1, 200, 5, k_dim=32 if chunk_size == 16 else 64)
    results = []
    for at_once in ((5, 1), (4, 1), (3, 1), (1, 1), (2, 3), (1, 3)):
        monkeypatch.setattr(schedule, "forward_schedule", lambda *args, at_once=at_once: at_once)
        results.append(forward(inputs, chunk_size=chunk_size))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


@ONE_DEVICE
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("k_dim", [32, 128])
def test_bundles_that_are_not_full(on_cpu, monkeypatch, heads, k_dim):
    """Documents of no, one, 31, 33 and 135 steps, in bundles of three heads."""
    monkeypatch.setattr(schedule, "forward_schedule", lambda sizes, _: (sizes.bundles(3), 3))
    bounds = torch.tensor([0, 0, 1, 32, 65, 200], dtype=torch.int32)
    inputs = draw(1, 200, heads, k_dim=k_dim, states=5)
    y, state, _ = forward(inputs, bounds)
    y64, state64 = reference(
        *(x.double() for x in inputs[:5]), initial_state=inputs[5].double(), cu_seqlens=bounds
    )
    assert_close((y, state), (y64, state64), torch.bfloat16)


def test_so_many_chains_at_a_time_fill_the_multiprocessors_evenly():
    def at_once(batch, heads, k_dim=64, processors=132, q_heads=1):
        v = torch.empty(batch, 9, heads, V, device="meta")
        q = torch.empty(batch, 9, q_heads, k_dim, device="meta")
        return schedule.forward_schedule(schedule.Sizes(q, q, v, None, 32), processors)

    assert at_once(1, 44) == (44, 1) and at_once(1, 51) == (51, 1)
    assert at_once(4, 44) == (60, 3)  # 120 blocks
    assert at_once(4, 51) == (66, 3)  # of 68: 136 blocks would be two on some
    assert at_once(8, 51) == (66, 3)
    assert at_once(4, 51, q_heads=51) == (132, 1)  # nothing to share: two on each
    assert at_once(1, 3, k_dim=1024, processors=1) == (1, 3)


@ONE_DEVICE
@pytest.mark.parametrize("seq", [16, 33, 100])
@pytest.mark.parametrize("segments", [2, 5])
def test_backward_in_segments(on_cpu, monkeypatch, segments, seq):
    """Each is a block's of its own, that goes on where another has ended."""
    monkeypatch.setattr(schedule, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(schedule, "SEGMENTS", segments)
    inputs = draw(2, seq, 2)
    for clamp in (None, 0.05):
        actual = run(inputs, chunk_size=16, grad_clamp=clamp)
        assert_close(actual, expected(inputs, grad_clamp=clamp), torch.bfloat16)


@pytest.mark.parametrize("chunk_size", [16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_whichever_warp_is_faster(on_cpu, dtype, chunk_size):
    """A barrier that is missing lets a warp read what another has not written, or has written over;
    the drawn order of the threads is another one under every seed."""
    inputs = draw(1, 70, 2, dtype=dtype)
    inputs[5] = 100 * inputs[5]  # above 1, which backward's warps tell each other
    results = []
    for seed in range(4):
        on_cpu.cpu_seed(seed)
        results.append(run(inputs, chunk_size=chunk_size))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


@ONE_DEVICE
def test_same_bits_whichever_block_starts_first(on_cpu, monkeypatch):
    """A block waits for another only if that has started: nothing promises an order of the indices.
    Chains are cut, and backward has segments."""
    monkeypatch.setattr(schedule, "forward_schedule", lambda sizes, processors: (3, 1))
    monkeypatch.setattr(schedule, "backward_segments", lambda sizes, processors: 3)
    inputs, results = draw(1, 200, 5), []
    try:
        for from_last in (0, 1):
            on_cpu.cpu_from_last(from_last)
            results.append(run(inputs, chunk_size=32))
    finally:
        on_cpu.cpu_from_last(0)
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@ONE_DEVICE
def test_a_launch_that_fails_says_why(on_cpu, monkeypatch):
    inputs = draw(1, 9, 1)
    inputs[2] = torch.zeros(9 * V + 1, dtype=torch.bfloat16)[1:].view(1, 9, 1, V)  # not 4-aligned
    monkeypatch.setattr(cuda, "_readable", lambda x: x)
    with pytest.raises(RuntimeError, match="m2rnn_forward: a load that is not aligned, in b"):
        run(inputs)
