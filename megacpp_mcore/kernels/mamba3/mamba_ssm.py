"""Mamba-3 SISO on the Triton kernels of mamba-ssm, behind the interface of `mamba3_scan`.

Upstream casts q, k, v, z, trap and angles to bfloat16, so that only a bfloat16 model is served
without a loss that nobody asked for. Its kernels search 200 configurations on their first call,
minutes on an H200; for the sizes in `mamba_ssm_configs` they are given one configuration each.
"""

import functools
import importlib

import torch
from torch import Tensor

from megacpp_mcore.kernels.mamba3 import mamba3_scan as reference_scan
from megacpp_mcore.kernels.mamba3.inputs import Mamba3InputError, Mamba3State
from megacpp_mcore.kernels.mamba3.mamba_ssm_configs import PINNED

_PACKAGE = "mamba_ssm.ops.triton.mamba3"
_CHUNK = 64


def mamba3_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    adt: Tensor,
    dt: Tensor,
    trap: Tensor,
    angles: Tensor,
    q_bias: Tensor,
    k_bias: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    *,
    chunk_size: int = _CHUNK,
    cu_seqlens: Tensor | None = None,
    initial_state: Mamba3State | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Mamba3State]:
    """`megacpp_mcore.kernels.mamba3.mamba3_scan`, SISO, in bfloat16; its shapes and its meaning.

    With a state, which is inference, the reference runs: upstream keeps the state's angle in
    bfloat16, and its search adds the first call's gradients of dt up, trial by trial.

    Raises Mamba3InputError for a v that is not bfloat16 and an empty sequence.
    """
    if initial_state is not None or return_final_state:
        return reference_scan(
            q, k, v, adt, dt, trap, angles, q_bias, k_bias, D, z, chunk_size=chunk_size,
            cu_seqlens=cu_seqlens, initial_state=initial_state,
            return_final_state=return_final_state,
        )  # fmt: skip
    _check(v)
    from mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined

    _pin(q.shape[-1], v.shape[-1], chunk_size)
    # Narrow first: what is expanded over the heads is then written once, at half the size.
    angles = angles.to(torch.bfloat16).expand(-1, -1, v.shape[2], -1).contiguous()
    return mamba3_siso_combined(
        q, k, v, adt.transpose(1, 2), dt.transpose(1, 2), trap.transpose(1, 2), q_bias, k_bias,
        angles, D, z, chunk_size=chunk_size,
        cu_seqlens=None if cu_seqlens is None else _whole(cu_seqlens, v.shape[1]),
    )  # fmt: skip


def _check(v: Tensor) -> None:
    if v.dtype != torch.bfloat16:
        raise Mamba3InputError(
            f"v is {v.dtype}: mamba-ssm's kernels would round it to torch.bfloat16; cast the "
            "tensors, or use the reference"
        )
    if v.shape[1] < 1:
        raise Mamba3InputError("the sequence is empty: S must be at least 1")


def _whole(cu_seqlens: Tensor, seq: int) -> Tensor:
    """Offsets up to the end of the row: tokens behind the last one are a document of their own."""
    end = torch.full_like(cu_seqlens[:1], seq)
    return torch.cat((cu_seqlens, end)).to(torch.int32)


@functools.cache
def _pin(state_dim: int, head_dim: int, chunk_size: int) -> None:
    """Give the kernels the one configuration that was found for this GPU and these sizes.

    Other sizes keep upstream's search, unless sizes before them in this process were pinned.
    """
    capability = torch.cuda.get_device_capability()
    for kernel, config in PINNED.get((capability, state_dim, head_dim, chunk_size), {}).items():
        import triton

        module, name = kernel.split(":")
        tuner = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)
        tuner.configs = [triton.Config(**config)]
