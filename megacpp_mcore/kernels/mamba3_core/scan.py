"""Launches the scan's kernels: a chunk-parallel Mamba-3 SISO, forward and backward.

The math is in `kernels/mamba3/reference.py`, how the kernels share it in `scan_kernels.py`.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from megacpp_mcore.kernels.mamba3_core import scan_backward_kernels
from megacpp_mcore.kernels.mamba3_core import scan_kernels as kernels
from megacpp_mcore.kernels.mamba3_core.around import ScanGradients, Steps, by_head
from megacpp_mcore.kernels.strides import align

CHUNK = 64
_PROGRAMS = 2048  # enough for an H200's 132 multiprocessors; more mean more states between them
_SEGMENTS = 16  # at most: a program adds up all those before its own
# Warps and stages of each kernel: the fastest on an H200 at 4 x 4096 tokens, 56 heads, P = N = 64,
# of 4 or 8 warps, 1 to 3 stages, and 128, 168 or any number of registers.
CONFIGS = {"states": (4, 1), "forward": (4, 2), "backward": (4, 1)}


class Saved(NamedTuple):
    """What the backward pass reads. inner: y before the gate, (b, s, H, P); states: before each
    chunk, (b, H, chunks, P, N); both in x's dtype."""

    inner: Tensor
    states: Tensor


class Ends(NamedTuple):
    """The ends of a row that carries a state, for its backward pass, (b, H, P, N) in float32.

    final, dfinal: the state after the row and its gradient; dinitial: where that of the state
    before the row goes. None where there is none."""

    final: Tensor | None = None
    dfinal: Tensor | None = None
    dinitial: Tensor | None = None


_NO_ENDS = Ends()


class Segments(NamedTuple):
    """chunks: of the row; each: of a segment; count: of segments."""

    chunks: int
    each: int
    count: int

    @classmethod
    def of(cls, seq: int, programs: int) -> "Segments":
        """programs: as many process the row, one for each head and sequence."""
        chunks = triton.cdiv(seq, CHUNK)
        wanted = min(_SEGMENTS, chunks, max(1, _PROGRAMS // programs))
        each = triton.cdiv(chunks, wanted)
        return cls(chunks, each, triton.cdiv(chunks, each))


def saved_like(x: Tensor, state_dim: int) -> Saved:
    """Empty. x: (b, s, H, P)."""
    batch, seq, heads, dim = x.shape
    chunks = triton.cdiv(seq, CHUNK)
    return Saved(
        by_head(x, batch, seq, heads, dim), x.new_empty((batch, heads, chunks, dim, state_dim))
    )


def state_shape(x: Tensor, state_dim: int) -> tuple[int, ...]:
    """The shape of a row's state. x: (b, s, H, P)."""
    return x.shape[0], x.shape[2], x.shape[3], state_dim


def forward(
    steps: Steps, x: Tensor, z: Tensor, D: Tensor, starts: Tensor | None, y: Tensor, save: bool,
    initial: Tensor | None = None, final: Tensor | None = None,
) -> Saved:  # fmt: skip
    """x, z, y, the output: (b, s, H, P), rows of P contiguous. starts: (s,) int32, each token's
    document's first token (b = 1), or None. save: False leaves `Saved` empty. initial, final: the
    states (b, H, P, N) before and after the row, in float32, or None for zero and for none."""
    batch, _, heads, _ = x.shape
    segments = Segments.of(x.shape[1], batch * heads)
    saved = saved_like(x if save else x[:, :0], steps.q.shape[-1])
    sums, throughs = _segment_states(steps, steps.k, x, starts, segments, reverse=False)
    shared, warps, stages = _shared(steps, x, starts, "forward", x, z, y)
    kernels.mamba3_scan_forward[(heads, segments.count, batch)](
        steps.q, steps.k, x, z, steps.adt, steps.scale, steps.gamma, D, starts, sums, throughs,
        initial, y, *saved, final, x.shape[1], *segments, *_strides(shared["ALIGN"], x, z, y),
        SAVE=save, CARRIED=initial is not None, FINAL=final is not None, STAGES=stages,
        num_warps=warps, **shared,
    )  # fmt: skip
    return saved


def backward(
    dy: Tensor, steps: Steps, states: Tensor, x: Tensor, D: Tensor, starts: Tensor | None,
    dx: Tensor, ends: Ends = _NO_ENDS,
) -> tuple[ScanGradients, Tensor]:  # fmt: skip
    """dy: of y before the gate, like `Saved.inner`. states: of `Saved`. x's gradient goes into dx,
    as x lies, and those of q and k where these were.

    Returns the inner gradients and D's, (H,) in float32.
    """
    batch, seq, heads, _ = x.shape
    segments = Segments.of(seq, batch * heads)
    sums, throughs = _segment_states(steps, steps.q, dy, starts, segments, reverse=True)
    both, dadt, dscale, dboth = (torch.empty_like(steps.adt) for _ in range(4))
    dD = D.new_empty((batch * segments.count, heads))
    shared, warps, stages = _shared(steps, x, starts, "backward", x, dx)
    scan_backward_kernels.mamba3_scan_backward[(heads, segments.count, batch)](
        steps.q, steps.k, x, dy, steps.adt, steps.scale, steps.gamma, D, starts, states,
        sums, throughs, ends.final, ends.dfinal, dx, both, dadt, dscale, dboth, dD, ends.dinitial,
        seq, *segments, *_strides(shared["ALIGN"], x, dx), CARRIED=ends.dinitial is not None,
        FINAL=ends.dfinal is not None, STAGES=stages, num_warps=warps, **shared,
    )  # fmt: skip
    return ScanGradients(steps.q, steps.k, both, dadt, dscale, dboth), dD.sum(0)


def _segment_states(
    steps: Steps, rows: Tensor, values: Tensor, starts: Tensor | None, segments: Segments,
    reverse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What each segment but the last (reverse: the first) adds to the state, and its decay."""
    batch, seq, heads, dim = values.shape
    sums = steps.adt.new_empty((batch, heads, segments.count, dim, rows.shape[-1]))
    throughs = steps.adt.new_empty((batch, heads, segments.count))
    shared, warps, stages = _shared(steps, values, starts, "states", values)
    if segments.count > 1:
        kernels.mamba3_segment_states[(heads, segments.count - 1, batch)](
            rows, values, steps.adt, starts, sums, throughs, seq, *segments,
            *_strides(shared["ALIGN"], values), REVERSE=reverse, STAGES=stages, num_warps=warps,
            **shared,
        )  # fmt: skip
    return sums, throughs


def _shared(steps: Steps, x: Tensor, starts: Tensor | None, kernel: str, *rows: Tensor):
    heads, state_dim = steps.q.shape[2:]
    dim = x.shape[-1]
    found = {
        "H": heads, "P": dim, "N": state_dim, "P_BLOCK": max(16, triton.next_power_of_2(dim)),
        "N_BLOCK": max(16, triton.next_power_of_2(state_dim)), "CHUNK": CHUNK,
        "ALIGN": align(*rows), "PACKED": starts is not None, "WHOLE": x.shape[1] % CHUNK == 0,
        "APPROXIMATE": x.is_cuda,
    }  # fmt: skip
    return found, *CONFIGS[kernel]


def _strides(align: int, *tensors: Tensor) -> tuple[int, ...]:
    """Strides of the token, the sequence and the head."""
    return tuple(x.stride(dim) // align for x in tensors for dim in (1, 0, 2))
