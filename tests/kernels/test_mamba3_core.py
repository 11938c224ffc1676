"""M between its projections: the kernels around the scan, and the whole operator, against autograd
in float64."""

import math

import pytest
import torch
from admission_probes import poisoned_memory

from megacpp_mcore import dispatch
from megacpp_mcore.kernels import mamba3_core as definition
from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.documents import document_starts
from megacpp_mcore.kernels.mamba3 import Mamba3InputError
from megacpp_mcore.kernels.mamba3_core import around, scan, triton
from megacpp_mcore.kernels.mamba3_core.case import Mamba3CoreCase
from megacpp_mcore.kernels.mamba3_core.prep import mamba3_prep
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.surfaces.registry import REGISTRY

slow = pytest.mark.slow  # Triton's interpreter
DOCUMENTS = [0, 10, 10, 40, 64, 99]  # of a row of 110 tokens: an empty one, and 11 behind the last
CASES = {  # case, cu_seqlens, dtype
    "chunks": (Mamba3CoreCase(2, 70, 4, 2, 8, 16, 4), None, torch.float32),
    "odd": (Mamba3CoreCase(1, 41, 6, 3, 4, 10, 3, 64, "rational", 0.6), None, torch.float32),
    "documents": (Mamba3CoreCase(1, 110, 4, 2, 8, 8, 2), DOCUMENTS, torch.float32),
    "many-heads": (Mamba3CoreCase(1, 33, 18, 2, 4, 8, 2), None, torch.float32),
    "wide": (Mamba3CoreCase(1, 33, 2, 1, 8, 128, 32), None, torch.float32),
    "bf16": (Mamba3CoreCase(2, 70, 4, 2, 8, 16, 4), None, torch.bfloat16),
}  # fmt: skip


def sizes_of(case):
    return around.Sizes(
        case.heads, case.head_dim, case.groups, case.state_dim, case.angles, case.decay,
        case.decay_floor, case.eps,
    )  # fmt: skip


def inside(case, tensors, starts):
    """What comes before the scan, by the definition: `around.Steps`, `k_unscaled`, and q k of every
    token by itself."""
    seq = tensors["projected"].shape[0]
    columns = tensors["projected"].transpose(0, 1).split(
        [*case.parts, tensors["projected"].shape[-1] - sum(case.parts)], -1
    )  # fmt: skip
    _, _, B, C, dt, A, trap, angle, _ = columns
    found = mamba3_prep(
        B, C, dt, A, tensors["dt_bias"], tensors["B_weight"], tensors["C_weight"], variant="siso",
        rank=1, decay=case.decay, decay_floor=case.decay_floor, eps=case.eps,
    )  # fmt: skip
    starts = torch.zeros(seq, dtype=torch.long) if starts is None else starts.long()
    turned = (math.pi * angle.tanh()[:, :, None] * found.dt[..., None]).cumsum(1)
    theta = turned - torch.cat((0 * turned[:, :1], turned), 1)[:, starts]
    lam = trap.sigmoid()
    gamma = found.dt * lam
    follows = torch.cat((starts[1:] == starts[:-1], torch.zeros(1, dtype=torch.bool)))
    after = torch.roll(found.dt * (1 - lam), -1, 1)
    scale = gamma + torch.where(follows[:, None], after, 0 * after)
    heads = case.heads // case.groups
    q = found.q.repeat_interleave(heads, 2) + tensors["C_bias"]
    k = found.k.repeat_interleave(heads, 2) + tensors["B_bias"]

    def rotated(x):
        c, s = (torch.nn.functional.pad(f(theta), (0, case.state_dim // 2 - case.angles), value=v)
                for f, v in ((torch.cos, 1.0), (torch.sin, 0.0)))  # fmt: skip
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)

    rows = {"dt": found.dt, "adt": found.adt, "scale": scale, "gamma": gamma,
            "qk": (q * k).sum(-1)}  # fmt: skip
    return {
        "B": found.k, "C": found.q, "theta": theta, "q": rotated(q), "k_unscaled": rotated(k),
        "k": rotated(k) * scale[..., None],
    } | {name: x.transpose(1, 2) for name, x in rows.items()}  # fmt: skip


def assert_near(name, found, expected, bound):
    assert found.shape == expected.shape, name
    off = (found.double() - expected).abs().max()
    assert off <= bound * expected.abs().max(), f"{name}: {off:.3e} of {expected.abs().max():.3e}"


@slow
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_around_the_scan_against_autograd(monkeypatch, name):
    """A value of n terms is off by n epsilons of its largest partial sum, an angle by so many of
    all it has turned, and what turns with it. A result is rounded once, as are q, k, the gradients
    that the scan hands back, and those of the normed B and C."""
    case, bounds, dtype = CASES[name]
    if name == "wide":
        monkeypatch.setattr(around, "_TILES", 32)  # one token at a time, as with many heads
    sizes, tensors = sizes_of(case), parity.drawn(case, dtype, "cpu", seed=len(name))
    starts = None
    if bounds is not None:
        starts = document_starts(case.seq, torch.tensor(bounds, dtype=torch.int32))
    wide = {n: t.double().requires_grad_() for n, t in tensors.items()}
    expected = inside(case, wide, starts)
    keys = ("q", "k_unscaled", "qk", "adt", "scale", "gamma")
    directions = {n: torch.randn_like(expected[n]) for n in keys}
    leaves = [wide[n] for n in case.inputs[:6]]
    gradients = torch.autograd.grad(
        [expected[n] for n in keys], leaves, [directions[n] for n in keys]
    )
    projected, dt_bias, B_weight, C_weight, B_bias, C_bias, _ = tensors.values()

    def by_head(x):
        return x.detach().to(dtype).transpose(1, 2).contiguous().transpose(1, 2)

    def row(key):
        return directions[key].float().contiguous()

    with poisoned_memory("cpu"):
        found = around.steps(projected, dt_bias, B_weight, C_weight, B_bias, C_bias, starts, sizes)
        dprojected = torch.full_like(projected, math.nan)
        inner = around.ScanGradients(
            by_head(directions["q"]), by_head(directions["k_unscaled"]), row("qk"), row("adt"),
            row("scale"), row("scale") + row("gamma"),
        )  # fmt: skip
        ddt_bias, weights, biases, _ = around.steps_backward(
            projected, dt_bias, B_weight, C_weight, B_bias, C_bias, starts, found, inner,
            dprojected, sizes,
        )  # fmt: skip
    epsilon = torch.finfo(torch.float32).eps
    rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
    turned = math.pi * expected["dt"].sum(-1).max().item()
    for key in ("dt", "adt", "scale", "gamma"):
        assert_near(key, getattr(found, key), expected[key], 16 * epsilon)
    for key in ("B", "C", "q", "k"):
        bound = rounding + (64 + 4 * turned) * epsilon
        assert_near(key, getattr(found, key), expected[key], bound)
    off = (found.theta.double() - expected["theta"]) / (2 * math.pi)
    off = 2 * math.pi * (off - off.round()).abs().max()
    assert off <= 4 * turned * epsilon and found.theta.abs().max() <= math.pi + epsilon
    terms = case.seq + case.state_dim + case.heads
    bound = 3 * rounding + (4 * turned + terms) * epsilon
    dparts = dprojected.split([*case.parts, projected.shape[-1] - sum(case.parts)], -1)
    expected_parts = gradients[0].split([part.shape[-1] for part in dparts], -1)
    names = ("dz", "dx", "dB", "dC", "ddt", "dA", "dtrap", "dangle", "padding")
    for key, got, want in list(zip(names, dparts, expected_parts, strict=True))[2:8]:
        assert_near(key, got, want, bound)
    assert not dparts[-1].any()
    assert dparts[0].isnan().all() and dparts[1].isnan().all()  # gate's and scan's to write
    parameters = (ddt_bias, *weights, *biases)
    for key, got, want in zip(case.inputs[1:6], parameters, gradients[1:], strict=True):
        assert_near(key, got, want, bound)


WHOLE = {  # case, cu_seqlens, programs that a launch wants: chunks of 64 and their segments
    "one-segment": (Mamba3CoreCase(2, 131, 2, 1, 8, 8, 2), None, 1),
    "segments": (Mamba3CoreCase(1, 301, 3, 1, 5, 10, 3, 64, "rational", 0.6), None, 9),
    "whole-chunks": (Mamba3CoreCase(2, 128, 2, 1, 8, 16, 4), None, 1024),
    # A document that ends shortly before a chunk does, where another has begun: chunks of 64.
    "documents": (Mamba3CoreCase(1, 230, 2, 1, 8, 8, 2), [0, 1, 3, 3, 60, 120, 192, 199], 8),
    "one-token": (Mamba3CoreCase(2, 1, 4, 2, 8, 8, 2), None, 1024),
}


@slow
@pytest.mark.parametrize("name", WHOLE)
def test_the_whole_operator_against_autograd(monkeypatch, name):
    """At lengths of several chunks and segments; a value is a sum over all tokens before it."""
    case, bounds, programs = WHOLE[name]
    tensors = parity.drawn(case, torch.float32, "cpu", seed=len(name))
    tensors["dt_bias"] -= 3  # so slow that a state outlives some chunks
    monkeypatch.setattr(triton, "_check", lambda projected: None)
    monkeypatch.setattr(scan, "_PROGRAMS", programs)
    monkeypatch.setattr(around, "_STEP", 16)  # of 64 tokens: an eighth of the interpreter's time
    options = {n: getattr(case, n) for n in ("heads", "head_dim", "groups", "state_dim", "angles",
                                             "decay", "decay_floor", "eps")}  # fmt: skip
    options["cu_seqlens"] = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    leaves = [tensors[n].requires_grad_() for n in case.inputs]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    with poisoned_memory("cpu"):
        y = triton.mamba3_core(*leaves, **options)
        direction = torch.randn(y.shape)
        found = torch.autograd.grad(y, leaves, direction, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, leaves, direction)
    expected = definition.mamba3_core(*wide, **options)
    wanted = torch.autograd.grad(expected, wide, direction.double())
    bound = 4 * case.seq * torch.finfo(torch.float32).eps * math.pi
    for key, got, want in zip(("y", *case.inputs), (y, *found), (expected, *wanted), strict=True):
        assert_near(key, got.detach(), want, bound)
    # Without a gradient to come nothing is kept, and nothing changes.
    with torch.no_grad():
        assert torch.equal(triton.mamba3_core(*leaves, **options), y)


@slow
@pytest.mark.parametrize("programs", [1, 1024])
def test_a_row_is_its_parts_one_after_another(monkeypatch, programs):
    """Three parts that carry the state, and the last tokens one by one as they are decoded; against
    the definition of the whole row in float64."""
    case = Mamba3CoreCase(2, 300, 4, 2, 8, 16, 4)
    tensors = parity.drawn(case, torch.float32, "cpu", seed=9)
    tensors["dt_bias"] -= 3  # so slow that a state outlives the parts
    monkeypatch.setattr(triton, "_check", lambda projected: None)
    monkeypatch.setattr(scan, "_PROGRAMS", programs)
    options = {n: getattr(case, n) for n in ("heads", "head_dim", "groups", "state_dim", "angles",
                                             "decay", "decay_floor", "eps")}  # fmt: skip
    expected, last = definition.mamba3_core(
        **{n: t.double() for n, t in tensors.items()}, **options, return_final_state=True
    )
    state, outputs, projected = None, [], tensors["projected"]
    with poisoned_memory("cpu"):
        for begin, end in ((0, 77), (77, 128), (128, 297)):
            part = tensors | {"projected": projected[begin:end]}
            y, state = triton.mamba3_core(
                **part, **options, initial_state=state, return_final_state=True
            )
            outputs.append(y)
        for t in range(297, case.seq):
            part = tensors | {"projected": projected[t : t + 1]}
            y, state = definition.mamba3_core(
                **part, **options, initial_state=state, return_final_state=True
            )
            outputs.append(y)
    bound = 4 * case.seq * torch.finfo(torch.float32).eps * math.pi
    assert_near("y", torch.cat(outputs), expected, bound)
    for name in ("ssm", "k", "v"):
        assert_near(name, getattr(state, name), getattr(last, name), bound)
    off = (state.angle.double() - last.angle) / (2 * math.pi)
    assert (off - off.round()).abs().max() <= bound


@pytest.mark.parametrize(
    ("seq", "programs", "expected"),
    [(1, 1, (1, 1, 1)), (4096, 224, (64, 8, 8)), (320, 3, (5, 1, 5)), (65536, 56, (1024, 64, 16)),
     (4096, 4096, (64, 64, 1)), (640, 200, (10, 1, 10)), (1088, 160, (17, 2, 9))],
)  # fmt: skip
def test_segments_cover_the_row(seq, programs, expected):
    found = scan.Segments.of(seq, programs)
    assert found == expected
    assert (found.count - 1) * found.each < found.chunks <= found.count * found.each


@pytest.mark.parametrize(
    ("projected", "words"),
    [
        (torch.zeros(3, 2, 96), "is torch.float32"),
        (torch.zeros(0, 2, 96).bfloat16(), "is empty"),
        (torch.zeros(3, 2, 90).bfloat16(), "has 180 bytes, no multiple of 16"),
        (torch.zeros(1, 1, 1).bfloat16().expand(2**20, 2**4, 2**7), "proven below 2\\^31"),
        (torch.zeros(3, 2, 40).bfloat16(), r"expected \(S, b, rows\) with at least 82"),
    ],
)
def test_a_projection_that_the_kernels_cannot_read_is_refused(projected, words):
    given = [torch.zeros(2), *(torch.ones(8) for _ in range(2)), torch.zeros(2, 8),
             torch.zeros(2, 8), torch.zeros(2)]  # fmt: skip
    with pytest.raises(Mamba3InputError, match=words):
        triton.mamba3_core(
            projected, *given, heads=2, head_dim=8, groups=2, state_dim=8, angles=12,
            decay="softplus", decay_floor=1e-4, eps=1e-5,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["backends.mamba3_scan=reference"], "mamba3_scan named: this operator has its own inside"),
        (["backends.mamba3_scan=mamba_ssm"], "mamba3_scan named"),
        (
            ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
            "tensor_model_parallel_size 2",
        ),
        (["mamba3.chunk_size=32"], "chunk_size 32"),
        (["precision.bf16=false"], "products are of bfloat16, not float32"),
    ],
)
def test_what_it_cannot_serve_it_says(overrides, why):
    recipe = load_recipe("nam56r", overrides)
    workload = REGISTRY["mamba3_core"].workload(recipe, "cuda")
    first, last = dispatch.verdicts("mamba3_core", workload).values()
    assert why in first and last is None
    assert dispatch.choose("mamba3_core", workload).observed == "reference"


def test_mimo_has_no_such_operator():
    recipe = load_recipe("nam56r", ["mamba3.variant=mimo"])
    assert REGISTRY["mamba3_core"].workload(recipe, "cuda") is None


class Counting:
    """A kernels' module whose launches are noted by the kernel's name."""

    def __init__(self, module, launched):
        self.module, self.launched = module, launched

    def __getattr__(self, name):
        found = getattr(self.module, name)
        if not hasattr(found, "run"):
            return found

        def at(grid):
            self.launched.append(name)
            return found[grid]

        return type("Kernel", (), {"__getitem__": lambda self, grid: at(grid)})()


@slow
def test_the_launches_are_those_that_the_catalog_states(monkeypatch):
    launched = []
    for module, name in (
        (around, "kernels"), (around, "backward_kernels"), (scan, "kernels"),
        (scan, "scan_backward_kernels"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, Counting(getattr(module, name), launched))
    monkeypatch.setattr(triton, "_check", lambda projected: None)
    monkeypatch.setattr(around, "_STEP", 16)
    case = Mamba3CoreCase(1, 130, 2, 1, 8, 8, 2)
    tensors = parity.drawn(case, torch.float32, "cpu", seed=0)
    leaves = {name: tensors[name].requires_grad_() for name in case.inputs}
    y = case.call(triton.mamba3_core, **leaves)["y"]
    ahead = len(launched)
    y.sum().backward()
    (backend,) = (b for b in REGISTRY["mamba3_core"].backends if b.name == "triton")
    words = f"{ahead} launches forward and {len(launched) - ahead} backward"
    assert words in backend.removes and "rotated q and k are stored" in backend.removes, launched
