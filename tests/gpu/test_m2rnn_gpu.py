"""M2RNN's CUDA kernels against the formulas in float64, forward and backward, on a GPU.

W is a contraction here (|h W| at most half of |h| for a row's largest element), so that an error
fades instead of growing with the steps, and a bound can be derived: what one step adds, times how
long it lasts.
"""

import math

import pytest
import torch

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.m2rnn import m2rnn as reference
from megacpp_mcore.kernels.m2rnn.launch import LIBRARY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and LIBRARY.reason(), reason=str(LIBRARY.reason())
    ),
]

NAMES = ("q", "k", "v", "W", "f", "initial_state")
V = 16
TANH = {"approximate": 2**-16, "exact": 2**-20}  # how far from tanh, with 16-bit inputs
# What a step is off by, relative to the largest state or gradient: see
# docs/m2rnn-kernels.md. With
# 16-bit inputs h goes to 11 bits for h (W - 1), at most 3/2 of |h| here; backwards the gradient of
# the state, 1 - f, 1 - z^2, both their products and W go to 11 bits, and z, off by 2^-16 and kept
# to 2^-12, makes 1 - z^2 off by twice that.
STEP_ERROR = {
    torch.float32: (2**-20 + 2**-21, 2**-20 + 2**-21),
    torch.bfloat16: (1.5 * 2**-12 + 2**-16, 6 * 2**-12 + 2 * (2**-12 + 2**-16)),
    torch.float16: (1.5 * 2**-12 + 2**-16, 6 * 2**-12 + 2 * (2**-12 + 2**-16)),
}
LASTING = 64  # steps: f is at most 0.95 here, and W halves; gradients run through two recurrences
DTYPES = [torch.float32, torch.bfloat16]


def kernel():
    from megacpp_mcore.kernels.m2rnn import cuda

    return cuda.m2rnn


def draw(batch, seq, heads, k_dim=64, q_heads=1, k_heads=1, dtype=torch.float32, states=None):
    seed = torch.randint(2**31, ()).item()
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64)

    W = normal(heads, V, V)
    return {
        "q": normal(batch, seq, q_heads, k_dim).to(dtype),
        "k": normal(batch, seq, k_heads, k_dim).to(dtype),
        "v": normal(batch, seq, heads, V).to(dtype),
        "W": (W / W.abs().sum(-2, keepdim=True) / 2).float(),
        "f": (0.95 * torch.sigmoid(2 * normal(batch, seq, heads))).float(),
        "initial_state": torch.tanh(normal(states or batch, heads, k_dim, V)).float(),
    }


def run(function, inputs, wide=False, **options):
    leaves = {n: (x.double() if wide else x).detach().requires_grad_() for n, x in inputs.items()}
    tensors = [leaves[n] for n in NAMES[:5]]
    y, state = function(*tensors, initial_state=leaves["initial_state"], **options)
    generator = torch.Generator("cuda").manual_seed(1)
    # Eighths: exact in every dtype.
    directions = [
        torch.randint(-16, 17, x.shape, generator=generator, device="cuda") / 8 for x in (y, state)
    ]
    torch.autograd.backward(
        (y, state), [d.to(x.dtype) for d, x in zip(directions, (y, state), strict=True)]
    )
    gradients = {f"d{name}": leaf.grad for name, leaf in leaves.items()}
    return {"y": y.detach(), "final_state": state.detach()} | gradients


def assert_close(actual, expected, dtype):
    for name, want in expected.items():
        got = actual[name]
        assert got.shape == want.shape and torch.isfinite(got).all(), name
        # Rounding to the tensor's own dtype; of a sum's operands to the inputs', too.
        rounding = 2 * torch.finfo(got.dtype).eps
        if name not in ("final_state", "dinitial_state"):
            rounding = 2 * torch.finfo(dtype).eps
        step = STEP_ERROR[dtype][name.startswith("d")]
        error = (got.double() - want).norm() / want.norm()
        bound = rounding + LASTING * step
        assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}"


@pytest.mark.parametrize("seq", [1, 7, 8, 9, 16, 17, 63, 64, 65, 200, 4097])
@pytest.mark.parametrize("dtype", STEP_ERROR, ids=str)
def test_matches_float64(dtype, seq):
    inputs = draw(2, seq, 3, dtype=dtype)
    expected = run(reference, inputs, wide=True)
    for tanh in TANH:
        assert_close(run(kernel(), inputs, tanh=tanh), expected, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_chains_that_are_cut(dtype, monkeypatch):
    """The few heads of other tests have multiprocessors of their own."""
    from megacpp_mcore.kernels.m2rnn import schedule

    monkeypatch.setattr(schedule, "multiprocessors", lambda device: 1)
    inputs = draw(2, 200, 3, dtype=dtype)
    assert_close(run(kernel(), inputs), run(reference, inputs, wide=True), dtype)


@pytest.mark.parametrize("chunk_size", [16, 32])
def test_same_bits_however_chains_are_cut_and_bundled(monkeypatch, chunk_size):
    from megacpp_mcore.kernels.m2rnn import schedule

    inputs = draw(1, 1000, 140, dtype=torch.bfloat16)
    results = []
    for at_once in ((140, 1), (132, 1), (99, 1), (3, 1), (47, 3), (33, 3), (1, 3)):
        monkeypatch.setattr(schedule, "forward_schedule", lambda *args, at_once=at_once: at_once)
        results.append(run(kernel(), inputs, chunk_size=chunk_size))
    for other in results[1:]:
        assert all(torch.equal(x, other[name]) for name, x in results[0].items())


@pytest.mark.parametrize("heads", [(1, 3), (3, 1), (3, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_of_q_and_k(dtype, heads):
    inputs = draw(1, 70, 3, q_heads=heads[0], k_heads=heads[1], dtype=dtype)
    actual = run(kernel(), inputs, chunk_size=16)
    assert_close(actual, run(reference, inputs, wide=True), dtype)


@pytest.mark.parametrize(
    ("dtype", "chunk_size"),
    [
        *((torch.float32, chunk_size) for chunk_size in (16, 48, 64)),
        *((torch.bfloat16, chunk_size) for chunk_size in (16, 32)),
        (torch.float16, 32),
    ],
    ids=str,
)
def test_documents_have_states_of_their_own(dtype, chunk_size):
    bounds = torch.tensor([0, 1, 1, 90, 154, 200], device="cuda")
    inputs = draw(1, 200, 2, dtype=dtype, states=5)
    options = {"cu_seqlens": bounds, "chunk_size": chunk_size}
    actual = run(kernel(), inputs, **options)
    assert_close(actual, run(reference, inputs, wide=True, **options), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_clamp_is_the_reference_s(dtype):
    inputs = draw(2, 150, 2, dtype=dtype)
    true = run(kernel(), inputs)
    clamped = run(kernel(), inputs, grad_clamp=0.05)
    assert_close(clamped, run(reference, inputs, wide=True, grad_clamp=0.05), dtype)
    assert (clamped["dk"] - true["dk"]).norm() > 0.1 * true["dk"].norm()
    loose = run(kernel(), inputs, grad_clamp=1e30)
    # What is never clamped is added up in another order.
    for name, x in true.items():
        assert (loose[name] - x).norm() <= torch.finfo(dtype).eps * x.norm(), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k_dim", [32, 96, 128])
def test_other_widths(dtype, k_dim):
    inputs = draw(1, 77, 2, k_dim=k_dim, dtype=dtype)
    assert_close(run(kernel(), inputs), run(reference, inputs, wide=True), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_from_run_to_run_and_from_strided_inputs(dtype):
    inputs = draw(2, 130, 3, dtype=dtype)
    first = run(kernel(), inputs)
    # [s, b, ...] in memory, as Megatron has it; and rows that do not start at 16 bytes
    sequence_first = {
        n: x if n in ("W", "initial_state") else x.transpose(0, 1).contiguous().transpose(0, 1)
        for n, x in inputs.items()
    }
    odd = torch.zeros(inputs["v"].numel() + 1, device="cuda", dtype=dtype)
    odd[1:] = inputs["v"].flatten()
    for other in (inputs, sequence_first, inputs | {"v": odd[1:].view_as(inputs["v"])}):
        again = run(kernel(), other)
        assert all(torch.equal(x, again[name]) for name, x in first.items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_state_carries_a_sequence_over_a_cut(dtype):
    q, k, v, W, f, state = draw(2, 100, 2, dtype=dtype).values()
    function = kernel()
    y, final = function(q, k, v, W, f, initial_state=state)
    y1, middle = function(q[:, :48], k[:, :48], v[:, :48], W, f[:, :48], initial_state=state)
    y2, end = function(q[:, 48:], k[:, 48:], v[:, 48:], W, f[:, 48:], initial_state=middle)
    assert torch.equal(torch.cat((y1, y2), 1), y) and torch.equal(end, final)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("use", [0, 1], ids=["y", "state"])
def test_a_loss_on_one_output_only(dtype, use):
    inputs = draw(1, 40, 2, dtype=dtype)

    def one(*tensors, **options):
        outputs = kernel()(*tensors, **options)
        return outputs[use], outputs[use]

    def one_reference(*tensors, **options):
        outputs = reference(*tensors, **options)
        return outputs[use], outputs[use]

    expected, actual = run(one_reference, inputs, wide=True), run(one, inputs)
    if use == 1:
        assert not actual.pop("dq").any() and not expected.pop("dq").any()
    assert_close(actual, expected, dtype)


def test_65536_steps_do_not_drift():
    """The number of steps is not in the bound (docs/m2rnn-kernels.md); W's columns sum to 1/2."""
    for dtype, tanh, step in (
        (torch.bfloat16, "approximate", 1.5 * 2**-12 + TANH["approximate"]),
        (torch.bfloat16, "exact", 1.5 * 2**-12 + TANH["exact"]),
        (torch.float32, "exact", STEP_ERROR[torch.float32][0]),
    ):
        inputs = draw(1, 65_536, 1, dtype=dtype)
        arguments = [inputs[n] for n in NAMES[:5]]
        with torch.no_grad():
            y, state = kernel()(*arguments, tanh=tanh)
            y64, state64 = reference(*(x.double() for x in arguments))
        bound = step / (1 - 0.5)
        off = (state - state64).abs().max()
        # The rows' sum, in float32, reads h, at most 1, rounded to 11 bits or the dtype, and, in
        # bfloat16's case, q all but exactly; y is rounded to the dtype.
        half_eps = torch.finfo(dtype).eps / 2
        a_row = bound + min(half_eps, 2**-12) + 64 * 2**-24
        reading = inputs["q"].double().abs().sum(-1, keepdim=True) * a_row
        allowed = reading + half_eps * (y64.abs() + reading)
        share = ((y.double() - y64).abs() / allowed).reshape(16, -1).amax(1)
        print(
            f"{dtype}, {tanh} tanh, 65,536 steps: state off by {off:.2e} of {bound:.2e}, y by "
            f"{', '.join(f'{e:.2f}' for e in share)} of its bound in 16 stretches"
        )
        assert off <= bound
        assert share.max() <= 1


@pytest.mark.parametrize("tanh", TANH)
def test_tanh_is_as_close_as_is_said(tanh):
    """One step with f = 0 from a state of zeros gives tanh(k v^T) itself: 17 M values of it."""
    inputs = draw(64, 1, 256, dtype=torch.bfloat16)
    # Both factors have 8 bits, so that the product is exact; from 2^-20 or so up to 2^6.
    q, k, v, W, f = (inputs[n] for n in NAMES[:5])
    k = k * torch.exp2(4 * torch.randn_like(k[..., :1]) - 2)
    _, state = kernel()(q, k, v, W, torch.zeros_like(f), tanh=tanh)
    x = k.double()[:, 0, ..., None] * v.double()[:, 0, :, None]
    expected = torch.tanh(x)
    off = (state.double() - expected).abs()
    if tanh == "approximate":
        off = off / expected.abs()
    assert off.nan_to_num(0).max() <= TANH[tanh]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_is_not_hidden(dtype):
    inputs = draw(1, 40, 2, dtype=dtype)
    inputs["v"][0, 20, 1, 3] = math.nan
    for clamp in (None, 1.0):
        results = run(kernel(), inputs, grad_clamp=clamp)
        assert results["y"][0, 20:, 1].isnan().any(-1).all()
        assert not results["y"][0, :, 0].isnan().any()
        for name in ("dk", "dW", "dinitial_state"):
            assert results[name].isnan().any(), name


def test_saved_for_backward():
    drawn = draw(4, 4096, 44, dtype=torch.bfloat16)
    inputs = {n: x.requires_grad_() for n, x in drawn.items()}
    saved = {}

    def pack(tensor):
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kernel()(*(inputs[n] for n in NAMES[:5]))
    own = sum(inputs[n].nbytes for n in NAMES[:5])
    assert sum(saved.values()) - own <= 60e6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_are_opaque_and_sound(dtype):
    inputs = draw(1, 20, 2, dtype=dtype)
    leaves = [inputs[n].requires_grad_() for n in NAMES]
    kernel()
    operator = torch.ops.megacpp.m2rnn_cuda.default
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, (*leaves, None, 16, None, False), test_utils=checks)


def test_refuses_what_the_kernels_do_not_take():
    good = draw(1, 5, 2, dtype=torch.bfloat16)
    wide = {name: good[name].double() for name in "qkv"}
    for changes, options, message in (
        (wide, {}, "q, k and v are float64"),
        ({"q": good["q"].float()}, {}, "takes one dtype"),
        ({"v": good["v"].cpu()}, {}, "on one cuda device"),
        ({}, {"chunk_size": 24}, "chunk_size is 24"),
        ({}, {"chunk_size": 64}, "chunk_size is 64; it takes 16, 32 for bfloat16"),
        ({}, {"grad_clamp": -1.0}, "grad_clamp is -1.0"),
        ({}, {"tanh": "fast"}, "tanh is 'fast'"),
    ):
        arguments = [(good | changes)[n] for n in NAMES[:5]]
        with pytest.raises(MegacppError, match=message):
            kernel()(*arguments, **options)
