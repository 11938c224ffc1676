"""mamba-ssm's Mamba-3 SISO kernels against the definition, at NAM56R's state and head dims."""

import pytest
import torch

from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.mamba3 import mamba3_scan as reference
from megacpp_mcore.kernels.mamba3.case import Mamba3ScanCase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


CASES = {
    "one-chunk": Mamba3ScanCase(1, 64, 2, 1, 64, 64, 16, 0, 64),
    "odd-length": Mamba3ScanCase(2, 200, 8, 2, 64, 64, 16, 0, 64),
    "one-token": Mamba3ScanCase(1, 1, 4, 4, 64, 64, 16, 0, 64),
    "nam56r": Mamba3ScanCase(1, 4096, 56, 8, 64, 64, 16, 0, 64),
}


def scan():
    return pytest.importorskip("megacpp_mcore.kernels.mamba3.mamba_ssm").mamba3_scan


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name):
    case, dtype = CASES[name], torch.bfloat16
    wide = torch.float64 if case.seq <= 512 else torch.float32
    tensors = parity.drawn(case, dtype, "cuda", seed=case.seq)
    truth = parity.truth_of(case, tensors, dtype, wide)
    actual = parity.run(case, case.bind(scan(), "cuda", dtype), tensors, truth.directions)
    wrong = [str(e) for e in parity.errors(case, actual, truth, dtype) if not e.share <= 1]
    assert not wrong, wrong


@pytest.mark.parametrize("offsets", ([0, 70, 200], [0, 64, 128], [0, 1, 199]))
def test_documents_start_from_zero(offsets):
    """Packed documents, the last one behind the last offset where that is not the end."""
    case = Mamba3ScanCase(1, 200, 8, 2, 64, 64, 16, 0, 64)
    tensors = parity.drawn(case, torch.bfloat16, "cuda", seed=offsets[1])
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    actual = scan()(**leaves, cu_seqlens=cu_seqlens)
    gradient = torch.randn_like(actual)
    actual_grads = torch.autograd.grad(actual, list(leaves.values()), gradient)
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in leaves.items()}
    expected = reference(**wide, cu_seqlens=cu_seqlens)
    expected_grads = torch.autograd.grad(expected, list(wide.values()), gradient.double())
    for name, got, want in zip(
        ["y", *leaves], [actual, *actual_grads], [expected, *expected_grads], strict=True
    ):
        bound = case.tolerance(name if name == "y" else f"d{name}", torch.bfloat16)
        distance = (got.double() - want).abs().max() / want.abs().max()
        assert distance <= bound, f"{name}: {distance:.3e} > {bound:.3e}"


def test_the_same_inputs_give_the_same_bits():
    case = CASES["odd-length"]
    tensors = parity.drawn(case, torch.bfloat16, "cuda", seed=3)
    first, second = (scan()(**tensors) for _ in range(2))
    assert torch.equal(first, second)


def test_a_state_is_carried_by_the_reference():
    case = CASES["odd-length"]
    tensors = parity.drawn(case, torch.bfloat16, "cuda", seed=4)
    whole = scan()(**tensors)
    per_token = ("q", "k", "v", "adt", "dt", "trap", "angles", "z")
    state, parts = None, []
    for rows in (slice(0, 77), slice(77, None)):
        part = {n: t[:, rows] if n in per_token else t for n, t in tensors.items()}
        y, state = scan()(**part, initial_state=state, return_final_state=True)
        parts.append(y)
    error = (torch.cat(parts, 1).float() - whole.float()).abs().max() / whole.float().abs().max()
    assert error <= case.tolerance("y", torch.bfloat16)
