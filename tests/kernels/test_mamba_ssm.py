"""The mamba_ssm backend of the M block where there is no GPU: what it refuses, and its states."""

import pytest
import torch

from megacpp_mcore import dispatch
from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.mamba3 import Mamba3InputError, mamba3_scan
from megacpp_mcore.kernels.mamba3 import mamba_ssm as backend
from megacpp_mcore.kernels.mamba3.case import Mamba3ScanCase

NAM56R = {
    "variant": "siso", "heads": 56, "groups": 8, "head_dim": 64, "state_dim": 64, "rank": 1,
    "angles": 16, "chunk_size": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("device", "dtype", "sizes", "why"),
    [
        ("cpu", "bfloat16", {}, "run on cuda only"),
        ("cuda", "float32", {}, "compute in bfloat16, not float32"),
        ("cuda", "bfloat16", {"variant": "mimo"}, "variant mimo"),
        ("cuda", "bfloat16", {"state_dim": 48}, "state_dim 48"),
        ("cuda", "bfloat16", {"head_dim": 256}, "head_dim 256"),
        ("cuda", "bfloat16", {"angles": 15}, "15 angles"),
        ("cuda", "bfloat16", {"chunk_size": 128}, "chunk_size 128"),
    ],
)
def test_what_it_cannot_serve_it_says(device, dtype, sizes, why):
    problem = dispatch.Workload.of(device, dtype, **{**NAM56R, **sizes})
    assert why in dispatch.verdicts("mamba3_scan", problem)["mamba_ssm"]
    with pytest.raises(dispatch.DispatchError, match=why):
        dispatch.choose("mamba3_scan", problem, {"mamba3_scan": "mamba_ssm"})
    assert dispatch.choose("mamba3_scan", problem).observed == "reference"


def test_a_dtype_that_upstream_would_round_is_refused():
    case = Mamba3ScanCase.samples()["plain"]
    with pytest.raises(Mamba3InputError, match=r"v is torch.float32"):
        backend.mamba3_scan(**parity.drawn(case, torch.float32, "cpu", seed=0))


def test_with_a_state_the_reference_runs():
    case = Mamba3ScanCase.samples()["plain"]
    tensors = parity.drawn(case, torch.bfloat16, "cpu", seed=0)
    for actual, expected in zip(
        backend.mamba3_scan(**tensors, return_final_state=True),
        mamba3_scan(**tensors, chunk_size=64, return_final_state=True),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
