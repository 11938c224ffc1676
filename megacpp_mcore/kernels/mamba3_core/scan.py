"""Launches mamba-ssm's Mamba-3 SISO kernels on tensors where they lie.

Upstream's launchers copy what is not contiguous and allocate every result; the kernels themselves
take strides of everything. They address x, z, y and x's gradient with 32-bit offsets.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from megacpp_mcore.kernels.mamba3.mamba_ssm_ops import set_up
from megacpp_mcore.kernels.mamba3_core.around import ScanGradients, Steps, by_head

CHUNK = 64  # as the kernels are tested with


class Saved(NamedTuple):
    """What the backward pass reads. y: before the gate, (b, s, H, P). states: (b, H, P, chunks *
    N), before each chunk. decay, qk, scale, gamma: (b, H, s) and chunk_decay (b, H, chunks) in
    float32. q, k: rotated, k scaled, (b, s, H, N). All but the last in v's dtype."""

    y: Tensor
    states: Tensor
    decay: Tensor
    chunk_decay: Tensor
    q: Tensor
    k: Tensor
    qk: Tensor
    scale: Tensor
    gamma: Tensor


def saved_like(x: Tensor, state_dim: int, documents: int | None) -> Saved:
    """Empty. x: (b, s, H, P). documents: packed ones, or None."""
    batch, seq, heads, dim = x.shape
    chunks = -(-seq // CHUNK) if documents is None else documents + seq // CHUNK

    def rows(*shape: int) -> Tensor:
        return torch.empty((batch, heads, *shape), dtype=torch.float32, device=x.device)

    return Saved(
        by_head(x, batch, seq, heads, dim),
        x.new_empty((batch, heads, dim, chunks * state_dim)),
        rows(seq),
        rows(chunks),
        *(by_head(x, batch, seq, heads, state_dim) for _ in range(2)),
        *(rows(seq) for _ in range(3)),
    )


def forward(
    steps: Steps, x: Tensor, z: Tensor, q_bias: Tensor, k_bias: Tensor, D: Tensor,
    bounds: Tensor | None, y: Tensor, save: bool,
) -> Saved:  # fmt: skip
    """x, z: (b, s, H, P), in any strides that are multiples of 16 bytes; so is y, the output.

    bounds: (documents + 1,) int32, which end at s. save: False leaves half of `Saved` unwritten.
    """
    from mamba_ssm.ops.triton.mamba3.mamba3_siso_fwd import mamba3_siso_fwd_kernel

    q, k, dt, adt, trap, theta = steps
    batch, seq, heads, dim = x.shape
    groups, state_dim = q.shape[2:]
    set_up(state_dim, dim, CHUNK)
    documents = None if bounds is None else bounds.shape[0] - 1
    saved = saved_like(x, state_dim, documents)
    inner, states, decay, chunk_decay, q_rotated, k_rotated, qk, scale, gamma = saved
    mamba3_siso_fwd_kernel[(heads, batch) if bounds is None else (heads, 1, documents)](
        q, k, x, adt, dt, trap, q_bias, k_bias, theta, D, z, None, None, None, bounds,
        y, inner, states, decay, chunk_decay, q_rotated, k_rotated, qk, scale, gamma, None, None,
        *_strides(q, k, x, adt, dt, trap, q_bias, k_bias, theta, D, z),
        *(0,) * 10,  # initial states
        0 if bounds is None else bounds.stride(0),
        *_strides(y, inner, states, decay, chunk_decay, q_rotated, k_rotated, qk, scale, gamma),
        *(0,) * 8,  # final states
        seq, groups, state_dim, dim, theta.shape[-1], CHUNK,
        triton.next_power_of_2(state_dim), triton.next_power_of_2(dim),
        STORE_SSM_STATES_ADT_OUTV=save, HAS_INITIAL_STATES=False, RETURN_FINAL_STATES=False,
        HAS_D=True, HAS_Z=True, IS_VARLEN=bounds is not None,
    )  # fmt: skip
    return saved


def backward(
    dy: Tensor, saved: Saved, x: Tensor, D: Tensor, bounds: Tensor | None, dx: Tensor
) -> tuple[ScanGradients, Tensor]:
    """dy: of y before the gate, (b, s, H, P). x's gradient goes into dx, in strides as x's.

    Returns the inner gradients and D's, (H,) in float32.
    """
    from mamba_ssm.ops.triton.mamba3.mamba3_siso_bwd import mamba3_siso_bwd_kernel_dqkv

    _, states, decay, chunk_decay, q, k, qk, _, _ = saved
    batch, seq, heads, dim = x.shape
    state_dim = q.shape[-1]
    set_up(state_dim, dim, CHUNK)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    dadt, dqk = torch.empty_like(decay), torch.empty_like(qk)
    sequences = batch if bounds is None else bounds.shape[0] - 1
    dD = D.new_empty((sequences, heads))
    mamba3_siso_bwd_kernel_dqkv[(heads, sequences)](
        q, k, x, decay, chunk_decay, qk, D, states, dy, None, bounds,
        dq, dk, dx, dadt, dqk, dD, None,
        *_strides(q, k, x, decay, chunk_decay, qk, D, states, dy),
        *(0,) * 4,  # the final state's gradient
        0 if bounds is None else bounds.stride(0),
        *_strides(dq, dk, dx, dadt, dqk, dD),
        *(0,) * 4,  # the initial state's
        seq, heads, state_dim, dim, CHUNK_SIZE=CHUNK,
        HEADDIM_QK=triton.next_power_of_2(state_dim), HEADDIM_V=triton.next_power_of_2(dim),
        RECOMPUTE_MASK=False, HAS_D_OSSM_STATE=False, RETURN_D_ISSM_STATE=False,
        IS_VARLEN=bounds is not None,
    )  # fmt: skip
    return ScanGradients(dq, dk, dadt, dqk), dD.sum(0)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride())
