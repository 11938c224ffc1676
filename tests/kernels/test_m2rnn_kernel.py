"""The M2RNN recurrence against a loop written from its formulas, forward and backward."""

import itertools
import math

import pytest
import torch

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.m2rnn import m2rnn, m2rnn_step
from megacpp_mcore.kernels.m2rnn.reference import m2rnn_sequential

NAMES = ("q", "k", "v", "W", "f", "initial_state")
IMPLEMENTATIONS = {"chunked": m2rnn, "sequential": m2rnn_sequential}


def loop(q, k, v, W, f, initial_state, starts=(), grad_clamp=None):
    """One head and one row of the batch at a time; the state is zero before every t in `starts`.

    The clamp sits where a state goes to the next step, or out as the final state: a tensor hook.
    """
    batch, seq, heads, _ = v.shape
    y = [[[None] * heads for _ in range(seq)] for _ in range(batch)]
    final = [[None] * heads for _ in range(batch)]
    for b in range(batch):
        for head in range(heads):
            q_head, k_head = head % q.shape[2], head % k.shape[2]
            h = initial_state[b, head]
            for t in range(seq):
                if t in starts:
                    h = torch.zeros_like(h)
                write = torch.outer(k[b, t, k_head], v[b, t, head])
                keep = f[b, t, head]
                h = keep * h + (1 - keep) * torch.tanh(h @ W[head] + write)
                y[b][t][head] = q[b, t, q_head] @ h
                if grad_clamp is not None:
                    h = h.clone()
                    h.register_hook(lambda g: g.clamp(-grad_clamp, grad_clamp))
            final[b][head] = h
    y = torch.stack([torch.stack([torch.stack(heads) for heads in row]) for row in y])
    return y, torch.stack([torch.stack(heads) for heads in final])


def draw(batch, seq, heads, k_dim, v_dim, q_heads=1, k_heads=1, seed=0, dtype=torch.float64):
    """Random inputs of every kind; W is not the identity it is initialised to."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    W = torch.eye(v_dim, dtype=torch.float64) + 0.3 * normal(heads, v_dim, v_dim).double()
    f = torch.rand(batch, seq, heads, generator=generator, dtype=torch.float64)
    tensors = (
        normal(batch, seq, q_heads, k_dim),
        normal(batch, seq, k_heads, k_dim),
        normal(batch, seq, heads, v_dim),
        W.to(torch.promote_types(dtype, torch.float32)),
        f.to(torch.promote_types(dtype, torch.float32)),
        normal(batch, heads, k_dim, v_dim).to(torch.promote_types(dtype, torch.float32)),
    )
    return dict(zip(NAMES, tensors, strict=True))


def run(function, inputs, use_y=True, use_state=True, **options):
    """y, the final state, and the gradients of a random combination of both."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    y, state = function(*(leaves[n] for n in NAMES[:5]), initial_state=leaves[NAMES[5]], **options)
    generator = torch.Generator().manual_seed(9)
    loss = torch.zeros((), dtype=torch.float64)
    for used, out in ((use_y, y), (use_state, state)):
        # Eighths: exact in every dtype, so that low precision gets the same gradient to start from.
        direction = torch.randint(-16, 17, out.shape, generator=generator).double() / 8
        if used:
            loss = loss + (out.double() * direction).sum()
    loss.backward()
    results = {"y": y.detach(), "final_state": state.detach()}
    return results | {f"d{name}": leaf.grad for name, leaf in leaves.items()}


def assert_close(actual, expected, steps, width):
    """Equal in float64: each of `steps` steps rounds a few times, and its error goes through the
    steps behind it, which shrink it on the whole; the reductions add up to `width` terms."""
    eps = torch.finfo(torch.float64).eps
    for name, want in expected.items():
        got = actual[name].double()
        bound = (8 * steps + width) * eps * want.double().abs().max()
        error = (got - want.double()).abs().max()
        assert got.shape == want.shape
        assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 1, 2, 3, 4, 1, 1),
        (1, 63, 2, 5, 3, 1, 1),
        (2, 64, 1, 3, 2, 1, 1),
        (1, 65, 3, 4, 5, 1, 3),
        (1, 130, 2, 2, 3, 2, 1),
        (2, 7, 3, 1, 1, 3, 3),
    ],
    ids=lambda s: "B{}-S{}-H{}-K{}-V{}-Hq{}-Hk{}".format(*s),
)
@pytest.mark.parametrize("grad_clamp", [None, 0.5], ids=["true-gradient", "clamped"])
def test_matches_the_formulas(implementation, shape, grad_clamp):
    inputs = draw(*shape)
    expected = run(loop, inputs, grad_clamp=grad_clamp)
    actual = run(IMPLEMENTATIONS[implementation], inputs, grad_clamp=grad_clamp)
    assert all(x.abs().max() > 0 for x in expected.values())
    assert_close(actual, expected, steps=shape[1], width=math.prod(shape[:5]))


def test_chunked_is_sequential_to_rounding_whatever_the_chunk():
    inputs = draw(2, 67, 2, 4, 3)
    expected = run(m2rnn_sequential, inputs)
    whole = run(m2rnn, inputs, chunk_size=1000)
    for chunk_size in (1, 2, 64, 66, 67):
        actual = run(m2rnn, inputs, chunk_size=chunk_size)
        assert torch.equal(actual["y"], whole["y"])
        assert_close(actual, expected, steps=67, width=2 * 67 * 12)


def test_gradcheck_with_documents():
    inputs = [x.requires_grad_() for x in draw(1, 5, 2, 2, 2).values()]
    inputs[-1] = torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 2, 2, 5])

    def f(*x):
        return m2rnn(*x[:5], initial_state=x[5], cu_seqlens=cu_seqlens, chunk_size=2)

    assert torch.autograd.gradcheck(f, inputs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_documents_start_from_zero(implementation):
    inputs = draw(1, 40, 2, 3, 4) | {"initial_state": torch.zeros(1, 2, 3, 4).double()}
    bounds = [0, 1, 1, 14, 40]  # one token, none, less and more than a chunk
    expected = run(loop, inputs, starts=bounds[:-1], use_state=False)

    def packed(*x, initial_state):
        y, states = IMPLEMENTATIONS[implementation](*x, cu_seqlens=torch.tensor(bounds))
        assert states.shape == (4, 2, 3, 4)
        assert torch.equal(states[1], torch.zeros(2, 3, 4))
        return y, states[-1:] + 0 * initial_state

    actual = run(packed, inputs, use_state=False)
    for results in (actual, expected):
        del results["dinitial_state"]
    assert_close(actual, expected, steps=40, width=40 * 12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_each_document_has_a_state_of_its_own(implementation):
    function = IMPLEMENTATIONS[implementation]
    inputs = draw(1, 11, 2, 3, 4)
    inputs["initial_state"] = draw(3, 1, 2, 3, 4, seed=1)["initial_state"]
    bounds = [0, 4, 4, 11]
    actual = run(function, inputs, cu_seqlens=torch.tensor(bounds), grad_clamp=0.1)

    def one_by_one(q, k, v, W, f, initial_state, grad_clamp):
        y, states = [], []
        for d, (start, end) in enumerate(itertools.pairwise(bounds)):
            state = initial_state[d : d + 1]
            if end > start:
                piece = (x[:, start:end] for x in (q, k, v))
                y_d, state = loop(*piece, W, f[:, start:end], state, grad_clamp=grad_clamp)
                y.append(y_d)
            states.append(state)
        return torch.cat(y, 1), torch.cat(states)

    expected = run(one_by_one, inputs, grad_clamp=0.1)
    assert_close(actual, expected, steps=11, width=11 * 12)


def test_the_state_carries_a_sequence_over_a_cut():
    inputs = draw(2, 20, 2, 3, 4)

    def in_two(q, k, v, W, f, initial_state):
        first = [x[:, :7] for x in (q, k, v)]
        rest = [x[:, 7:] for x in (q, k, v)]
        y1, state = m2rnn(*first, W, f[:, :7], initial_state=initial_state, chunk_size=4)
        y2, state = m2rnn(*rest, W, f[:, 7:], initial_state=state, chunk_size=4)
        return torch.cat((y1, y2), 1), state

    assert_close(run(in_two, inputs), run(m2rnn, inputs), steps=20, width=2 * 20 * 12)


@pytest.mark.parametrize("use", [{"use_y": False}, {"use_state": False}], ids=["state", "y"])
def test_a_loss_on_one_output_only(use):
    inputs = draw(1, 9, 2, 3, 2)
    if use == {"use_y": False}:
        expected = run(loop, inputs, **use)
        expected["dq"] = torch.zeros_like(inputs["q"])  # the loop never reads q then
        actual = run(m2rnn, inputs, **use)
        assert torch.equal(actual.pop("dq"), expected.pop("dq"))
    else:
        expected, actual = run(loop, inputs, **use), run(m2rnn, inputs, **use)
    assert_close(actual, expected, steps=9, width=9 * 6)


def test_no_initial_state_is_zeros():
    inputs = draw(2, 5, 2, 3, 2)
    tensors = [inputs[n] for n in NAMES[:5]]
    y, state = m2rnn(*tensors)
    y0, state0 = m2rnn(*tensors, initial_state=torch.zeros(2, 2, 3, 2))
    assert torch.equal(y, y0) and torch.equal(state, state0)


def test_clamp_limits_what_a_step_receives():
    """q = 0 in all but the last step: then every gradient comes through the chain, and is bound."""
    inputs = draw(1, 6, 1, 2, 2)
    inputs["q"][:, :-1] = 0
    inputs["f"][:] = 1.0  # the state passes on as it is, and so does its gradient but for the clamp
    limit = 1e-3
    for function in IMPLEMENTATIONS.values():
        true = run(function, inputs, use_state=False)["dinitial_state"]
        clamped = run(function, inputs, use_state=False, grad_clamp=limit)["dinitial_state"]
        # dh_0 goes out as step 1 sends it: step 1 received the clamped one.
        assert true.abs().min() > limit
        assert torch.equal(clamped, true.sign() * limit)
    loose = run(m2rnn, inputs, grad_clamp=1e9)
    assert all(torch.equal(x, loose[name]) for name, x in run(m2rnn, inputs).items())


@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_keep_nothing_or_everything(keep):
    inputs = draw(1, 4, 1, 2, 3)
    inputs["f"][:] = keep
    q, k, v, W, f, h = inputs.values()
    y, state = m2rnn(q, k, v, W, f, initial_state=h)
    if keep == 1.0:
        assert torch.equal(state, h)
        expected = torch.einsum("bsxk,bhkv->bshv", q, h)
    else:
        states = [h[0, 0]]
        for t in range(4):
            states.append(torch.tanh(states[-1] @ W[0] + torch.outer(k[0, t, 0], v[0, t, 0])))
        expected = torch.stack([q[0, t, 0] @ states[t + 1] for t in range(4)])[None, :, None]
    torch.testing.assert_close(y, expected, rtol=0, atol=32 * torch.finfo(torch.float64).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_inputs_are_computed_in_float32(dtype):
    inputs = draw(2, 70, 2, 8, 4, dtype=dtype)
    actual = run(m2rnn, inputs)
    expected = run(m2rnn_sequential, {name: x.double() for name, x in inputs.items()})
    assert actual["y"].dtype == dtype and actual["final_state"].dtype == torch.float32
    assert all(actual[f"d{name}"].dtype == x.dtype for name, x in inputs.items())
    for name, want in expected.items():
        # float32 through 70 steps and the reductions, and one rounding to the tensor's own dtype
        eps = (8 * 70 + 2 * 70 * 32) * torch.finfo(torch.float32).eps
        bound = (eps + torch.finfo(actual[name].dtype).eps) * want.abs().max()
        assert (actual[name].double() - want).abs().max() <= bound, name


def test_float32_does_not_drift_over_long_sequences():
    inputs = draw(1, 3000, 1, 2, 2, dtype=torch.float32)
    y, _ = m2rnn(*(inputs[n] for n in NAMES[:5]))
    y64, _ = m2rnn(*(inputs[n].double() for n in NAMES[:5]))
    half = (y.double() - y64).abs()
    # Errors of a step fade: the second half is no worse than a few dozen roundings.
    assert half[:, 1500:].max() <= 64 * torch.finfo(torch.float32).eps * y64.abs().max()


def test_saves_the_inputs_and_one_state_a_chunk():
    inputs = {name: x.requires_grad_() for name, x in draw(2, 65, 2, 4, 3).items()}
    saved = []

    def pack(tensor):
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y, _ = m2rnn(*(inputs[n] for n in NAMES[:5]), chunk_size=16)
    chunks = 5
    assert sum(saved) == sum(inputs[n].numel() for n in NAMES[:5]) + chunks * 2 * 2 * 4 * 3
    y.sum().backward()


def test_strided_views_and_inputs_left_as_they_are():
    inputs = draw(2, 19, 2, 3, 4)
    before = {name: x.clone() for name, x in inputs.items()}
    # [s, b, ...] in memory, as Megatron has it
    strided = {
        name: x
        if name in ("W", "initial_state")
        else x.transpose(0, 1).contiguous().transpose(0, 1)
        for name, x in inputs.items()
    }
    plain, viewed = (
        m2rnn(*(x[n] for n in NAMES[:5]), initial_state=x[NAMES[5]], chunk_size=8)
        for x in (inputs, strided)
    )
    assert torch.equal(plain[0], viewed[0]) and torch.equal(plain[1], viewed[1])
    assert all(torch.equal(x, before[name]) for name, x in inputs.items())


def test_step_by_step_is_the_sequence():
    q, k, v, W, f, state = draw(2, 6, 3, 4, 5, k_heads=3).values()
    y, final = m2rnn(q, k, v, W, f, initial_state=state)
    for t in range(6):
        given = state.clone()
        y_t, after = m2rnn_step(q[:, t], k[:, t], v[:, t], W, f[:, t], state)
        assert torch.equal(state, given)
        torch.testing.assert_close(y_t, y[:, t], rtol=0, atol=1e-14)  # 6 steps, |y| < 50
        state = after
    torch.testing.assert_close(state, final, rtol=0, atol=1e-14)


@pytest.mark.slow
def test_operator_is_opaque_and_sound():
    inputs = draw(2, 5, 2, 3, 2)
    tensors = [inputs[n].requires_grad_() for n in NAMES]
    operator = torch.ops.megacpp.m2rnn_chunked.default
    torch.library.opcheck(operator, (*tensors, 2, None))
    torch.library.opcheck(operator, (*tensors, 64, 0.5))


def test_compiles_without_a_graph_break():
    inputs = draw(1, 5, 2, 3, 2)
    compiled = torch.compile(m2rnn, fullgraph=True, backend="aot_eager")
    expected = run(m2rnn, inputs)
    with torch._dynamo.config.patch(disable=False):  # bridges turn it off for Megatron's sake
        actual = run(compiled, inputs)
    assert torch._dynamo.utils.counters["stats"]["calls_captured"] > 0
    for name, x in actual.items():
        assert torch.equal(x, expected[name]), name


REFUSED = {
    "q-dims": ({"q": torch.ones(2, 5, 3)}, {}, "q is (2, 5, 3)"),
    "q-heads": ({"q": torch.ones(2, 5, 2, 3)}, {}, "q is (2, 5, 2, 3)"),
    "k-dim": ({"k": torch.ones(2, 5, 1, 4)}, {}, "k is (2, 5, 1, 4)"),
    "no-tokens": ({"v": torch.ones(2, 0, 4, 2)}, {}, "v is (2, 0, 4, 2)"),
    "W": ({"W": torch.ones(4, 2, 3)}, {}, "W is (4, 2, 3)"),
    "f": ({"f": torch.ones(2, 4, 4)}, {}, "f is (2, 4, 4)"),
    "state": ({"initial_state": torch.ones(1, 4, 3, 2)}, {}, "must be (2, 4, 3, 2)"),
    "chunk": ({}, {"chunk_size": 0}, "chunk_size is 0"),
    "clamp": ({}, {"grad_clamp": 0.0}, "grad_clamp is 0.0"),
    "tanh": ({}, {"tanh": "fast"}, "tanh is 'fast'; it must be 'approximate' or 'exact'"),
    "clamp-nan": ({}, {"grad_clamp": math.nan}, "grad_clamp is nan"),
    "documents-batch": ({}, {"cu_seqlens": torch.tensor([0, 5])}, "with batch 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case):
    changes, options, message = REFUSED[case]
    inputs = draw(2, 5, 4, 3, 2) | changes
    with pytest.raises(MegacppError) as error:
        m2rnn(
            *(inputs[n] for n in NAMES[:5]),
            **({"initial_state": inputs[NAMES[5]]} | options),
        )
    assert message in str(error.value)


@pytest.mark.parametrize(
    "bounds", [[0, 4], [1, 5], [0, 3, 2, 5], [0, 9], [0], [[0, 5]], [0.0, 5.0]], ids=str
)
def test_refuses_document_bounds(bounds):
    inputs = draw(1, 5, 2, 3, 2)
    with pytest.raises(MegacppError, match=r"cu_seqlens is .* ends at the number of tokens, 5"):
        m2rnn(*(inputs[n] for n in NAMES[:5]), cu_seqlens=torch.tensor(bounds))
