"""Our own MIMO scan where there is no GPU: in Triton's interpreter, against the recurrence token by
token in float64."""

import math

import pytest
import torch
from admission_probes import poisoned_memory

from megacpp_mcore import dispatch
from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.mamba3 import Mamba3InputError, Mamba3State, mimo_ops, triton_mimo
from megacpp_mcore.kernels.mamba3.case import Mamba3ScanCase
from megacpp_mcore.kernels.mamba3.inputs import prepare
from megacpp_mcore.kernels.mamba3.reference import mamba3_sequential
from megacpp_mcore.kernels.mamba3_core import scan
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.surfaces.registry import REGISTRY

slow = pytest.mark.slow  # Triton's interpreter
STATE = Mamba3State._fields
# A document that ends shortly before a chunk does, where another has begun: of 32 or 16 tokens.
DOCUMENTS = [0, 1, 3, 3, 30, 60, 64, 79]
CASES = {  # case, cu_seqlens, programs that a launch wants: chunks of 64 rows and their segments
    "two": (Mamba3ScanCase(2, 75, 4, 2, 8, 16, 4, 2, 64), None, 1024),
    "four": (Mamba3ScanCase(1, 53, 3, 1, 5, 10, 3, 4, 64), None, 1024),
    "one-segment": (Mamba3ScanCase(1, 41, 2, 2, 16, 8, 4, 4, 64), None, 1),
    "whole-chunks": (Mamba3ScanCase(2, 32, 2, 1, 16, 16, 8, 4, 64), None, 1024),
    "two-documents": (Mamba3ScanCase(1, 90, 2, 1, 8, 8, 2, 2, 64), DOCUMENTS, 6),
    "four-documents": (Mamba3ScanCase(1, 90, 2, 1, 8, 8, 2, 4, 64), DOCUMENTS, 6),
    "one-token": (Mamba3ScanCase(2, 1, 2, 1, 8, 8, 2, 4, 64), None, 1024),
}  # fmt: skip
SHORT = {2: Mamba3ScanCase(1, 43, 2, 1, 8, 8, 2, 2, 64),
         4: Mamba3ScanCase(1, 21, 2, 1, 8, 8, 2, 4, 64)}  # fmt: skip
TOKENS = ("q", "k", "v", "adt", "dt", "trap", "angles", "z")


@pytest.fixture(autouse=True)
def any_dtype(monkeypatch):
    """The interpreter's products are of float32."""
    monkeypatch.setattr(triton_mimo, "check_bfloat16", lambda v: None)


def drawn(case):
    tensors = parity.drawn(case, torch.float32, "cpu", seed=case.seq)
    tensors["adt"] /= 8  # so slow that a state outlives some chunks
    return tensors


def sequential(tensors, state=None, bounds=None):
    return mamba3_sequential(prepare(**tensors, cu_seqlens=bounds), state)


def kernels(ends=None):
    """The scan, called once for each piece of the row."""

    def run(tensors, state=None, bounds=None):
        if ends is None:
            return triton_mimo.mamba3_scan(**tensors, cu_seqlens=bounds), None
        outputs, begin = [], 0
        for end in ends:
            part = {n: t[:, begin:end] if n in TOKENS else t for n, t in tensors.items()}
            y, state = triton_mimo.mamba3_scan(**part, initial_state=state, return_final_state=True)
            outputs, begin = [*outputs, y], end
        return torch.cat(outputs, 1), state

    return run


def values(run, tensors, directions, state=None, bounds=None, dtype=torch.float32):
    """The outputs along directions, and the gradients of every tensor."""
    leaves = {n: t.detach().to(dtype).requires_grad_() for n, t in tensors.items()}
    if state is not None:
        state = Mamba3State(*(t.detach().to(dtype).requires_grad_() for t in state))
    y, after = run(leaves, state, bounds)
    outputs = {"y": y} if state is None else {"y": y} | after._asdict()
    wanted = dict(leaves)
    if state is not None:
        wanted |= {f"{name} before": tensor for name, tensor in state._asdict().items()}
    along = [directions[name].to(dtype) for name in outputs]
    gradients = torch.autograd.grad(
        [*outputs.values()], [*wanted.values()], along, materialize_grads=True
    )
    named = {f"d{name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}
    return {n: t.detach() for n, t in outputs.items()} | named


def assert_near(found, expected, seq):
    """A value is a sum over the tokens, off by at most so many epsilons of its largest partial sum,
    of terms that are products of four values, of which angles turn by pi at most. What cancels to
    nothing in the truth has no size of its own."""
    largest = max(want.abs().max() for want in expected.values())
    bound = 4 * seq * torch.finfo(torch.float32).eps * math.pi
    for name, want in expected.items():
        off, size = found[name].double() - want, want.abs().max()
        size = size if size > 1e-12 * largest else largest
        if name == "angle":
            off, size = off - 2 * math.pi * (off / (2 * math.pi)).round(), 2 * math.pi
        assert found[name].shape == want.shape, name
        off = off.abs().max()
        assert off <= bound * size, f"{name}: {off:.3e} of {size:.3e}, bound {bound:.1e}"


def check(case, bounds=None, run=None):
    tensors, generator = drawn(case), torch.Generator().manual_seed(1)
    bounds = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    directions = {"y": torch.randn(tensors["v"].shape, generator=generator)}
    expected = values(sequential, tensors, directions, bounds=bounds, dtype=torch.float64)
    with poisoned_memory("cpu"):
        found = values(run or kernels(), tensors, directions, bounds=bounds)
    assert_near(found, expected, case.seq + case.state_dim)


@slow
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(monkeypatch, name):
    case, bounds, programs = CASES[name]
    monkeypatch.setattr(scan, "_PROGRAMS", programs)
    check(case, bounds)
    with torch.no_grad():  # nothing is kept, and nothing changes
        tensors = drawn(case)
        y = triton_mimo.mamba3_scan(**tensors)
    tensors["q"].requires_grad_()
    assert torch.equal(triton_mimo.mamba3_scan(**tensors).detach(), y)


def check_pieces(case, ends, change=lambda scan: scan):
    tensors, generator = drawn(case), torch.Generator().manual_seed(2)
    rows, rank = (case.batch, case.heads), case.rank
    shapes = ((*rows, case.angles), (*rows, case.head_dim, case.state_dim),
              (case.batch, rank, case.heads, case.state_dim), (*rows, case.head_dim))  # fmt: skip
    state, dstate = (
        Mamba3State(*(torch.randn(shape, generator=generator) for shape in shapes))
        for _ in range(2)
    )
    directions = {"y": torch.randn(tensors["v"].shape, generator=generator)} | dstate._asdict()
    expected = values(sequential, tensors, directions, state, dtype=torch.float64)
    for piece in (ends[-1:], ends):
        with poisoned_memory("cpu"):
            found = values(change(kernels(piece)), tensors, directions, state)
        assert_near(found, expected, case.seq + case.state_dim)


@slow
@pytest.mark.parametrize(("rank", "ends"), [(2, (37, 38, 70, 75)), (4, (5, 22, 38, 41))])
@pytest.mark.parametrize("programs", [1, 1024])
def test_a_row_in_one_call_and_in_four_pieces(monkeypatch, rank, ends, programs):
    monkeypatch.setattr(scan, "_PROGRAMS", programs)
    check_pieces(Mamba3ScanCase(2, ends[-1], 2, 1, 8, 8, 2, rank, 64), ends)


def with_launch(name, change):
    """The scan, with what its operator is given changed."""

    def wrong(monkeypatch):
        place, launch = mimo_ops.Inputs._fields.index(name), mimo_ops.mimo_scan

        def changed(*given):
            given = list(given)
            given[place] = change(given[place])
            return launch(*given)

        monkeypatch.setattr(triton_mimo, "mimo_scan", changed)

    return wrong


def ranks_swapped(rows):
    """Of (B, H, S R, N): each token's rows in the other order."""
    rank = 2
    return rows.unflatten(2, (-1, rank)).flip(3).flatten(2, 3)


WRONG = {
    "a rank's key another's": with_launch("k", ranks_swapped),
    "a rank's query another's": with_launch("q", ranks_swapped),
    "halves of the keys": with_launch("k", lambda k: k.roll(k.shape[-1] // 2, -1)),
    "negative decays": with_launch("adt", torch.neg),
    "no decay": with_launch("adt", torch.zeros_like),
    "one weight for its own token and for later ones": with_launch("gamma", torch.zeros_like),
    "no skip": with_launch("D", torch.zeros_like),
    "a rank's value another's": with_launch("mimo_v", lambda m: m.flip(1)),
    "a rank's gate another's": with_launch("mimo_z", lambda m: m.flip(1)),
    "a rank's output another's": with_launch("mimo_out", lambda m: m.flip(1)),
    "a later weight": with_launch("scale", lambda x: x.roll(1, -1)),
    "no gradient of the decay": with_launch("adt", torch.Tensor.detach),
    "no gradient of the weight": with_launch("scale", torch.Tensor.detach),
    "no gradient of its own weight": with_launch("gamma", torch.Tensor.detach),
}


@slow
@pytest.mark.parametrize("mutant", WRONG)
def test_a_wrong_launch_is_refused(monkeypatch, mutant):
    WRONG[mutant](monkeypatch)
    with pytest.raises(AssertionError, match=r"of .*, bound"):
        check(SHORT[2])


def on_state(name, change):
    def changed(run):
        def wrong(tensors, state, bounds):
            y, after = run(tensors, state._replace(**{name: change(getattr(state, name))}), bounds)
            return y, after

        return wrong

    return changed


@slow
@pytest.mark.parametrize("name", STATE)
@pytest.mark.parametrize("change", [torch.zeros_like, torch.neg, lambda x: x.roll(1, -1)])
def test_a_wrong_state_is_refused(name, change):
    with pytest.raises(AssertionError, match=r"of .*, bound"):
        check_pieces(SHORT[4], (7, 21), on_state(name, change))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"z": None, "mimo_z": None}, "one of them is None"),
        ({"D": None}, "one of them is None"),
        ({"cu_seqlens": torch.tensor([0, 21]), "return_final_state": True}, "one by one"),
        ({"initial_state": Mamba3State(*(torch.zeros(1),) * 4)}, "initial_state.angle has shape"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(changes, words):
    with pytest.raises(Mamba3InputError, match=words):
        triton_mimo.mamba3_scan(**(drawn(SHORT[4]) | changes))


def test_another_rank_or_dtype_is_refused(monkeypatch):
    with pytest.raises(Mamba3InputError, match="rank 3: the kernels take 2 and 4"):
        triton_mimo.mamba3_scan(**drawn(Mamba3ScanCase(1, 9, 2, 1, 8, 8, 2, 3, 64)))
    monkeypatch.undo()
    with pytest.raises(Mamba3InputError, match=r"v is torch.float32"):
        triton_mimo.mamba3_scan(**drawn(SHORT[4]))


@slow
@pytest.mark.parametrize("final", [False, True])
def test_the_operators_say_what_they_return(final):
    tensors = drawn(SHORT[4])
    rows = (1, 2, 4 * 21, 8)
    given = [torch.randn(rows).requires_grad_(), torch.randn(rows).requires_grad_()]
    given += [tensors[n].requires_grad_() for n in ("v", "z")]
    given += [tensors["adt"].transpose(1, 2), *torch.rand(2, 1, 2, 21).unbind()]
    given += [tensors[n] for n in ("D", "mimo_v", "mimo_z", "mimo_out")]
    given += [None, torch.randn(1, 2, 8, 8) if final else None]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor",
              "test_aot_dispatch_dynamic")  # fmt: skip
    torch.library.opcheck(mimo_ops.mimo_scan, (*given, True, final), test_utils=checks)
    given = [None if x is None else x.detach() for x in given]
    y, *others = mimo_ops.mimo_scan(*given, True, final)
    ends = (torch.randn_like(others[0]), others[0]) if final else (None, None)
    found = (y, ends[0], *given, ends[1], *others[-2:])
    torch.library.opcheck(mimo_ops._backward, found, test_utils=checks)


NAM56R = ["mamba3.variant=mimo", "mamba3.mimo_rank=4"]


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["mamba3.variant=siso"], "variant siso: these are MIMO kernels"),
        (["mamba3.mimo_rank=8"], "rank 8: the kernels are tested with 2 and 4"),
        (["mamba3.chunk_size=16"], "chunk_size 16"),
        (["precision.bf16=false"], "products are of bfloat16, not float32"),
    ],
)
def test_what_it_cannot_serve_it_says(overrides, why):
    workload = REGISTRY["mamba3_scan"].workload(load_recipe("nam56r", NAM56R + overrides), "cuda")
    assert why in dispatch.verdicts("mamba3_scan", workload)["triton_mimo"]


@pytest.mark.parametrize("rank", [2, 4])
def test_it_serves_where_it_is_named_and_only_there(rank):
    recipe = load_recipe("nam56r", [*NAM56R, f"mamba3.mimo_rank={rank}"])
    workload = REGISTRY["mamba3_scan"].workload(recipe, "cuda")
    assert dispatch.choose("mamba3_scan", workload).observed != "triton_mimo"
    named = dispatch.choose("mamba3_scan", workload, {"mamba3_scan": "triton_mimo"})
    assert named.observed == "triton_mimo" and named.load() is triton_mimo.mamba3_scan
