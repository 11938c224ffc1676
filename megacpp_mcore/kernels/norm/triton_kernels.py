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
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows p, p + programs, ...; partial (programs, hidden) gets the sum of their dy x r."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        start = row * hidden
        value = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(dy + start + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            residual = tl.load(d_residual + start + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row)
        normed = value * scale
        total += gradient * normed
        gradient *= w
        mean = tl.sum(gradient * normed, 0) / hidden
        out = scale * (gradient - normed * mean)
        if HAS_RESIDUAL:
            out += residual
        tl.store(dx + start + column, out, mask=inside)
    tl.store(partial + program * hidden + column, total, mask=inside)
