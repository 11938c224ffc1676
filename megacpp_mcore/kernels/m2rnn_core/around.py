"""Launches the kernels on either side of M2RNN's recurrence.

The math is in `reference.py`, what the kernels share in `triton_kernels.py`.
"""

from dataclasses import dataclass
from math import gcd

import torch
import triton
from torch import Tensor

from megacpp_mcore.kernels.m2rnn_core import triton_kernels as kernels
from megacpp_mcore.kernels.strides import align, strides

_CHANNELS = 64  # of a program of the convolution, at most
# The fastest of four configurations on an H200 at 4 x 4096 tokens, 44 heads.
_BEFORE, _BACK = (128, 8), (64, 4)  # tokens and warps of one, forward and backward
_ROWS, _BLOCKS = 2, 8  # tokens that a program of the norm has at once, and how often, backward
_NORM_WARPS = 8


@dataclass(frozen=True)
class Sizes:
    """The sizes of one R block: heads H of k_dim K (of the shared q and k) and v_dim V; the norm's
    eps."""

    heads: int
    k_dim: int
    v_dim: int
    eps: float

    @property
    def values(self) -> int:
        return self.heads * self.v_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.k_dim + self.values

    @property
    def parts(self) -> tuple[int, ...]:
        """Columns of q, k, v, gate and decay, in this order."""
        return (self.k_dim, self.k_dim, self.values, self.values, self.heads)

    @property
    def block(self) -> int:
        """Channels of a program: all of one part."""
        return gcd(_CHANNELS, self.k_dim, self.values)

    def columns(self) -> dict[str, int]:
        return {"C": self.channels, "H": self.heads, "DECAY_AT": sum(self.parts[:4])}

    def norm(self) -> dict[str, int]:
        return {
            "C": self.channels, "HV": self.values, "V_AT": 2 * self.k_dim,
            "GATE_AT": self.channels, "HV_BLOCK": triton.next_power_of_2(self.values),
            "ROWS": _ROWS,
        }  # fmt: skip


def before(
    projected: Tensor, weight: Tensor, bias: Tensor, A_log: Tensor, dt_bias: Tensor,
    starts: Tensor | None, sizes: Sizes,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The convolved q, k, v (s, b, C) in projected's dtype, and f (b, s, H) in float32.

    projected: (s, b, rows), rows contiguous. weight: (C, 1, taps). starts: (s,) int32, each token's
    document's first token (b = 1), or None.
    """
    seq, batch, _ = projected.shape
    mixed = projected.new_empty((seq, batch, sizes.channels))
    f = projected.new_empty((batch, seq, sizes.heads), dtype=torch.float32)
    by, (tokens, warps) = align(projected), _BEFORE
    kernels.m2rnn_before[(triton.cdiv(seq, tokens), sizes.channels // sizes.block + 1, batch)](
        projected, weight, bias, A_log, dt_bias, starts, mixed, f, seq, batch,
        *strides(by, projected), TAPS=weight.shape[-1], TOKENS=tokens, BLOCK=sizes.block,
        H_BLOCK=triton.next_power_of_2(sizes.heads), ALIGN=by, PACKED=starts is not None,
        num_warps=warps, **sizes.columns(),
    )  # fmt: skip
    return mixed, f


def after(
    projected: Tensor, mixed: Tensor, y: Tensor, D: Tensor, norm_weight: Tensor, sizes: Sizes
) -> Tensor:
    """RMSNorm((y + D v) silu(gate)), (s, b, H V). y: (b, s, H, V), contiguous."""
    seq, batch, _ = projected.shape
    out = projected.new_empty((seq, batch, sizes.values))
    by = align(projected)
    kernels.m2rnn_after[(triton.cdiv(seq, _ROWS), batch)](
        projected, mixed, y, D, norm_weight, out, seq, batch, *strides(by, projected),
        sizes.eps, ALIGN=by, num_warps=_NORM_WARPS, **sizes.norm(),
    )  # fmt: skip
    return out


def after_backward(
    projected: Tensor, mixed: Tensor, y: Tensor, D: Tensor, norm_weight: Tensor, dout: Tensor,
    dprojected: Tensor, sizes: Sizes,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gate's gradient into dprojected; returns y's, and D's and the norm weight's, (2, H V) in
    float32. v's is D times y's, and what the recurrence adds."""
    seq, batch, _ = projected.shape
    dy = torch.empty_like(y)
    programs = triton.cdiv(seq, _ROWS * _BLOCKS)
    partial = D.new_empty((programs * batch, 2, sizes.values))
    by = align(projected, dprojected, dout)
    kernels.m2rnn_after_backward[(programs, batch)](
        projected, mixed, y, D, norm_weight, dout, dprojected, dy, partial, seq, batch, _BLOCKS,
        *strides(by, projected, dprojected, dout),
        sizes.eps, ALIGN=by, num_warps=_NORM_WARPS, **sizes.norm(),
    )  # fmt: skip
    return dy, partial.sum(0)


def before_backward(
    projected: Tensor, weight: Tensor, bias: Tensor, A_log: Tensor, dt_bias: Tensor,
    starts: Tensor | None, D: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dy: Tensor, f: Tensor,
    df: Tensor, dprojected: Tensor, sizes: Sizes,
) -> Tensor:  # fmt: skip
    """The gradients of q, k, v and decay into dprojected, and zeros after them.

    dq, dk (b, s, 1, K), dv (b, s, H, V), df (b, s, H): of what the recurrence reads, contiguous. dy
    (b, s, H, V): of what it gives. Returns the parameters' gradients, for `parameter_gradients`.
    """
    seq, batch, columns = projected.shape
    tokens, warps = _BACK
    blocks = triton.cdiv(seq, tokens)
    partial = D.new_empty((blocks * batch, sum(_partial_widths(sizes, weight.shape[-1]))))
    by = align(projected, dprojected)
    last = columns - sizes.columns()["DECAY_AT"]
    kernels.m2rnn_before_backward[(blocks, sizes.channels // sizes.block + 1, batch)](
        projected, weight, bias, A_log, dt_bias, starts, D, dq, dk, dv, dy, f, df, dprojected,
        partial, seq, *strides(by, projected, dprojected), K=sizes.k_dim,
        COLUMNS=columns, TAPS=weight.shape[-1], TOKENS=tokens, BLOCK=sizes.block,
        H_BLOCK=triton.next_power_of_2(last), ALIGN=by, PACKED=starts is not None,
        num_warps=warps, **sizes.columns(),
    )  # fmt: skip
    return partial.sum(0)


def parameter_gradients(sums: Tensor, weight: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """The gradients of weight, bias, A_log and dt_bias, in float32, from `before_backward`."""
    taps, bias, dt_bias, A_log = sums.split(_partial_widths(sizes, weight.shape[-1]))
    return taps.view(weight.shape), bias, A_log, dt_bias


def _partial_widths(sizes: Sizes, taps: int) -> tuple[int, ...]:
    """Widths of a program's sums, for weight, bias, dt_bias and A_log."""
    return (sizes.channels * taps, sizes.channels, sizes.heads, sizes.heads)
