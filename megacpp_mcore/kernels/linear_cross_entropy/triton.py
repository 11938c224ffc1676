"""Softmax statistics of rows of logits, and the loss's gradient in their place, in Triton.

A program has one row. It reads the row for the statistics, and again for the gradient, which it
writes in place. A launch does either or both; with both, the second read goes from the end of the
row to its start, which finds most of the row in the device's caches.

Each of LANES columns has a running maximum and sum of its own until the end of the row, so threads
synchronise once a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megacpp_mcore.kernels.device_guard import device_of
from megacpp_mcore.kernels.linear_cross_entropy.inputs import Options
from megacpp_mcore.kernels.linear_cross_entropy.reference import smoothing_of

STATISTICS = 4
ELSEWHERE, NOT_COUNTED = -1, -2  # labels
_LANES, _DEPTH, _WARPS = 4096, 4, 16  # fastest on an H200; _DEPTH * _LANES columns at a time
_SCALE_BLOCK, _SCALE_PROGRAMS = 8192, 1056  # eight to a multiprocessor of an H200
_ADD_BLOCK = 2048  # of float32: eight programs of it have room on a multiprocessor
_TILE = 64


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
    """The statistics of the logits' rows, the replacement of the logits by their gradient, or both.

    logits: (tokens, classes), rows contiguous, of one rank. z is a logit scaled and capped. labels:
    (tokens,), a column of logits each, or ELSEWHERE for a label of another rank, or NOT_COUNTED for
    a token that has no gradient. vocab_size: classes of all ranks.

    statistics: (4, tokens) float32, to be written: the largest z, the sum of exp(z - largest), the
    label's z (0 without a column), and with label smoothing the sum of z, else 0.

    loss_gradients: (tokens,) float32. The logits are then replaced by the gradient of the sum of
    loss_gradients times losses. lse: (tokens,) float32, log(sum(exp(z))) of the whole vocabulary;
    by default that of the row's own statistics.
    """
    tokens, classes = logits.shape
    if not tokens:
        return
    smoothing = smoothing_of(options, vocab_size)
    lanes = min(_LANES, triton.next_power_of_2(classes))
    depth = min(_DEPTH, triton.cdiv(triton.next_power_of_2(classes), lanes))
    with device_of(logits):
        _cross_entropy_softmax_rows[(tokens,)](
            logits, logits.stride(0), labels,
            statistics, 0 if statistics is None else statistics.stride(0),
            loss_gradients, lse, classes,
            options.logit_scale, options.softcap, options.z_loss,
            1 - smoothing, smoothing / vocab_size,
            NOT_COUNTED=NOT_COUNTED,
            HAS_STATISTICS=statistics is not None, HAS_GRADIENT=loss_gradients is not None,
            HAS_SCALE=options.logit_scale != 1, HAS_SOFTCAP=options.softcap > 0,
            HAS_SMOOTHING=smoothing > 0,
            EVEN=classes % (depth * lanes) == 0, DEPTH=depth, LANES=lanes, num_warps=_WARPS,
        )  # fmt: skip


@triton.jit
def _capped(x, scale, softcap, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """z of a logit. tanh(a) is 1 - 2 / (exp(2a) + 1), with an absolute error of one epsilon and the
    right limits."""
    z = x.to(tl.float32)
    if HAS_SCALE:
        z *= scale
    if HAS_SOFTCAP:
        z = softcap * (1 - 2 / (tl.exp(2 * (z / softcap)) + 1))
    return z


@triton.jit
def _logits(logits, at, classes, EVEN: tl.constexpr):
    """The logits of a row in the columns `at`, 0 after its end."""
    if EVEN:
        return tl.load(logits + at)
    return tl.load(logits + at, mask=at < classes, other=0.0)


@triton.jit
def _gradient(z, lse, softmax_factor, other_factor, softcap, HAS_SOFTCAP: tl.constexpr):
    """The gradient of a logit."""
    g = tl.exp(z - lse) * softmax_factor - other_factor
    if HAS_SOFTCAP:
        g *= 1 - (z / softcap) * (z / softcap)
    return g


@triton.jit
def _cross_entropy_softmax_rows(
    logits, row_stride, labels, statistics, statistics_stride, loss_gradients, lse_given, classes,
    scale, softcap, z_loss, picked_share, uniform_share,
    NOT_COUNTED: tl.constexpr, HAS_STATISTICS: tl.constexpr, HAS_GRADIENT: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
    EVEN: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    label = tl.load(labels + row)
    columns = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    blocks = tl.cdiv(classes, DEPTH * LANES)
    picked = tl.load(logits + label, mask=label >= 0, other=0.0)
    picked = _capped(picked, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
    if HAS_STATISTICS:
        tops = tl.full([LANES], -float("inf"), tl.float32)
        sums = tl.zeros([LANES], tl.float32)
        totals = tl.zeros([LANES], tl.float32)
        for block in range(blocks):
            at = block * DEPTH * LANES + columns
            z = _capped(_logits(logits, at, classes, EVEN), scale, softcap, HAS_SCALE, HAS_SOFTCAP)
            if HAS_SMOOTHING:
                totals += tl.sum(tl.where(at < classes, z, 0.0), 0)
            if not EVEN:
                z = tl.where(at < classes, z, -float("inf"))
            before = tops
            tops = tl.maximum(before, tl.max(z, 0))
            base = tl.where(tops == -float("inf"), 0.0, tops)  # lanes after the row's end
            sums = sums * tl.exp(before - base) + tl.sum(tl.exp(z - base[None, :]), 0)
        largest = tl.max(tops, 0)
        exponentials = tl.sum(sums * tl.exp(tops - largest), 0)
        lse = largest + tl.log(exponentials)
        statistics += row
        tl.store(statistics, largest)
        tl.store(statistics + statistics_stride, exponentials)
        tl.store(statistics + 2 * statistics_stride, tl.where(label >= 0, picked, 0.0))
        tl.store(statistics + 3 * statistics_stride, tl.sum(totals, 0))
    else:
        lse = tl.load(lse_given + row)
    if HAS_GRADIENT:
        factor = tl.load(loss_gradients + row) * scale
        factor = tl.where(label == NOT_COUNTED, 0.0, factor)
        softmax_factor = factor * (1 + 2 * z_loss * lse)
        uniform_part = factor * uniform_share
        tl.debug_barrier()  # every thread has read the label's logit
        for block in range(blocks):
            at = (blocks - 1 - block) * DEPTH * LANES + columns
            z = _capped(_logits(logits, at, classes, EVEN), scale, softcap, HAS_SCALE, HAS_SOFTCAP)
            g = _gradient(z, lse, softmax_factor, uniform_part, softcap, HAS_SOFTCAP)
            g = g.to(logits.dtype.element_ty)
            if EVEN:
                tl.store(logits + at, g)
            else:
                tl.store(logits + at, g, mask=at < classes)
        tl.debug_barrier()  # the label's is written last, from unrounded terms, as they may cancel
        others = uniform_part + factor * picked_share
        g = _gradient(picked, lse, softmax_factor, others, softcap, HAS_SOFTCAP)
        tl.store(logits + label, g.to(logits.dtype.element_ty), mask=label >= 0)


def transposed(x: Tensor, out: Tensor) -> Tensor:
    """Copy x (n, m) transposed into out (m, n), both with contiguous rows; several times as fast as
    torch's copy."""
    n, m = x.shape
    if x.numel():
        with device_of(x):
            _cross_entropy_transpose[(triton.cdiv(n, _TILE), triton.cdiv(m, _TILE))](
                x, x.stride(0), out, out.stride(0), n, m, TILE=_TILE
            )
    return out


@triton.jit
def _cross_entropy_transpose(x, x_stride, out, out_stride, n, m, TILE: tl.constexpr):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (rows < n)[:, None] & (columns < m)[None, :]
    at = rows.to(tl.int64)[:, None] * x_stride + columns[None, :]
    tile = tl.trans(tl.load(x + at, mask=inside))
    at = columns.to(tl.int64)[:, None] * out_stride + rows[None, :]
    tl.store(out + at, tile, mask=tl.trans(inside))


def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiply contiguous x in place by the float32 number factor; a factor of 1 reads nothing."""
    _scale_into(x, x, factor)


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """Contiguous x times the float32 number factor, rounded once to x's dtype."""
    out = torch.empty_like(x)
    _scale_into(out, x, factor)
    return out


def add_scaled_(total: Tensor, x: Tensor, factor: Tensor) -> None:
    """total += factor x, in float32 and rounded once to total's dtype; a factor of 0 adds nothing.

    total, x: contiguous, of one shape. factor: one float32 number.
    """
    if x.numel():
        programs = min(triton.cdiv(x.numel(), _ADD_BLOCK), _SCALE_PROGRAMS)
        with device_of(x):
            _cross_entropy_add_scaled[(programs,)](total, x, factor, x.numel(), BLOCK=_ADD_BLOCK)


@triton.jit
def _cross_entropy_add_scaled(total, x, factor, size, BLOCK: tl.constexpr):
    by = tl.load(factor)
    columns = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + columns
        value = tl.load(x + at, mask=at < size).to(tl.float32) * by
        value += tl.load(total + at, mask=at < size).to(tl.float32)
        tl.store(total + at, value.to(total.dtype.element_ty), mask=at < size)


def _scale_into(out: Tensor, x: Tensor, factor: Tensor) -> None:
    if x.numel():
        programs = min(triton.cdiv(x.numel(), _SCALE_BLOCK), _SCALE_PROGRAMS)
        with device_of(x):
            _cross_entropy_scale[(programs,)](
                x, factor, out, x.numel(), IN_PLACE=out is x, BLOCK=_SCALE_BLOCK
            )


@triton.jit
def _cross_entropy_scale(x, factor, out, size, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    by = tl.load(factor)
    if IN_PLACE:
        size = tl.where(by == 1.0, 0, size)
    columns = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + columns
        value = tl.load(x + at, mask=at < size).to(tl.float32) * by
        tl.store(out + at, value.to(out.dtype.element_ty), mask=at < size)
