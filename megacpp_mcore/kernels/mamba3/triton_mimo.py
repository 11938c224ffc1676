"""Mamba-3 MIMO on kernels of our own, with the interface of `mamba3_scan`.

The kernels (`mimo_kernels.py`) are the scan with skip, gate and projections. What comes before it
is plain torch in float32 here: biases, sums of angles, rotation and the weights of the trapezoid.
"""

import torch
from torch import Tensor
from torch.nn import functional

from megacpp_mcore.kernels.documents import document_starts
from megacpp_mcore.kernels.mamba3.inputs import (
    Mamba3InputError,
    Mamba3State,
    check_arguments,
    check_shape,
)
from megacpp_mcore.kernels.mamba3.mamba_ssm import check_bfloat16
from megacpp_mcore.kernels.mamba3.mimo_ops import mimo_scan
from megacpp_mcore.kernels.mamba3.reference import angles_of, per_head, rotate

RANKS = (2, 4)
_CHUNK = 64  # tokens of a part of the sum of angles


def mamba3_scan(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, angles: Tensor,
    q_bias: Tensor, k_bias: Tensor, D: Tensor | None = None, z: Tensor | None = None, *,
    mimo_v: Tensor | None = None, mimo_z: Tensor | None = None, mimo_out: Tensor | None = None,
    chunk_size: int = _CHUNK, cu_seqlens: Tensor | None = None,
    initial_state: Mamba3State | None = None, return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Mamba3State]:  # fmt: skip
    """`megacpp_mcore.kernels.mamba3.mamba3_scan`, MIMO of rank 2 or 4 with skip and gate, in
    bfloat16; shapes are described there, the math is in `reference.py`. Differentiable in every
    tensor, states included. The kernels' chunk is 64 / R tokens, whatever `chunk_size` says.

    Raises Mamba3InputError for arguments that do not fit together, a v that is not bfloat16, an
    empty sequence, another rank, a call without skip, gate or projections, and for states together
    with cu_seqlens.
    """
    check_arguments(
        q, k, v, adt, dt, trap, angles, q_bias, k_bias, D, z,
        mimo_v=mimo_v, mimo_z=mimo_z, mimo_out=mimo_out, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    check_bfloat16(v)
    _check(q, D, z, mimo_v)
    starts = None
    if cu_seqlens is not None:
        if initial_state is not None or return_final_state:
            raise Mamba3InputError(
                "states are not served together with cu_seqlens: scan the documents one by one"
            )
        rank = q.shape[2]
        starts = document_starts(v.shape[1], cu_seqlens.to(torch.int32))
        starts = (starts * rank).repeat_interleave(rank)
    state = None if initial_state is None else _checked(initial_state, q, v, angles)
    theta = _theta(angles, dt, None if state is None else state.angle)
    cos, sin = theta.cos().unsqueeze(2), theta.sin().unsqueeze(2)
    q, k = (
        rotate(per_head(x.float(), bias.float().transpose(0, 1)), cos, sin, halves=True)
        for x, bias in ((q, q_bias), (k, k_bias))
    )  # (B, S, R, H, N)
    lam = trap.float().sigmoid()
    gamma, ahead = lam * dt, (1 - lam) * dt
    scale = gamma + functional.pad(ahead[:, 1:], (0, 0, 0, 1))
    initial = None
    if state is not None:
        before = torch.einsum("bhp,hrp,brhn->bhpn", state.v, mimo_v.float(), state.k)
        initial = state.ssm + ahead[:, 0, :, None, None] * before
    rows = [x.to(v.dtype).permute(0, 3, 1, 2, 4).flatten(2, 3) for x in (q, k)]
    weights = [x.float().transpose(1, 2) for x in (adt, scale, gamma)]
    parameters = [x.float() for x in (D, mimo_v, mimo_z, mimo_out)]
    tensors = (*rows, v, z.to(v.dtype), *weights, *parameters)
    wanted = any(x is not None and x.requires_grad for x in (*tensors, initial))
    save = torch.is_grad_enabled() and wanted
    y, *others = mimo_scan(*tensors, starts, initial, save, return_final_state)
    if not return_final_state:
        return y
    return y, Mamba3State(theta[:, -1], others[0], k[:, -1], v[:, -1].float())


def _check(q: Tensor, D: Tensor | None, z: Tensor | None, mimo_v: Tensor | None) -> None:
    if any(x is None for x in (D, z, mimo_v)):
        raise Mamba3InputError(
            "the kernels take D, z, mimo_v, mimo_z and mimo_out, and one of them is None: use the "
            "reference"
        )
    if (rank := q.shape[2]) not in RANKS:
        known = " and ".join(map(str, RANKS))
        raise Mamba3InputError(f"rank {rank}: the kernels take {known}; use the reference")


def _checked(state: Mamba3State, q: Tensor, v: Tensor, angles: Tensor) -> Mamba3State:
    """The caller's state in float32."""
    (batch, _, rank, _, state_dim), (heads, dim) = q.shape, v.shape[2:]
    shapes = (
        (batch, heads, angles.shape[-1]), (batch, heads, dim, state_dim),
        (batch, rank, heads, state_dim), (batch, heads, dim),
    )  # fmt: skip
    for name, tensor, shape in zip(state._fields, state, shapes, strict=True):
        check_shape(f"initial_state.{name}", tensor, shape)
    return Mamba3State(*(x.float() for x in state))


def _theta(angles: Tensor, dt: Tensor, start: Tensor | None) -> Tensor:
    """(B, S, H, A), radians in [0, 2 pi): the reference's, whose sums do not drift."""
    batch, seq, heads = dt.shape

    def split(x: Tensor) -> Tensor:
        """(B, S, H, ...) -> (B, H, chunks, size, ...), padded with zeros."""
        x = functional.pad(x, (0, 0) * (x.dim() - 2) + (0, -seq % _CHUNK))
        return x.unflatten(1, (-1, _CHUNK)).movedim(3, 1)

    if start is None:
        start = dt.new_zeros(batch, heads, angles.shape[-1])
    found = angles_of(split(angles.float()), split(dt.float()), start)
    return found.flatten(2, 3)[:, :, :seq].transpose(1, 2)
