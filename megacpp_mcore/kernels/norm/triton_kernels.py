"""The two Triton kernels of RMSNorm; `triton.py` launches them. Everything is computed in float32.

Math, with r = 1 / sqrt(mean(x^2) + eps), and the residual's gradient g:

    y  = x r w
    dx = r (dy w - x r mean(dy w x r)) + g        dw = sum over rows of dy x r
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm_forward(x, weight, y, rstd, hidden, eps, BLOCK: tl.constexpr):
    """One row a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    value = tl.load(x + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value, 0) / hidden + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * hidden + column, value * scale * w, mask=inside)
    tl.store(rstd + row, scale)


@triton.jit
def rms_norm_backward(
    x, dy, d_residual, weight, rstd, dx, partial, rows, hidden,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows at a time, those of program p, p + programs, ...; partial (programs, hidden) gets
    the sum of their dy x r."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + column, mask=column < hidden, other=0.0).to(tl.float32)
    total = tl.zeros((1, BLOCK), tl.float32)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (row < rows) & (column < hidden)
        at = row * hidden + column
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            residual = tl.load(d_residual + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)
        normed = value * scale
        total += tl.sum(gradient * normed, 0, keep_dims=True)
        gradient *= w
        mean = tl.sum(gradient * normed, 1, keep_dims=True) / hidden
        out = scale * (gradient - normed * mean)
        if HAS_RESIDUAL:
            out += residual
        tl.store(dx + at, out, mask=inside)
    tl.store(partial + program.to(tl.int64) * hidden + column, total, mask=column < hidden)
