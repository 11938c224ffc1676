"""mamba-ssm's Mamba-3 SISO kernels against the definition, at NAM56R's state and head dims."""

import pytest
import torch
from mamba3_checks import check_documents, check_outputs_and_gradients, mamba_ssms

from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.mamba3.case import Mamba3ScanCase
from megacpp_mcore.surfaces.mamba3_scan import MAMBA_SSM

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


@pytest.fixture
def scan():
    return mamba_ssms(MAMBA_SSM, CASES["nam56r"])


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(scan, name):
    check_outputs_and_gradients(scan, CASES[name])


@pytest.mark.parametrize("offsets", ([0, 70, 200], [0, 64, 128], [0, 1, 199]))
def test_documents_start_from_zero(scan, offsets):
    check_documents(scan, Mamba3ScanCase(1, 200, 8, 2, 64, 64, 16, 0, 64), offsets)


def test_the_same_inputs_give_the_same_bits(scan):
    case = CASES["odd-length"]
    tensors = parity.drawn(case, torch.bfloat16, "cuda", seed=3)
    first, second = (scan(**tensors) for _ in range(2))
    assert torch.equal(first, second)


def test_a_state_is_carried_by_the_reference(scan):
    case = CASES["odd-length"]
    tensors = parity.drawn(case, torch.bfloat16, "cuda", seed=4)
    whole = scan(**tensors)
    per_token = ("q", "k", "v", "adt", "dt", "trap", "angles", "z")
    state, parts = None, []
    for rows in (slice(0, 77), slice(77, None)):
        part = {n: t[:, rows] if n in per_token else t for n, t in tensors.items()}
        y, state = scan(**part, initial_state=state, return_final_state=True)
        parts.append(y)
    error = (torch.cat(parts, 1).float() - whole.float()).abs().max() / whole.float().abs().max()
    assert error <= case.tolerance("y", torch.bfloat16)
