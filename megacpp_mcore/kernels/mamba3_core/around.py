"""Launches the kernels on either side of Mamba-3's scan, which move nothing that they need not.

The math is in `reference.py`, what the kernels share in `triton_kernels.py`.
"""

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from megacpp_mcore.kernels.mamba3_core import triton_kernels as kernels

# The fastest of seven configurations of tokens, warps and stages on an H200 at 4 x 4096 tokens, 56
# heads, N 64. A matrix product in a kernel needs 16 tokens.
TOKENS = 16  # of a program
_HEADS = 8  # of a program of `angles`; of which `rotation_backward` keeps what it writes
_STAGES = 2  # of `rotation_backward`: the next head's tiles are loaded with one head's sums
_GATE_TOKENS = 64


@dataclass(frozen=True)
class Sizes:
    """Of one M block: heads H of head_dim P, groups G of state_dim N, angles A; and its decay."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    angles: int
    decay: str
    decay_floor: float
    eps: float

    @property
    def parts(self) -> tuple[int, ...]:
        """Columns of z, x, B, C, dt, A, trap and angle, in this order."""
        inner, group = self.heads * self.head_dim, self.groups * self.state_dim
        return (inner, inner, group, group, self.heads, self.heads, self.heads, self.angles)

    @property
    def offsets(self) -> dict[str, int]:
        """Where the parts begin, as the kernels call it, and where the last one ends."""
        names = ("Z_AT", "X_AT", "B_AT", "C_AT", "DT_AT", "A_AT", "TRAP_AT", "ANGLE_AT", "END")
        return {name: sum(self.parts[:i]) for i, name in enumerate(names)}


class Steps(NamedTuple):
    """What the scan reads beside x and z.

    q, k: (b, s, G, N) in the projection's dtype, (b, G, s, N) in memory. dt, adt, trap: (b, H, s)
    in float32, trap before the sigmoid. theta: (b, s, H, A) in float32, (b, H, s, A) in memory.
    """

    q: Tensor
    k: Tensor
    dt: Tensor
    adt: Tensor
    trap: Tensor
    theta: Tensor


class ScanGradients(NamedTuple):
    """Of the scan's inner values: dq, dk (b, s, H, N) of the rotated q and the rotated and scaled
    k, (b, H, s, N) in memory; dadt, dqk (b, H, s)."""

    dq: Tensor
    dk: Tensor
    dadt: Tensor
    dqk: Tensor


def by_head(like: Tensor, batch: int, seq: int, heads: int, dim: int, dtype=None) -> Tensor:
    """Empty, (b, s, heads, dim), with the tokens of a head together in memory."""
    found = torch.empty((batch, heads, seq, dim), dtype=dtype or like.dtype, device=like.device)
    return found.transpose(1, 2)


def steps(
    projected: Tensor, dt_bias: Tensor, B_weight: Tensor, C_weight: Tensor, starts: Tensor | None,
    sizes: Sizes,
) -> Steps:  # fmt: skip
    """projected: (s, b, rows), rows contiguous. starts: (s,) int32, each token's document's first
    token (b = 1), or None."""
    seq, batch, _ = projected.shape
    heads, groups, dim, angles = sizes.heads, sizes.groups, sizes.state_dim, sizes.angles
    wide = torch.float32
    chunks = triton.cdiv(seq, TOKENS)
    q, k = (by_head(projected, batch, seq, groups, dim) for _ in range(2))
    # Not one tensor's parts: dt is saved for the backward pass, the others are not.
    dt, adt, trap = (projected.new_empty((batch, heads, seq), dtype=wide) for _ in range(3))
    theta = by_head(projected, batch, seq, heads, angles, wide)
    sums, before = projected.new_empty((2, batch, chunks, heads, angles), dtype=wide)
    resets = projected.new_empty(chunks, dtype=torch.int32) if starts is not None else None
    at, shared = sizes.offsets, _shared(sizes, starts, projected)
    proj = _strides(projected, shared["ALIGN"])
    h_block = min(64, _block(heads))
    kernels.before_scan[(chunks, groups + triton.cdiv(heads, h_block), batch)](
        projected, dt_bias, B_weight, C_weight, starts, q, k, dt, adt, trap, sums, resets,
        seq, chunks, *proj, sizes.decay_floor, sizes.eps,
        *(at[name] for name in ("B_AT", "C_AT", "DT_AT", "A_AT", "TRAP_AT", "ANGLE_AT")),
        G=groups, N=dim, N_BLOCK=triton.next_power_of_2(dim), A_BLOCK=_block(angles),
        H_BLOCK=h_block, SOFTPLUS=sizes.decay == "softplus", num_warps=8, **shared,
    )  # fmt: skip
    _add_up(sums, resets, before, reverse=False)
    kernels.angles[(chunks, triton.cdiv(heads, _HEADS), batch)](
        projected, starts, dt, before, theta, seq, chunks, *proj, ANGLE_AT=at["ANGLE_AT"],
        A_BLOCK=triton.next_power_of_2(angles), HEADS=_HEADS, **shared,
    )  # fmt: skip
    return Steps(q, k, dt, adt, trap, theta)


def gate_backward(
    projected: Tensor, dy: Tensor, y: Tensor, dprojected: Tensor, sizes: Sizes
) -> Tensor:
    """z's gradient into `dprojected`; returns that of y, the scan before its gate, like y.

    dy: (s, b, H * P). y: (b, s, H, P), the tokens of a head together in memory.
    """
    seq, batch, _ = projected.shape
    dy_inner = torch.empty_like(y)
    align = _align(projected, dy, dprojected)
    kernels.gate_backward[(triton.cdiv(seq, _GATE_TOKENS), sizes.heads, batch)](
        projected, dy, y, dprojected, dy_inner, seq,
        *_strides(projected, align), *_strides(dy, align), *_strides(dprojected, align),
        H=sizes.heads, P=sizes.head_dim, P_BLOCK=triton.next_power_of_2(sizes.head_dim),
        TOKENS=_GATE_TOKENS, ALIGN=align, num_warps=8,
    )  # fmt: skip
    return dy_inner


def steps_backward(
    projected: Tensor, dt_bias: Tensor, B_weight: Tensor, C_weight: Tensor, B_bias: Tensor,
    C_bias: Tensor, starts: Tensor | None, dt: Tensor, theta: Tensor, scale: Tensor, gamma: Tensor,
    found: ScanGradients, dprojected: Tensor, sizes: Sizes,
) -> Tensor:  # fmt: skip
    """The gradients of B, C, dt, A, trap and angle into `dprojected`, zeros behind them.

    Others as in `steps`. scale, gamma: (b, H, s), k's factor and that of the diagonal. Returns the
    parameters' gradients, for `parameter_gradients`.
    """
    seq, batch, columns = projected.shape
    heads, groups, dim, angles = sizes.heads, sizes.groups, sizes.state_dim, sizes.angles
    chunks = triton.cdiv(seq, TOKENS)
    dscale, dboth, ddt = projected.new_empty((3, batch, heads, seq), dtype=torch.float32)
    dspeed = projected.new_empty((batch, groups, seq, angles), dtype=torch.float32)
    sums, behind = projected.new_empty((2, batch, chunks, heads, angles), dtype=torch.float32)
    resets = projected.new_empty(chunks, dtype=torch.int32) if starts is not None else None
    widths = _partial_widths(sizes)
    partial = projected.new_empty((batch * chunks, sum(widths)), dtype=torch.float32)
    at, shared = sizes.offsets, _shared(sizes, starts, projected, dprojected)
    strides = (*_strides(projected, shared["ALIGN"]), *_strides(dprojected, shared["ALIGN"]))
    kernels.rotation_backward[(chunks, groups, batch)](
        projected, B_weight, C_weight, B_bias, C_bias, starts, dt, theta.view(torch.int16), scale,
        gamma, found.dq, found.dk, found.dqk, dprojected, dscale, dboth, ddt, dspeed, sums, resets,
        partial, seq, chunks, *strides, partial.shape[1], sizes.eps,
        B_AT=at["B_AT"], C_AT=at["C_AT"], ANGLE_AT=at["ANGLE_AT"], G=groups, N=dim,
        PAIRS=triton.next_power_of_2(dim) // 2, HEADS=_HEADS, APPROXIMATE=projected.is_cuda,
        num_warps=2 if dim <= 64 else 4, STAGES=_STAGES, **shared,
    )  # fmt: skip
    _add_up(sums, resets, behind, reverse=True)
    kernels.steps_backward[(chunks, batch)](
        projected, dt_bias, starts, dt, found.dadt, dscale, dboth, ddt, dspeed, behind, dprojected,
        partial[:, sum(widths[:-1]) :], seq, chunks, *strides, partial.shape[1], sizes.decay_floor,
        *(at[name] for name in ("DT_AT", "A_AT", "TRAP_AT", "ANGLE_AT", "END")),
        COLUMNS=columns, G=groups, A_BLOCK=_block(angles), H_BLOCK=16,
        PAD_BLOCK=triton.next_power_of_2(max(1, columns - at["END"])),
        SOFTPLUS=sizes.decay == "softplus", num_warps=8, num_stages=1, **shared,
    )  # fmt: skip
    return partial.sum(0)


def parameter_gradients(sums: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """dt_bias's, B_weight's, C_weight's, B_bias's and C_bias's from what `steps_backward` gives."""
    b_bias, c_bias, b_weight, c_weight, dt_bias = sums.split(_partial_widths(sizes))
    groups, heads = (sizes.groups, sizes.state_dim), (sizes.heads, sizes.state_dim)
    return (
        dt_bias, b_weight.view(groups).sum(0), c_weight.view(groups).sum(0), b_bias.view(heads),
        c_bias.view(heads),
    )  # fmt: skip


def _partial_widths(sizes: Sizes) -> tuple[int, ...]:
    """Of a program's row of sums: for B_bias, C_bias, B_weight, C_weight (a group each) and
    dt_bias."""
    head, group = sizes.heads * sizes.state_dim, sizes.groups * sizes.state_dim
    return (head, head, group, group, sizes.heads)


def _shared(sizes: Sizes, starts: Tensor | None, *rows: Tensor) -> dict[str, int | bool]:
    return {
        "H": sizes.heads, "A": sizes.angles, "TOKENS": TOKENS, "ALIGN": _align(*rows),
        "PACKED": starts is not None,
    }  # fmt: skip


def _add_up(sums: Tensor, resets: Tensor | None, before: Tensor, reverse: bool) -> None:
    batch, chunks, heads, angles = sums.shape
    width, block = heads * angles, 64
    kernels.add_up_chunks[(triton.cdiv(width, block), batch)](
        sums, resets, before, chunks, width, BLOCK=32, WIDTH_BLOCK=block, REVERSE=reverse,
        WRAP=not reverse, PACKED=resets is not None,
    )  # fmt: skip


def _block(size: int) -> int:
    """Of a matrix product in a kernel, whose sides are at least 16."""
    return max(16, triton.next_power_of_2(size))


def _align(*rows: Tensor) -> int:
    """The largest power of two up to 16 that divides every stride."""
    return gcd(16, *(stride for x in rows for stride in x.stride()[:-1]))


def _strides(rows: Tensor, align: int) -> tuple[int, int]:
    return rows.stride(0) // align, rows.stride(1) // align
