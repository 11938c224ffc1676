"""Launches the kernels on either side of Mamba-3's scan, which move nothing that they need not.

The math is in `reference.py`, what the kernels share in `triton_kernels.py` and
`backward_kernels.py`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from megacpp_mcore.kernels.mamba3_core import backward_kernels
from megacpp_mcore.kernels.mamba3_core import triton_kernels as kernels
from megacpp_mcore.kernels.strides import align, strides

# The fastest configurations of tokens, warps and stages on an H200 at 4 x 4096 tokens: of seven at
# 56 heads, N 64; at 112 heads, N 128 of 15 for `rotation_backward` and 5 for `rotate`. A product of
# matrices in a kernel needs 16 tokens.
TOKENS = 16  # of a program
_WARPS = {128: 1}  # of `rotate`, by N; others 2
_SPAN, _STAGES = 64, 2  # tokens of a program of `rotation_backward`, stages of its loop
_STEP = 2  # tokens of the loop at once, at most
_TILES, _TILE = 1024, 512  # (token, head, pair)s of the loop at once, at most, and of a warp
_GATE_TOKENS = 64


@dataclass(frozen=True)
class Sizes:
    """The sizes of one M block: heads H of head_dim P, groups G of state_dim N, angles A; and its
    decay."""

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
    """What the scan reads in addition to x and z.

    dt, adt, scale, gamma: (b, H, s) in float32; scale is k's factor, gamma that of a token's own
    value. B, C: (b, s, G, N), normed, and q, k: (b, s, H, N), rotated, k scaled, in the
    projection's dtype. theta: (b, s, H, A) in float32. The last five have the tokens of a head or
    group together in memory, (b, H, s, ...).
    """

    dt: Tensor
    adt: Tensor
    scale: Tensor
    gamma: Tensor
    B: Tensor
    C: Tensor
    theta: Tensor
    q: Tensor
    k: Tensor


class ScanGradients(NamedTuple):
    """Gradients of the scan's inner values: dq, dk (b, s, H, N) of the rotated q and k,
    (b, H, s, N) in memory, where q and k were. (b, H, s) in float32: both, of q k of one token;
    dadt; dscale; dboth, the sum of dscale and gamma's gradient."""

    dq: Tensor
    dk: Tensor
    both: Tensor
    dadt: Tensor
    dscale: Tensor
    dboth: Tensor


def by_head(like: Tensor, batch: int, seq: int, heads: int, dim: int, dtype=None) -> Tensor:
    """Empty, (b, s, heads, dim), with the tokens of a head together in memory."""
    found = torch.empty((batch, heads, seq, dim), dtype=dtype or like.dtype, device=like.device)
    return found.transpose(1, 2)


def steps_like(projected: Tensor, sizes: Sizes) -> Steps:
    """Empty. projected: (s, b, rows)."""
    seq, batch, _ = projected.shape
    heads, dim, angles = sizes.heads, sizes.state_dim, sizes.angles
    rows, wide = (batch, heads, seq), torch.float32
    return Steps(
        *(projected.new_empty(rows, dtype=wide) for _ in range(4)),
        *(by_head(projected, batch, seq, sizes.groups, dim) for _ in range(2)),
        by_head(projected, batch, seq, heads, angles, wide),
        *(by_head(projected, batch, seq, heads, dim) for _ in range(2)),
    )


def steps(
    projected: Tensor, dt_bias: Tensor, B_weight: Tensor, C_weight: Tensor, B_bias: Tensor,
    C_bias: Tensor, starts: Tensor | None, sizes: Sizes, angle: Tensor | None = None,
) -> Steps:  # fmt: skip
    """projected: (s, b, rows), rows contiguous. starts: (s,) int32, each token's document's first
    token (b = 1), or None. angle: (b, H, A) before the row, in float32, or None for zero."""
    seq, batch, _ = projected.shape
    heads, groups, dim, angles = sizes.heads, sizes.groups, sizes.state_dim, sizes.angles
    chunks = triton.cdiv(seq, TOKENS)
    found = steps_like(projected, sizes)
    sums, before = projected.new_empty((2, batch, chunks, heads, angles), dtype=torch.float32)
    resets = projected.new_empty(chunks, dtype=torch.int32) if starts is not None else None
    at, shared = sizes.offsets, _shared(sizes, starts, projected)
    proj = strides(shared["ALIGN"], projected)
    h_block = min(64, _block(heads))
    kernels.mamba3_before_scan[(chunks, triton.cdiv(heads, h_block), batch)](
        projected, dt_bias, starts, *found[:4], sums, resets, seq, chunks, *proj,
        sizes.decay_floor, *(at[name] for name in ("DT_AT", "A_AT", "TRAP_AT", "ANGLE_AT")),
        A_BLOCK=_block(angles), H_BLOCK=h_block, SOFTPLUS=sizes.decay == "softplus", num_warps=8,
        **shared,
    )  # fmt: skip
    _add_up(sums, resets, before, reverse=False, initial=angle)
    kernels.mamba3_rotate[(chunks, groups, batch)](
        projected, B_weight, C_weight, B_bias, C_bias, starts, found.dt, found.scale, before,
        *found[4:], seq, chunks, *proj, sizes.eps, B_AT=at["B_AT"], C_AT=at["C_AT"],
        ANGLE_AT=at["ANGLE_AT"], G=groups, N=dim, PAIRS=triton.next_power_of_2(dim) // 2,
        APPROXIMATE=projected.is_cuda, num_warps=_WARPS.get(dim, 2), **shared,
    )  # fmt: skip
    return found


def gate_backward(
    projected: Tensor, dy: Tensor, y: Tensor, dprojected: Tensor, sizes: Sizes
) -> None:
    """z's gradient into `dprojected`, and that of y, the scan before its gate, in the place of y.

    dy: (s, b, H * P). y: (b, s, H, P), the tokens of a head together in memory.
    """
    seq, batch, _ = projected.shape
    by = align(projected, dy, dprojected)
    backward_kernels.mamba3_gate_backward[(triton.cdiv(seq, _GATE_TOKENS), sizes.heads, batch)](
        projected, dy, y, dprojected, seq,
        *strides(by, projected, dy, dprojected),
        H=sizes.heads, P=sizes.head_dim, P_BLOCK=triton.next_power_of_2(sizes.head_dim),
        TOKENS=_GATE_TOKENS, ALIGN=by, num_warps=8,
    )  # fmt: skip


def steps_backward(
    projected: Tensor, dt_bias: Tensor, B_weight: Tensor, C_weight: Tensor, B_bias: Tensor,
    C_bias: Tensor, starts: Tensor | None, found: Steps, gradients: ScanGradients,
    dprojected: Tensor, sizes: Sizes, dtheta: Tensor | None = None, dahead: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of B, C, dt, A, trap and angle into `dprojected`, zeros after them.

    Others as in `steps`. dtheta: (b, H, A), of the last token's angle as the state after the row
    has it. dahead: (b, H), of the first token's (1 - lam) dt, which weighs the last value of the
    state before the row. Both float32, None for zero.

    Returns the gradients of dt_bias, of B's and C's weights (2, N), of their biases (2, H, N), and,
    with dahead, of the angles before the row (b, H, A).
    """
    seq, batch, columns = projected.shape
    heads, groups, dim, angles = sizes.heads, sizes.groups, sizes.state_dim, sizes.angles
    chunks, spans = triton.cdiv(seq, TOKENS), triton.cdiv(seq, _SPAN)
    ddt = torch.empty_like(found.dt)
    dspeed = projected.new_empty((batch, groups, seq, angles), dtype=torch.float32)
    sums, after = projected.new_empty((2, batch, spans, heads, angles), dtype=torch.float32)
    resets = projected.new_empty(spans, dtype=torch.int32) if starts is not None else None
    bias_sums = projected.new_empty((batch * spans, 2, heads, dim), dtype=torch.float32)
    weight_sums = projected.new_empty((batch * spans, 2, groups, dim), dtype=torch.float32)
    step_sums = projected.new_empty((batch * chunks, heads), dtype=torch.float32)
    at, shared = sizes.offsets, _shared(sizes, starts, projected, dprojected)
    of_rows = strides(shared["ALIGN"], projected, dprojected)
    pairs, block = triton.next_power_of_2(dim) // 2, triton.next_power_of_2(heads // groups)
    step = max(1, min(_STEP, _TILES // (block * pairs)))
    backward_kernels.mamba3_rotation_backward[(spans, groups, batch)](
        projected, found.B, found.C, B_bias, C_bias, starts, found.dt,
        found.theta.view(torch.int16), gradients.dq, gradients.dk, gradients.both, dprojected, ddt,
        dspeed, sums, resets, bias_sums, seq, spans, *of_rows,
        B_AT=at["B_AT"], C_AT=at["C_AT"], ANGLE_AT=at["ANGLE_AT"], G=groups, N=dim, PAIRS=pairs,
        HEADS=block, SPAN=_SPAN, APPROXIMATE=projected.is_cuda, STAGES=_STAGES,
        num_warps=min(8, max(1, step * block * pairs // _TILE)), **shared | {"TOKENS": step},
    )  # fmt: skip
    backward_kernels.mamba3_norms_backward[(spans, groups, batch)](
        projected, B_weight, C_weight, dprojected, weight_sums, seq, spans, *of_rows, sizes.eps,
        B_AT=at["B_AT"], C_AT=at["C_AT"], G=groups, N=dim, PAIRS=pairs, SPAN=_SPAN,
        ALIGN=shared["ALIGN"], num_warps=4,
    )  # fmt: skip
    _add_up(sums, resets, after, reverse=True, initial=dtheta)
    backward_kernels.mamba3_steps_backward[(chunks, batch)](
        projected, dt_bias, starts, found.dt, gradients.dadt, gradients.dscale, gradients.dboth,
        dahead, ddt, dspeed, after, dprojected, step_sums, seq, chunks, spans, *of_rows,
        sizes.decay_floor, *(at[name] for name in ("DT_AT", "A_AT", "TRAP_AT", "ANGLE_AT", "END")),
        COLUMNS=columns, G=groups, A_BLOCK=_block(angles), H_BLOCK=16,
        PAD_BLOCK=triton.next_power_of_2(max(1, columns - at["END"])), SPAN=_SPAN,
        SOFTPLUS=sizes.decay == "softplus", CARRIED=dahead is not None, num_warps=8, num_stages=1,
        **shared,
    )  # fmt: skip
    dangle = None if dahead is None else sums[:, 0] + after[:, 0]
    return step_sums.sum(0), weight_sums.sum((0, 2)), bias_sums.sum(0), dangle


def _shared(sizes: Sizes, starts: Tensor | None, *rows: Tensor) -> dict[str, int | bool]:
    return {
        "H": sizes.heads, "A": sizes.angles, "TOKENS": TOKENS, "ALIGN": align(*rows),
        "PACKED": starts is not None,
    }  # fmt: skip


def _add_up(
    sums: Tensor, resets: Tensor | None, before: Tensor, reverse: bool,
    initial: Tensor | None = None,
) -> None:  # fmt: skip
    batch, chunks, heads, angles = sums.shape
    width, block = heads * angles, 64
    kernels.mamba3_add_up_chunks[(triton.cdiv(width, block), batch)](
        sums, resets, initial, before, chunks, width, BLOCK=32, WIDTH_BLOCK=block, REVERSE=reverse,
        WRAP=not reverse, PACKED=resets is not None, CARRIED=initial is not None,
    )  # fmt: skip


def _block(size: int) -> int:
    """The side of a matrix product in a kernel, at least 16."""
    return max(16, triton.next_power_of_2(size))
