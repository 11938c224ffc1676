"""mamba-ssm's Mamba-3 MIMO kernels (TileLang) against the definition, at NAM56R's dims."""

import pytest
import torch
from mamba3_checks import check_documents, check_outputs_and_gradients, mamba_ssms

from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.mamba3.case import Mamba3ScanCase
from megacpp_mcore.surfaces.mamba3_scan import MAMBA_SSM_MIMO

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
RANK = 4
CASES = {
    "one-chunk": Mamba3ScanCase(1, 64, 2, 1, 64, 64, 16, RANK, 64),
    "odd-length": Mamba3ScanCase(2, 200, 8, 2, 64, 64, 16, RANK, 64),
    "group-a-head": Mamba3ScanCase(2, 128, 4, 4, 64, 64, 16, RANK, 64),
    "one-token": Mamba3ScanCase(1, 1, 4, 4, 64, 64, 16, RANK, 64),
    "two-tokens": Mamba3ScanCase(1, 2, 4, 2, 64, 64, 16, RANK, 64),
    "rows-of-one-token": Mamba3ScanCase(3, 1, 4, 1, 64, 64, 16, RANK, 64),
    "less-than-a-chunk": Mamba3ScanCase(2, 15, 4, 2, 64, 64, 16, RANK, 64),
    "31-tokens": Mamba3ScanCase(2, 31, 4, 2, 64, 64, 16, RANK, 64),
    "63-tokens": Mamba3ScanCase(1, 63, 4, 2, 64, 64, 16, RANK, 64),
    "one-head": Mamba3ScanCase(2, 80, 1, 1, 64, 64, 16, RANK, 64),
    "nam56r": Mamba3ScanCase(1, 4096, 56, 8, 64, 64, 16, RANK, 64),
}


@pytest.fixture
def scan():
    return mamba_ssms(MAMBA_SSM_MIMO, CASES["nam56r"])


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(scan, name):
    check_outputs_and_gradients(scan, CASES[name])


@pytest.mark.parametrize("seq", [1, 64, 100])
def test_a_micro_batch_of_one_as_megatron_has_it(scan, seq):
    """[s, b, h] seen as (b, s, ...): contiguous to torch, with strides that TileLang refuses."""
    case, dtype = Mamba3ScanCase(1, seq, 4, 1, 64, 64, 16, RANK, 64), torch.bfloat16
    tensors = parity.drawn(case, dtype, "cuda", seed=seq)
    per_token = ("v", "z", "adt", "dt", "trap", "angles")
    viewed = tensors | {name: _as_megatrons(tensors[name]) for name in per_token}
    truth = parity.truth_of(case, tensors, dtype, torch.float64)
    directions = {"y": _as_megatrons(truth.directions["y"])}
    actual = parity.run(case, case.bind(scan, "cuda", dtype), viewed, directions)
    wrong = [str(e) for e in parity.errors(case, actual, truth, dtype) if not e.share <= 1]
    assert not wrong, wrong


def _as_megatrons(x):
    return x.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)


@pytest.mark.parametrize(
    "offsets", ([0, 70, 200], [0, 64, 128], [0, 1, 199], [0, 70, 141, *[200] * 198])
)
def test_documents_start_from_zero(scan, offsets):
    """Megatron pads the offsets with the end of the row, to one a token."""
    case = Mamba3ScanCase(1, 200, 8, 2, 64, 64, 16, RANK, 64)
    check_documents(scan, case, offsets)
