"""Our own Mamba-3 MIMO kernels against the definition, at NAM56R's dims."""

import pytest
import torch
from mamba3_checks import check_documents, check_outputs_and_gradients

from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.mamba3 import mamba3_scan as definition
from megacpp_mcore.kernels.mamba3.case import Mamba3ScanCase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
    pytest.mark.parametrize("rank", [2, 4]),
]
CASES = {
    "odd-length": (2, 200, 8, 2, 64, 64, 16),
    "narrow": (2, 200, 8, 2, 32, 32, 8),
    "one-token": (1, 1, 4, 4, 64, 64, 16),
    "less-than-a-chunk": (2, 15, 4, 2, 64, 64, 16),
    "nam56r": (1, 4096, 56, 8, 64, 64, 16),
}


@pytest.fixture
def scan():
    from megacpp_mcore.kernels.mamba3.triton_mimo import mamba3_scan

    return mamba3_scan


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(scan, name, rank):
    check_outputs_and_gradients(scan, Mamba3ScanCase(*CASES[name], rank, 64))


@pytest.mark.parametrize("offsets", ([0, 70, 200], [0, 64, 128], [0, 1, 199]))
def test_documents_start_from_zero(scan, offsets, rank):
    check_documents(scan, Mamba3ScanCase(1, 200, 8, 2, 64, 64, 16, rank, 64), offsets)


def test_a_row_is_its_pieces(scan, rank):
    """Values and, through the states, the gradient of the first piece's tokens."""
    case = Mamba3ScanCase(1, 230, 8, 2, 64, 64, 16, rank, 64)
    tensors = parity.drawn(case, torch.bfloat16, "cuda", seed=rank)
    tensors["adt"] /= 8
    per_token = ("q", "k", "v", "adt", "dt", "trap", "angles", "z")

    def run(function, tensors, ends):
        leaves = {n: t.detach().requires_grad_() for n, t in tensors.items()}
        state, outputs, begin = None, [], 0
        for end in ends:
            part = {n: t[:, begin:end] if n in per_token else t for n, t in leaves.items()}
            y, state = function(**part, initial_state=state, return_final_state=True)
            outputs, begin = [*outputs, y], end
        y = torch.cat(outputs, 1)
        return y, *torch.autograd.grad(y.float().square().sum(), list(leaves.values()))

    wide = {n: t.double() for n, t in tensors.items()}
    expected = run(lambda **given: definition(**given), wide, (case.seq,))
    for ends in ((case.seq,), (77, 78, 142, case.seq)):
        found = run(scan, tensors, ends)
        for name, got, want in zip(("y", *tensors), found, expected, strict=True):
            # The square's gradient has y's own rounding in it.
            bound = 2 * case.tolerance("dv" if name != "angles" else "dangles", torch.bfloat16)
            off = (got.double() - want).abs().max()
            assert off <= bound * want.abs().max(), f"{name}: {off:.3e}, {ends}"
