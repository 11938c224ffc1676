"""R between its projections: the kernels around the recurrence against autograd in float64, and the
whole operator with a recurrence in plain torch in place of the CUDA kernels."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from admission_probes import poisoned_memory, strided
from torch.utils.checkpoint import checkpoint

from megacpp_mcore import dispatch
from megacpp_mcore.kernels import m2rnn_core as definition
from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.documents import document_starts, positions
from megacpp_mcore.kernels.m2rnn import M2RNNInputError, cuda, m2rnn
from megacpp_mcore.kernels.m2rnn_core import around, triton
from megacpp_mcore.kernels.m2rnn_core.case import M2RNNCoreCase
from megacpp_mcore.kernels.m2rnn_core.prep import conv_and_decay, gated_norm
from megacpp_mcore.kernels.m2rnn_core.reference import heads_of
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.surfaces.registry import REGISTRY

slow = pytest.mark.slow  # Triton's interpreter
DOCUMENTS = [0, 1, 3, 3, 40, 64, 99, 110]  # of a row: shorter than the convolution, and empty
CASES = {  # case, cu_seqlens, dtype
    "tiles": (M2RNNCoreCase(2, 70, 4, 8, 4, 8), None, torch.float32),
    "odd": (M2RNNCoreCase(3, 7, 3, 6, 5, 8, kernel=3), None, torch.float32),
    "documents": (M2RNNCoreCase(1, 110, 4, 16, 4, 8, kernel=5), DOCUMENTS, torch.float32),
    "one-token": (M2RNNCoreCase(2, 1, 4, 8, 4, 8), None, torch.float32),
    "bf16": (M2RNNCoreCase(2, 70, 4, 8, 4, 8), None, torch.bfloat16),
}  # fmt: skip


def assert_near(name, found, expected, bound):
    assert found.shape == expected.shape, name
    off = (found.double() - expected).abs().max()
    assert off <= bound * expected.abs().max(), f"{name}: {off:.3e} of {expected.abs().max():.3e}"


@slow
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_around_the_recurrence_against_autograd(name):
    """All is computed in float32: a value of n terms is off by n epsilons of its largest partial
    sum, taken as of the largest value. In bf16 what lies between the kernels is rounded: mixed, y,
    and their gradients, of which a gradient of the projection sees three."""
    case, bounds, dtype = CASES[name]
    sizes = around.Sizes(case.heads, case.k_head_dim, case.v_head_dim, case.eps)
    tensors = parity.drawn(case, dtype, "cpu", seed=len(name))
    starts = offset = None
    if bounds is not None:
        bounds = torch.tensor(bounds, dtype=torch.int32)
        starts = document_starts(case.seq, bounds)
        offset = positions(case.seq, bounds).view(-1, 1, 1)
    wide = {n: t.double().requires_grad_() for n, t in tensors.items() if n != "W"}
    padding = tensors["projected"].shape[-1] - sum(case.parts)
    *qkv, gate, decay, _ = wide["projected"].split([*case.parts, padding], -1)
    mixed, f = conv_and_decay(
        *qkv, decay, wide["conv_weight"], wide["conv_bias"], wide["A_log"], wide["dt_bias"],
        offset=offset,
    )  # fmt: skip
    *_, v = heads_of(mixed, case.k_head_dim, case.v_head_dim)
    y = torch.randn(case.batch, case.seq, case.heads, case.v_head_dim).to(dtype)
    wide_y = y.double().requires_grad_()
    out = gated_norm(
        wide_y, v, gate, wide["D"], wide["norm_weight"], channels=sizes.values, eps=case.eps
    )
    dout = torch.randn(out.shape).to(dtype)
    dq, dk = torch.randn(2, case.batch, case.seq, 1, case.k_head_dim).to(dtype)
    dv, df = torch.randn(y.shape).to(dtype), torch.randn(f.shape)
    dmixed = torch.cat([d.flatten(2) for d in (dq, dk, dv)], -1).transpose(0, 1).double()
    names = list(wide)
    gradients = torch.autograd.grad(
        [mixed, f, out], [*wide.values(), wide_y], [dmixed, df.double(), dout.double()]
    )
    gradients = dict(zip([*names, "y"], gradients, strict=True))
    projected, weight, bias, A_log, dt_bias, _, D, norm_weight = tensors.values()
    dprojected = torch.full_like(projected, math.nan)
    with poisoned_memory("cpu"):
        got_mixed, got_f = around.before(projected, weight, bias, A_log, dt_bias, starts, sizes)
        got_out = around.after(projected, got_mixed, y, D, norm_weight, sizes)
        dy, behind = around.after_backward(
            projected, got_mixed, y, D, norm_weight, dout, dprojected, sizes
        )
        sums = around.before_backward(
            projected, weight, bias, A_log, dt_bias, starts, D, dq, dk, dv, dy, got_f, df,
            dprojected, sizes,
        )  # fmt: skip
    parameters = around.parameter_gradients(sums, weight, sizes)
    found = dict(zip(("conv_weight", "conv_bias", "A_log", "dt_bias"), parameters, strict=True))
    found |= {"D": behind[0], "norm_weight": behind[1], "y": dy}
    rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
    tokens = case.batch * case.seq
    bound = 4 * rounding + (tokens + 2 * sizes.values + 32) * torch.finfo(torch.float32).eps
    for key, got, want in (("mixed", got_mixed, mixed), ("out", got_out, out)):
        assert_near(key, got, want, bound)
    assert_near("f", got_f, f, 64 * torch.finfo(torch.float32).eps)
    for key, got in found.items():
        assert_near(f"d{key}", got, gradients[key], bound)
    parts = dprojected.split([*case.parts, padding], -1)
    expected = gradients["projected"].split([*case.parts, padding], -1)
    for key, got, want in zip(("dq", "dk", "dv", "dgate", "ddecay"), parts, expected, strict=False):
        assert_near(key, got, want, bound)
    assert not parts[-1].any()


class RecurrenceInTorch:
    """`cuda.forward` and `cuda.backward`. In a thread: an operator's own has no autograd."""

    def __init__(self):
        self.thread = ThreadPoolExecutor(1)

    def forward(self, q, k, v, W, f, initial, bounds, chunk_size, grad_clamp, exact_tanh):
        self.leaves = [t.detach().clone().requires_grad_() for t in (q, k, v, W, f)]
        options = {"cu_seqlens": bounds, "chunk_size": chunk_size, "grad_clamp": grad_clamp}
        self.y, final = self.thread.submit(m2rnn, *self.leaves, **options).result()
        assert exact_tanh and initial is None
        return self.y.detach(), final.detach(), f.new_zeros(1)

    def backward(self, dy, d_final, q, k, v, W, f, bounds, kept, chunk_size, grad_clamp):
        assert d_final is None and torch.equal(q, self.leaves[0])
        found = self.thread.submit(torch.autograd.grad, self.y, self.leaves, dy).result()
        return *(t.contiguous() for t in found), None


@slow
@pytest.mark.parametrize("bounds", [None, [0, 20, 20, 33, 40]], ids=["whole", "documents"])
def test_the_whole_operator_on_a_recurrence_in_torch(monkeypatch, bounds):
    """The parts lie where they should, and every gradient arrives where it belongs; so do they of
    tensors in other strides, among NaN."""
    case = M2RNNCoreCase(1 if bounds else 2, 40, 2, 32, 16, 16)
    tensors = parity.drawn(case, torch.float32, "cpu", seed=3)
    stand_in = RecurrenceInTorch()
    monkeypatch.setattr(cuda, "forward", stand_in.forward)
    monkeypatch.setattr(cuda, "backward", stand_in.backward)
    options = {
        "heads": 2, "k_dim": 32, "v_dim": 16, "eps": case.eps, "chunk_size": 16,
        "grad_clamp": 10.0, "tanh": "exact",
        "cu_seqlens": None if bounds is None else torch.tensor(bounds, dtype=torch.int32),
    }  # fmt: skip
    leaves = [(strided(t) if bounds else t).requires_grad_() for t in tensors.values()]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    with poisoned_memory("cpu"):
        # a checkpoint that hands out what is saved once
        out = checkpoint(triton.m2rnn_core, *leaves, **options, use_reentrant=False)
        direction = torch.randn(out.shape)
        found = torch.autograd.grad(out, leaves, direction)
    expected = definition.m2rnn_core(*wide, **options)
    wanted = torch.autograd.grad(expected, wide, direction.double())
    bound = 64 * case.seq * torch.finfo(torch.float32).eps  # an error lasts as long as the state
    for key, got, want in zip(("out", *case.inputs), (out, *found), (expected, *wanted),
                              strict=True):  # fmt: skip
        assert_near(key, got.detach(), want, bound)


@slow
def test_the_case_is_not_chaotic_over_many_tokens():
    """In float64 a change of the input by 1e-9 changes nothing by more than 30 times that; with a W
    that lengthens some directions it was 20 million. So the definition passes its own gate in
    bfloat16, as it must."""
    case = M2RNNCoreCase(1, 256, 4, 64, 16, 32)
    tensors = parity.drawn(case, torch.bfloat16, "cpu", seed=1)
    truth = parity.truth_of(case, tensors, torch.bfloat16, torch.float64)
    bound = parity.BoundBackend(case.reference)
    found = parity.run(case, bound, tensors, truth.directions)
    assert parity.errors(case, found, truth, torch.bfloat16)[0].share < 1
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    directions = {name: tensor.double() for name, tensor in truth.directions.items()}
    moved = wide | {
        "projected": wide["projected"] * (1 + 1e-9 * torch.randn(wide["projected"].shape))
    }
    before, after = (parity.run(case, bound, given, directions) for given in (wide, moved))
    for name, value in before.items():
        assert (after[name] - value).abs().max() < 30e-9 * value.abs().max(), name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k_dim": 24, "v_dim": 16}, "K is 24; it takes multiples of 32"),
        ({"k_dim": 32, "v_dim": 8}, "V is 8; it takes 16"),
        ({"chunk_size": 48}, "chunk_size is 48; it takes 16, 32 for bfloat16"),
        ({"heads": 40}, r"expected \(S, b, rows\) with tokens and at least 1384 rows"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "packs documents into one row, the batch is 2"),
    ],
)
def test_what_the_recurrence_does_not_take_is_refused(change, words):
    given = {"heads": 2, "k_dim": 32, "v_dim": 16, "eps": 1e-5, "chunk_size": 32,
             "grad_clamp": None, "tanh": "exact"} | change  # fmt: skip
    with pytest.raises(M2RNNInputError, match=words):
        triton.m2rnn_core(torch.zeros(3, 2, 144).bfloat16(), *[torch.zeros(1)] * 7, **given)


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "W", "D"])
def test_a_parameter_that_is_not_float32_is_refused(name):
    """W goes to the CUDA kernel by its address: of a bf16 one it would read beyond the end."""
    case = M2RNNCoreCase(2, 3, 2, 32, 16, 32)
    tensors = parity.drawn(case, torch.bfloat16, "cpu", seed=1)
    tensors[name] = tensors[name].bfloat16()
    with pytest.raises(M2RNNInputError, match=f"{name} is torch.bfloat16; .* torch.float32"):
        case.bind(triton.m2rnn_core, "cpu", torch.bfloat16).call(**tensors)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["backends.m2rnn=reference"], "m2rnn named: this operator has its own inside"),
        (["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
         "tensor_model_parallel_size 2"),
        (["m2rnn.chunk_size=48"], "chunk_size is 48"),
    ],
)  # fmt: skip
def test_what_it_cannot_serve_it_says(overrides, why):
    workload = REGISTRY["m2rnn_core"].workload(load_recipe("nam56r", overrides), "cuda")
    first, last = dispatch.verdicts("m2rnn_core", workload).values()
    assert why in first and last is None
    assert dispatch.choose("m2rnn_core", workload).observed == "reference"
