"""M between its projections: the kernels around the scan against autograd in float64, and the whole
operator with a scan in plain torch in place of mamba-ssm's kernels, which run on a GPU alone."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from admission_probes import poisoned_memory

from megacpp_mcore import dispatch
from megacpp_mcore.kernels import mamba3_core as definition
from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.mamba3 import Mamba3InputError
from megacpp_mcore.kernels.mamba3_core import around, scan, triton
from megacpp_mcore.kernels.mamba3_core.case import Mamba3CoreCase
from megacpp_mcore.kernels.mamba3_core.reference import document_starts
from megacpp_mcore.kernels.mamba3_prep import mamba3_prep
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
    """What the scan makes of its arguments before it scans, by the definition: q, k, dt, adt, trap
    and theta as `around.Steps`; k's factor, the diagonal's, the rotated q, the rotated and scaled
    k, and gamma (q k)."""
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

    rows = {"dt": found.dt, "adt": found.adt, "trap": trap, "scale": scale, "gamma": gamma,
            "qk": gamma * (q * k).sum(-1)}  # fmt: skip
    return {
        "q": found.q, "k": found.k, "theta": theta, "q_rotated": rotated(q),
        "k_rotated": rotated(k) * scale[..., None],
    } | {name: x.transpose(1, 2) for name, x in rows.items()}  # fmt: skip


def assert_near(name, found, expected, bound):
    assert found.shape == expected.shape, name
    off = (found.double() - expected).abs().max()
    assert off <= bound * expected.abs().max(), f"{name}: {off:.3e} of {expected.abs().max():.3e}"


@slow
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_around_the_scan_against_autograd(name):
    """A value of n terms is off by n epsilons of its largest partial sum, an angle by so many of
    all it has turned, and what turns with it. A result is rounded once, as are q, k, and the
    gradients that the scan hands back."""
    case, bounds, dtype = CASES[name]
    sizes, tensors = sizes_of(case), parity.drawn(case, dtype, "cpu", seed=len(name))
    starts = None
    if bounds is not None:
        _, starts = document_starts(torch.tensor(bounds), case.seq)
    wide = {n: t.double().requires_grad_() for n, t in tensors.items()}
    expected = inside(case, wide, starts)
    keys = ("q_rotated", "k_rotated", "qk", "adt")
    directions = {n: torch.randn_like(expected[n]) for n in keys}
    leaves = [wide[n] for n in case.inputs[:6]]
    gradients = torch.autograd.grad(
        [expected[n] for n in keys], leaves, [directions[n] for n in keys]
    )
    projected, dt_bias, B_weight, C_weight, B_bias, C_bias, _ = tensors.values()

    def by_head(x):
        return x.detach().to(dtype).transpose(1, 2).contiguous().transpose(1, 2)

    def row(key):
        return expected[key].detach().float().contiguous()

    with poisoned_memory("cpu"):
        found = around.steps(projected, dt_bias, B_weight, C_weight, starts, sizes)
        dprojected = torch.full_like(projected, math.nan)
        inner = around.ScanGradients(
            by_head(directions["q_rotated"]), by_head(directions["k_rotated"]),
            directions["adt"].float().contiguous(), directions["qk"].float().contiguous(),
        )  # fmt: skip
        sums = around.steps_backward(
            projected, dt_bias, B_weight, C_weight, B_bias, C_bias, starts, found.dt, found.theta,
            row("scale"), row("gamma"), inner, dprojected, sizes,
        )  # fmt: skip
    epsilon = torch.finfo(torch.float32).eps
    rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
    turned = math.pi * expected["dt"].sum(-1).max().item()
    for key in ("dt", "adt", "trap"):
        assert_near(key, getattr(found, key), expected[key], 16 * epsilon)
    for key in ("q", "k"):
        assert_near(key, getattr(found, key), expected[key], rounding + 64 * epsilon)
    off = (found.theta.double() - expected["theta"]) / (2 * math.pi)
    off = 2 * math.pi * (off - off.round()).abs().max()
    assert off <= 4 * turned * epsilon and found.theta.abs().max() <= math.pi + epsilon
    terms = case.seq + case.state_dim + case.heads
    bound = 2 * rounding + (4 * turned + terms) * epsilon
    dparts = dprojected.split([*case.parts, projected.shape[-1] - sum(case.parts)], -1)
    expected_parts = gradients[0].split([part.shape[-1] for part in dparts], -1)
    names = ("dz", "dx", "dB", "dC", "ddt", "dA", "dtrap", "dangle", "padding")
    for key, got, want in list(zip(names, dparts, expected_parts, strict=True))[2:8]:
        assert_near(key, got, want, bound)
    assert not dparts[-1].any()
    assert dparts[0].isnan().all() and dparts[1].isnan().all()  # gate's and scan's to write
    parameters = around.parameter_gradients(sums, sizes)
    for key, got, want in zip(case.inputs[1:6], parameters, gradients[1:], strict=True):
        assert_near(key, got, want, bound)


class ScanInTorch:
    """`scan.forward` and `scan.backward`, every pair of tokens at once.

    In a thread: an operator's own thread has no autograd.
    """

    def __init__(self, case, tensors):
        self.case, self.tensors = case, tensors
        self.thread = ThreadPoolExecutor(1)

    def forward(self, steps, x, z, q_bias, k_bias, D, bounds, y, save):
        starts = None
        if bounds is not None:
            _, starts = document_starts(bounds[:-1], x.shape[1])
        with torch.no_grad():
            found = inside(self.case, self.tensors, starts)
        leaves = [found["q_rotated"], found["k_rotated"], x, found["adt"], found["qk"], D]
        self.leaves = [t.detach().clone().requires_grad_() for t in leaves]
        self.inner = self.thread.submit(self.scanned, *self.leaves, starts).result()
        y.copy_(self.inner.detach() * torch.nn.functional.silu(z))
        saved = scan.saved_like(x, q_bias.shape[-1], None)
        saved.y.copy_(self.inner.detach())
        saved.scale.copy_(found["scale"])
        saved.gamma.copy_(found["gamma"])
        return saved

    @staticmethod
    def scanned(q, k, x, adt, qk, D, starts):
        past = adt.cumsum(-1)
        seq = x.shape[1]
        earlier = torch.ones(seq, seq).tril(-1).bool()
        if starts is not None:
            earlier &= starts[:, None] == starts
        decay = (past[..., :, None] - past[..., None, :]).masked_fill(~earlier, -math.inf).exp()
        scores = torch.einsum("bthn,bshn->bhts", q, k) * decay
        own = (D[:, None] + qk).transpose(1, 2)[..., None]
        return torch.einsum("bhts,bshp->bthp", scores, x) + own * x

    def backward(self, dy, saved, x, D, bounds, dx):
        given = self.thread.submit(torch.autograd.grad, self.inner, self.leaves, dy)
        dq, dk, found, dadt, dqk, dD = given.result()
        dx.copy_(found)
        dq, dk = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (dq, dk))
        return around.ScanGradients(dq, dk, dadt.contiguous(), dqk.contiguous()), dD


@slow
@pytest.mark.parametrize("bounds", [None, [0, 20, 20, 33]], ids=["whole", "documents"])
def test_the_whole_operator_on_a_scan_in_torch(monkeypatch, bounds):
    """The parts lie where they should, and every gradient arrives where it belongs."""
    case = Mamba3CoreCase(1 if bounds else 2, 40, 4, 2, 8, 8, 2)
    tensors = parity.drawn(case, torch.float32, "cpu", seed=3)
    stand_in = ScanInTorch(case, tensors)
    monkeypatch.setattr(triton, "_check", lambda projected: None)
    monkeypatch.setattr(scan, "forward", stand_in.forward)
    monkeypatch.setattr(scan, "backward", stand_in.backward)
    options = {n: getattr(case, n) for n in ("heads", "head_dim", "groups", "state_dim", "angles",
                                             "decay", "decay_floor", "eps")}  # fmt: skip
    options["cu_seqlens"] = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    leaves = [tensors[n].requires_grad_() for n in case.inputs]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    with poisoned_memory("cpu"):
        y = triton.mamba3_core(*leaves, **options)
        direction = torch.randn(y.shape)
        found = torch.autograd.grad(y, leaves, direction)
    expected = definition.mamba3_core(*wide, **options)
    wanted = torch.autograd.grad(expected, wide, direction.double())
    bound = 4 * case.seq * torch.finfo(torch.float32).eps * math.pi
    for key, got, want in zip(("y", *case.inputs), (y, *found), (expected, *wanted), strict=True):
        assert_near(key, got.detach(), want, bound)
    # Without a gradient to come nothing is kept, and nothing changes.
    with torch.no_grad():
        assert torch.equal(triton.mamba3_core(*leaves, **options), y)


@pytest.mark.parametrize(
    ("projected", "words"),
    [
        (torch.zeros(3, 2, 96), "is torch.float32"),
        (torch.zeros(0, 2, 96).bfloat16(), "is empty"),
        (torch.zeros(3, 2, 90).bfloat16(), "has 180 bytes, no multiple of 16"),
        (torch.zeros(3, 2, 40).bfloat16(), r"expected \(S, b, rows\) with at least 82"),
        (torch.zeros(1, 1, 1).bfloat16().expand(2**20, 2**4, 2**7), "address fewer than 2\\^31"),
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
        (["backends.mamba3_prep=reference"], "mamba3_prep named: this operator has both inside"),
        (["backends.mamba3_scan=mamba_ssm"], "mamba3_scan named"),
        (
            ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
            "tensor_model_parallel_size 2",
        ),
        (["mamba3.chunk_size=32"], "chunk_size 32"),
        (["precision.bf16=false"], "compute in bfloat16, not float32"),
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
