"""Softmax statistics of rows of logits, and the loss's gradient in their place, in Triton.

A program takes one row: it reads it for the statistics, then again for the gradient, which it
writes in place. A launch does one or the other or both; with both, the second read is from the
device's L2 cache.
"""

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp_mcore.kernels.linear_cross_entropy.inputs import Options
from megacpp_mcore.kernels.linear_cross_entropy.reference import smoothing_of

STATISTICS = 4
_BLOCK, _WARPS = 16384, 16  # columns at a time, and who takes them: the fastest on an H200
_SCALE_BLOCK = 8192


def softmax_rows(
    logits: Tensor,
    labels: Tensor,
    options: Options,
    vocab_size: int,
    *,
    statistics: Tensor | None = None,
    loss_gradients: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """Statistics of the logits' rows, and their replacement by a gradient, or one of the two.

    logits: (tokens, classes), rows contiguous, of one rank. z is a logit scaled and capped. labels:
    (tokens,), a column of logits each, or -1 for none. vocab_size: classes of all ranks.

    statistics: (4, tokens) float32, to be written: the largest z, the sum of exp(z - largest), the
    label's z (0 without a label), and with label smoothing the sum of z, else 0.

    loss_gradients: (tokens,) float32. The logits are then replaced by the gradient of the sum of
    loss_gradients times losses. lse: (tokens,) float32, log(sum(exp(z))) of the whole vocabulary;
    by default that of the row's own statistics.
    """
    tokens, classes = logits.shape
    if not tokens:
        return
    smoothing = smoothing_of(options, vocab_size)
    block = min(_BLOCK, triton.next_power_of_2(classes))
    with _on(logits):
        _rows[(tokens,)](
            logits, logits.stride(0), labels,
            statistics, 0 if statistics is None else statistics.stride(0),
            loss_gradients, lse, classes,
            options.logit_scale, options.softcap, options.z_loss,
            1 - smoothing, smoothing / vocab_size,
            HAS_STATISTICS=statistics is not None, HAS_GRADIENT=loss_gradients is not None,
            HAS_SOFTCAP=options.softcap > 0, HAS_SMOOTHING=smoothing > 0,
            EVEN=classes % block == 0, BLOCK=block, num_warps=_WARPS,
        )  # fmt: skip


@triton.jit
def _capped(x, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """z of a logit. tanh(a) as 1 - 2 / (exp(2a) + 1): right at both ends, and off by an epsilon of
    1 in the middle."""
    z = x.to(tl.float32) * scale
    if HAS_SOFTCAP:
        z = softcap * (1 - 2 / (tl.exp(2 * (z / softcap)) + 1))
    return z


@triton.jit
def _block(logits, start, columns, classes, EVEN: tl.constexpr, other: tl.constexpr):
    """Columns start + columns of a row, `other` past its end."""
    if EVEN:
        return tl.load(logits + start + columns)
    return tl.load(logits + start + columns, mask=start + columns < classes, other=other)


@triton.jit
def _gradient(
    z, lse, softmax_factor, uniform_part, picked_part, scale, softcap, HAS_SOFTCAP: tl.constexpr
):
    """Of a logit; picked_part is 0 but for the label's."""
    g = (tl.exp(z - lse) * softmax_factor - uniform_part - picked_part) * scale
    if HAS_SOFTCAP:
        g *= 1 - (z / softcap) * (z / softcap)
    return g


@triton.jit
def _rows(
    logits, row_stride, labels, statistics, statistics_stride, loss_gradients, lse_given, classes,
    scale, softcap, z_loss, picked_share, uniform_share,
    HAS_STATISTICS: tl.constexpr, HAS_GRADIENT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
    EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    label = tl.load(labels + row)
    columns = tl.arange(0, BLOCK)
    picked = tl.load(logits + label, mask=label >= 0, other=0.0)
    picked = _capped(picked, scale, softcap, HAS_SOFTCAP)
    if HAS_STATISTICS:
        largest = -float("inf")
        exponentials = 0.0
        total = 0.0
        for start in range(0, classes, BLOCK):
            x = _block(logits, start, columns, classes, EVEN, 0.0)
            z = _capped(x, scale, softcap, HAS_SOFTCAP)
            if HAS_SMOOTHING:
                total += tl.sum(tl.where(start + columns < classes, z, 0.0), 0)
            if not EVEN:
                z = tl.where(start + columns < classes, z, -float("inf"))
            before = largest
            largest = tl.maximum(before, tl.max(z, 0))
            exponentials = exponentials * tl.exp(before - largest) + tl.sum(tl.exp(z - largest), 0)
        lse = largest + tl.log(exponentials)
        statistics += row
        tl.store(statistics, largest)
        tl.store(statistics + statistics_stride, exponentials)
        tl.store(statistics + 2 * statistics_stride, tl.where(label >= 0, picked, 0.0))
        tl.store(statistics + 3 * statistics_stride, total)
    else:
        lse = tl.load(lse_given + row)
    if HAS_GRADIENT:
        factor = tl.load(loss_gradients + row)
        softmax_factor = factor * (1 + 2 * z_loss * lse)
        uniform_part = factor * uniform_share
        tl.debug_barrier()  # every thread has read the label's logit
        for start in range(0, classes, BLOCK):
            x = _block(logits, start, columns, classes, EVEN, 0.0)
            z = _capped(x, scale, softcap, HAS_SOFTCAP)
            g = _gradient(
                z, lse, softmax_factor, uniform_part, 0.0, scale, softcap, HAS_SOFTCAP
            ).to(logits.dtype.element_ty)
            if EVEN:
                tl.store(logits + start + columns, g)
            else:
                tl.store(logits + start + columns, g, mask=start + columns < classes)
        tl.debug_barrier()  # the label's is written last, whole: it may cancel to very little
        g = _gradient(
            picked, lse, softmax_factor, uniform_part, factor * picked_share, scale, softcap,
            HAS_SOFTCAP,
        )  # fmt: skip
        tl.store(logits + label, g.to(logits.dtype.element_ty), mask=label >= 0)


def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiply contiguous x by the float32 number factor, rounding once; for 1, read nothing."""
    _scale_into(x, x, factor)


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x, which is contiguous, times the float32 number factor, rounded once to x's dtype."""
    out = torch.empty_like(x)
    _scale_into(out, x, factor)
    return out


def _scale_into(out: Tensor, x: Tensor, factor: Tensor) -> None:
    if x.numel():
        with _on(x):
            _scale[(triton.cdiv(x.numel(), _SCALE_BLOCK),)](
                x, factor, out, x.numel(), IN_PLACE=out is x, BLOCK=_SCALE_BLOCK
            )


def _on(x: Tensor) -> contextlib.AbstractContextManager:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


@triton.jit
def _scale(x, factor, out, size, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    by = tl.load(factor) + tl.zeros([BLOCK], tl.float32)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wanted = at < size
    if IN_PLACE:
        wanted = wanted & (by != 1.0)
    value = tl.load(x + at, mask=wanted).to(tl.float32) * by
    tl.store(out + at, value.to(out.dtype.element_ty), mask=wanted)
