"""What a backend of mamba3_scan is held to, in bfloat16, against the definition."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.mamba3 import mamba3_scan as reference
from megacpp_mcore.kernels.mamba3.case import Mamba3ScanCase
from megacpp_mcore.surfaces import mamba3_scan
from megacpp_mcore.surfaces.backend import load


def mamba_ssms(name: str, case: Mamba3ScanCase) -> Callable[..., Tensor]:
    """mamba-ssm's backend of that name, as a layer takes it on a GPU; skips where it says that it
    cannot serve."""
    backend = mamba3_scan.SURFACE.backend(name)
    if reason := backend.supports(case.workload("cuda", torch.bfloat16)):
        pytest.skip(reason)
    return load(backend.implementation)


def check_outputs_and_gradients(
    scan: Callable[..., Tensor], case: Mamba3ScanCase, device: str = "cuda"
) -> None:
    dtype = torch.bfloat16
    wide = torch.float64 if case.seq <= 512 else torch.float32
    tensors = parity.drawn(case, dtype, device, seed=case.seq)
    truth = parity.truth_of(case, tensors, dtype, wide)
    actual = parity.run(case, case.bind(scan, device, dtype), tensors, truth.directions)
    wrong = [str(e) for e in parity.errors(case, actual, truth, dtype) if not e.share <= 1]
    assert not wrong, wrong


def check_documents(
    scan: Callable[..., Tensor],
    case: Mamba3ScanCase,
    offsets: Sequence[int],
    device: str = "cuda",
) -> None:
    """Packed documents start from zero, the last one behind the last offset if that is not the end.

    offsets: of one row.
    """
    tensors = parity.drawn(case, torch.bfloat16, device, seed=offsets[1])
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    actual = scan(**leaves, cu_seqlens=cu_seqlens)
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
