"""The mamba_ssm backend of the M block where there is no GPU: what it refuses, and its states."""

import gc
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
import triton

from megacpp_mcore import dispatch
from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.mamba3 import Mamba3InputError, mamba3_scan
from megacpp_mcore.kernels.mamba3 import mamba_ssm as backend
from megacpp_mcore.kernels.mamba3 import mamba_ssm_ops as ops
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


def upstreams(given, results):
    """mamba-ssm's modules with functions that note their arguments and give `results`."""

    def function(name):
        def call(*args, **options):
            given.append(args)
            return results[name]

        return call

    return SimpleNamespace(**{name: function(name) for name in results})


def test_tritons_allocator_keeps_no_tensor_alive(monkeypatch):
    """Triton keeps the hook in every thread: one that made memory like v kept a view of the whole
    projection, 262 MiB a thread at NAM56R's sizes."""
    hooks, given, place = [], [], "mamba_ssm.ops.triton.mamba3"
    monkeypatch.setattr(triton, "set_allocator", hooks.append)
    monkeypatch.setattr(ops, "_pin", lambda *sizes: None)
    y = torch.zeros(1)
    forward = upstreams(given, {"mamba3_siso_fwd": (y, y), "angle_dt_fwd": y})
    for name in ("mamba3_siso_fwd", "angle_dt"):
        monkeypatch.setitem(sys.modules, f"{place}.{name}", forward)
    case = Mamba3ScanCase.samples()["plain"]
    tensors = parity.drawn(case, torch.bfloat16, "cpu", seed=0)
    projected = torch.zeros(2, *tensors["v"].shape, dtype=torch.bfloat16)
    kept = weakref.ref(projected)
    tensors["v"] = projected[0]
    ops.mamba3_siso._init_fn(
        *(tensors[name] for name in ("q", "k", "v", "adt", "dt", "trap", "q_bias", "k_bias")),
        tensors["angles"], tensors["D"], tensors["z"], None, case.chunk_size, False,
    )  # fmt: skip
    assert hooks and any(x is tensors["v"] for args in given for x in args)
    del projected, tensors
    given.clear()
    gc.collect()
    assert kept() is None
