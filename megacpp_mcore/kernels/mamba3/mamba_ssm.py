"""Mamba-3 SISO on the Triton kernels of mamba-ssm, with the interface of `mamba3_scan`.

Upstream casts q, k, v, z, trap and angles to bfloat16. Other models would lose precision silently,
so only bfloat16 is served.
"""

import torch
from torch import Tensor

from megacpp_mcore.kernels.documents import bounds_to_end
from megacpp_mcore.kernels.mamba3 import mamba3_scan as reference_scan
from megacpp_mcore.kernels.mamba3.inputs import Mamba3InputError, Mamba3State
from megacpp_mcore.kernels.mamba3.mamba_ssm_ops import mamba3_siso

_CHUNK = 64


def mamba3_scan(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, angles: Tensor,
    q_bias: Tensor, k_bias: Tensor, D: Tensor | None = None, z: Tensor | None = None, *,
    chunk_size: int = _CHUNK, cu_seqlens: Tensor | None = None,
    initial_state: Mamba3State | None = None, return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Mamba3State]:  # fmt: skip
    """`megacpp_mcore.kernels.mamba3.mamba3_scan`, SISO, in bfloat16; shapes are described there.

    With a state, which is inference, the reference runs: upstream keeps the state's angle in
    bfloat16, and its autotuning accumulates the first call's gradients of dt over the trials.

    Raises Mamba3InputError for a v that is not bfloat16 and an empty sequence.
    """
    if initial_state is not None or return_final_state:
        return reference_scan(
            q, k, v, adt, dt, trap, angles, q_bias, k_bias, D, z, chunk_size=chunk_size,
            cu_seqlens=cu_seqlens, initial_state=initial_state,
            return_final_state=return_final_state,
        )  # fmt: skip
    check_bfloat16(v)
    # Cast before the expansion over the heads, whose copy is then half as large.
    angles = angles.to(torch.bfloat16).expand(-1, -1, v.shape[2], -1).contiguous()
    q, k, trap, z = (None if x is None else x.to(torch.bfloat16) for x in (q, k, trap, z))
    inputs = (q, k, v, adt, dt, trap, q_bias, k_bias, angles, D, z)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    bounds = None if cu_seqlens is None else bounds_to_end(cu_seqlens, v.shape[1]).to(torch.int32)
    return mamba3_siso(*inputs, bounds, chunk_size, save)[0]


def check_bfloat16(v: Tensor) -> None:
    if v.dtype != torch.bfloat16:
        raise Mamba3InputError(
            f"v is {v.dtype}: mamba-ssm's kernels would round it to torch.bfloat16; cast the "
            "tensors, or use the reference"
        )
    if v.shape[1] < 1:
        raise Mamba3InputError("the sequence is empty: S must be at least 1")
