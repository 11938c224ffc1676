"""M between its projections with a state before the row and one after it: a row in one call, the
same row in pieces that hand the state on, and every gradient of both, against the recurrence token
by token in float64."""

import math

import pytest
import torch
from admission_probes import poisoned_memory

from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.mamba3 import Mamba3InputError, Mamba3State
from megacpp_mcore.kernels.mamba3.inputs import prepare
from megacpp_mcore.kernels.mamba3.reference import mamba3_sequential
from megacpp_mcore.kernels.mamba3_core import around, scan, states, triton
from megacpp_mcore.kernels.mamba3_core.case import Mamba3CoreCase
from megacpp_mcore.kernels.mamba3_core.prep import mamba3_prep

pytestmark = pytest.mark.slow  # Triton's interpreter

OPTIONS = ("heads", "head_dim", "groups", "state_dim", "angles", "decay", "decay_floor", "eps")
STATE = Mamba3State._fields
CASES = {  # case, ends of the pieces (chunks have 64 tokens), programs that a launch wants
    "segments": (Mamba3CoreCase(1, 201, 4, 2, 8, 16, 4), (37, 120, 121, 201), 1024),
    "one-segment": (Mamba3CoreCase(2, 150, 2, 1, 8, 8, 2), (67, 70, 134, 150), 1),
    "odd": (Mamba3CoreCase(2, 140, 3, 1, 5, 10, 3, 64, "rational", 0.6), (1, 2, 75, 140), 1024),
}  # fmt: skip
SHORT = Mamba3CoreCase(1, 84, 2, 1, 8, 8, 2), (5, 73, 84)


def drawn(case, dtype):
    """The operator's tensors, the state before the row, and the directions of y and of the state
    after it."""
    tensors = parity.drawn(case, dtype, "cpu", seed=case.seq)
    tensors["dt_bias"] -= 3  # so slow that a state outlives the pieces
    generator = torch.Generator().manual_seed(case.seq)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(dtype)

    def state():
        rows, dim, state_dim = (case.batch, case.heads), case.head_dim, case.state_dim
        shapes = ((case.angles,), (dim, state_dim), (state_dim,), (dim,))
        return Mamba3State(*(normal(*rows, *shape) for shape in shapes))

    direction = normal(case.seq, case.batch, case.heads * case.head_dim, dtype=dtype)
    before = state()
    return tensors, before._replace(angle=before.angle.remainder(2 * math.pi)), direction, state()


def recurrence(case, tensors, state):
    """y and the state after the row, from the definition of one token."""
    projected = tensors["projected"].transpose(0, 1)
    columns = projected.split([*case.parts, projected.shape[-1] - sum(case.parts)], -1)
    z, x, B, C, dt, A, trap, angle, _ = columns
    found = mamba3_prep(
        B, C, dt, A, tensors["dt_bias"], tensors["B_weight"], tensors["C_weight"], variant="siso",
        rank=1, decay=case.decay, decay_floor=case.decay_floor, eps=case.eps,
    )  # fmt: skip
    x, z = (t.unflatten(-1, (case.heads, case.head_dim)) for t in (x, z))
    y, state = mamba3_sequential(
        prepare(found.q, found.k, x, found.adt, found.dt, trap, angle.unsqueeze(2),
                tensors["C_bias"], tensors["B_bias"], tensors["D"], z),
        state,
    )  # fmt: skip
    return y.transpose(0, 1).flatten(2), state


def in_pieces(operator, ends):
    """The operator, called once for each piece of the row."""

    def run(case, tensors, state):
        options, outputs, begin = {n: getattr(case, n) for n in OPTIONS}, [], 0
        for end in ends:
            part = tensors | {"projected": tensors["projected"][begin:end]}
            y, state = operator(**part, **options, initial_state=state, return_final_state=True)
            outputs, begin = [*outputs, y], end
        return torch.cat(outputs), state

    return run


def values(run, case, tensors, state, direction, dstate, dtype=None):
    """y, the state after the row, and the gradients of every tensor and of the state before it."""
    leaves = {n: t.detach().to(dtype or t.dtype).requires_grad_() for n, t in tensors.items()}
    state = Mamba3State(*(t.detach().to(dtype or t.dtype).requires_grad_() for t in state))
    y, after = run(case, leaves, state)
    directions = [d.to(t.dtype) for d, t in zip((direction, *dstate), (y, *after), strict=True)]
    wanted = [*leaves.values(), *state]
    gradients = torch.autograd.grad((y, *after), wanted, directions, materialize_grads=True)
    names = ("y", *STATE, *(f"d{n}" for n in tensors), *(f"d{n} before" for n in STATE))
    return dict(zip(names, (y.detach(), *(t.detach() for t in after), *gradients), strict=True))


def assert_near(name, found, expected, bound):
    assert found.shape == expected.shape, name
    off, size = found.double() - expected, expected.abs().max()
    if name == "angle":
        off, size = off - 2 * math.pi * (off / (2 * math.pi)).round(), 2 * math.pi
    off = off.abs().max()
    assert off <= bound * size, f"{name}: {off:.3e} of {size:.3e}, bound {bound:.1e}"


def check(monkeypatch, case, ends, programs, operator=None):
    """A value is a sum over the tokens, off by at most so many epsilons of its largest partial sum,
    of terms that are products of four values, of which angles turn by pi at most."""
    monkeypatch.setattr(triton, "_check", lambda projected: None)  # of bfloat16
    monkeypatch.setattr(scan, "_PROGRAMS", programs)
    monkeypatch.setattr(around, "_STEP", 16)  # of 64 tokens: less of the interpreter's time
    given = drawn(case, torch.float32)
    expected = values(recurrence, case, *given, dtype=torch.float64)
    bound = 4 * case.seq * torch.finfo(torch.float32).eps * math.pi
    for run in (in_pieces(operator or triton.mamba3_core, e) for e in (ends[-1:], ends)):
        with poisoned_memory("cpu"):
            found = values(run, case, *given)
        for name, want in expected.items():
            assert_near(name, found[name], want, bound)


@pytest.mark.parametrize("name", CASES)
def test_a_row_in_one_call_and_in_four_pieces(monkeypatch, name):
    check(monkeypatch, *CASES[name])


class Factor(torch.autograd.Function):
    """x, and its gradient times a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.factor * gradient, None


def with_state(before=None, after=None):
    """The operator, with the state changed before it goes in or after it comes out."""

    def operator(*, initial_state, **given):
        if before is not None and initial_state is not None:
            initial_state = before(initial_state)
        y, state = triton.mamba3_core(initial_state=initial_state, **given)
        return y, state if after is None else after(state)

    return operator


def in_field(name, change):
    return lambda state: state._replace(**{name: change(getattr(state, name))})


def halves(x):
    return x.roll(x.shape[-1] // 2, -1)


def times(factor):
    return lambda x: Factor.apply(x, factor)


WRONG = {"dropped": with_state(lambda state: None)}
for field in STATE:
    WRONG |= {
        f"{field} dropped": with_state(in_field(field, torch.zeros_like)),
        f"{field} negative": with_state(in_field(field, torch.neg)),
        f"{field} with halves swapped": with_state(in_field(field, halves)),
        f"{field} before without a gradient": with_state(in_field(field, torch.Tensor.detach)),
        f"{field} after without a gradient": with_state(None, in_field(field, times(0))),
        f"{field} after with a negative gradient": with_state(None, in_field(field, times(-1))),
    }


@pytest.mark.parametrize("mutant", WRONG)
def test_a_state_that_is_handed_on_wrong_is_refused(monkeypatch, mutant):
    case, ends = SHORT
    with pytest.raises(AssertionError, match=r"of .*, bound"):
        check(monkeypatch, case, ends, 1024, WRONG[mutant])


def no_gradient_of_dt(entering_backward):
    def changed(*given):
        dahead, *others = entering_backward(*given)
        return 0 * dahead, *others

    return changed


INSIDE = {  # what a launch is not given
    "the trapezoid's term": (states, "_ahead", lambda f: lambda steps: 0 * f(steps)),
    "its gradient of dt": (states, "entering_backward", no_gradient_of_dt),
    "the last state, for decays": (scan, "Ends", lambda f: lambda x, *more: f(0 * x, *more)),
    "the state's gradient": (scan, "Ends", lambda f: lambda x, dx, to: f(x, 0 * dx, to)),
}


@pytest.mark.parametrize("name", INSIDE)
def test_what_the_kernels_are_not_given_is_missed(monkeypatch, name):
    case, ends = SHORT
    module, function, change = INSIDE[name]
    monkeypatch.setattr(module, function, change(getattr(module, function)))
    with pytest.raises(AssertionError, match=r"of .*, bound"):
        check(monkeypatch, case, ends, 1024)


@pytest.mark.parametrize("used", ["y", *STATE])
def test_one_output_is_enough(monkeypatch, used):
    """The others' gradients are none at all, not zeros."""
    monkeypatch.setattr(triton, "_check", lambda projected: None)
    case = SHORT[0]
    tensors, state, *_ = drawn(case, torch.float32)

    def gradients(run, dtype):
        leaves = {n: t.detach().to(dtype).requires_grad_() for n, t in tensors.items()}
        before = Mamba3State(*(t.detach().to(dtype).requires_grad_() for t in state))
        y, after = run(case, leaves, before)
        wanted = [*leaves.values(), *before]
        loss = (y if used == "y" else getattr(after, used)).sin().sum()
        return torch.autograd.grad(loss, wanted, materialize_grads=True)

    expected = gradients(recurrence, torch.float64)
    found = gradients(in_pieces(triton.mamba3_core, (case.seq,)), torch.float32)
    largest = max(x.abs().max() for x in expected)
    bound = 4 * case.seq * torch.finfo(torch.float32).eps * math.pi
    for name, got, want in zip([*tensors, *STATE], found, expected, strict=True):
        assert (got.double() - want).abs().max() <= bound * largest, name


def test_a_state_alone_wants_a_gradient(monkeypatch):
    """As where a frozen model's prompt is trained."""
    monkeypatch.setattr(triton, "_check", lambda projected: None)
    case = SHORT[0]
    tensors, state, *_ = drawn(case, torch.float32)
    before = Mamba3State(*(t.clone().requires_grad_() for t in state))
    options = {n: getattr(case, n) for n in OPTIONS}
    y = triton.mamba3_core(**tensors, **options, initial_state=before)
    wide = Mamba3State(*(t.double().requires_grad_() for t in state))
    expected, _ = recurrence(case, {n: t.double() for n, t in tensors.items()}, wide)
    bound = 4 * case.seq * torch.finfo(torch.float32).eps * math.pi
    found = torch.autograd.grad(y.sum(), before)
    for name, got, want in zip(
        STATE, found, torch.autograd.grad(expected.sum(), wide), strict=True
    ):
        assert_near(f"d{name}", got, want, bound)


def test_the_operators_say_what_they_return(monkeypatch):
    """To torch.compile, with a state on both ends."""
    monkeypatch.setattr(triton, "_check", lambda projected: None)
    case = Mamba3CoreCase(1, 9, 2, 1, 8, 8, 2)
    tensors, state, *_ = drawn(case, torch.float32)
    leaves = [t.requires_grad_() for t in (*tensors.values(), *state)]
    options = [getattr(case, n) for n in OPTIONS]
    given = (*leaves[:7], None, *leaves[7:], *options, True, True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(triton._forward, given, test_utils=checks)
    with torch.no_grad():
        y, *others = triton._forward(*given)
        ends, (*steps, q, k, inner, before) = others[:4], others[4:]
    tensors = [t.detach() for t in leaves]
    found = (y, *tensors[:7], None, *tensors[9:], ends[1], ends, steps, q, k, inner, before)
    torch.library.opcheck(triton._backward, (*found, *options), test_utils=checks)


@pytest.mark.parametrize("name", STATE)
def test_a_state_of_another_shape_is_refused(name):
    case = Mamba3CoreCase(1, 16, 2, 1, 8, 8, 2)
    tensors, state, *_ = drawn(case, torch.bfloat16)
    options = {n: getattr(case, n) for n in OPTIONS}
    short = state._replace(**{name: getattr(state, name)[..., 1:]})
    with pytest.raises(Mamba3InputError, match=rf"initial_state.{name} has shape .*, expected"):
        triton.mamba3_core(**tensors, **options, initial_state=short)


def test_a_state_and_documents_are_refused():
    case = Mamba3CoreCase(1, 16, 2, 1, 8, 8, 2)
    tensors, state, *_ = drawn(case, torch.bfloat16)
    options = {n: getattr(case, n) for n in OPTIONS}
    bounds = torch.tensor([0, 16], dtype=torch.int32)
    for given in ({"initial_state": state}, {"return_final_state": True}):
        with pytest.raises(Mamba3InputError, match="process the documents one by one"):
            triton.mamba3_core(**tensors, **options, cu_seqlens=bounds, **given)
