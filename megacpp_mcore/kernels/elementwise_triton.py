"""Elementary functions for Triton kernels, in float32.

Written with exp alone, so that Triton's interpreter has them too. Each is within a few epsilons of
the value, or, where it says so, of the function's range.
"""

import triton
import triton.language as tl


@triton.jit
def log1p_exp(x):
    """softplus(x) = max(x, 0) + log1p(e), e = exp(-|x|): 2 atanh(e / (2 + e)) as a series, whose
    argument is at most 1/3, so that eight terms are exact to float32. A small value keeps its
    relative precision, which log(1 + e) loses."""
    e = tl.exp(-tl.abs(x))
    r = e / (2.0 + e)
    r2 = r * r
    series = 1.0 / 13.0 + r2 * (1.0 / 15.0)
    series = 1.0 / 11.0 + r2 * series
    series = 1.0 / 9.0 + r2 * series
    series = 1.0 / 7.0 + r2 * series
    series = 1.0 / 5.0 + r2 * series
    series = 1.0 / 3.0 + r2 * series
    return tl.maximum(x, 0.0) + 2.0 * r * (1.0 + r2 * series)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Within an epsilon of 1, the function's range."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def tanh_derivative(x):
    """1 - tanh(x)^2."""
    e = tl.exp(-2.0 * tl.abs(x))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def decay(x, floor, SOFTPLUS: tl.constexpr):
    """A < 0 from its logit, at most -floor."""
    rational = tl.where(x >= 0, 1.0 + x, 1.0 / (1.0 - tl.minimum(x, 0.0)))
    return -tl.maximum(log1p_exp(x) if SOFTPLUS else rational, floor)


@triton.jit
def decay_derivative(x, floor, SOFTPLUS: tl.constexpr):
    """dA / dx; 0 below the floor."""
    if SOFTPLUS:
        a, slope = log1p_exp(x), sigmoid(x)
    else:
        below = 1.0 / (1.0 - tl.minimum(x, 0.0))
        a = tl.where(x >= 0, 1.0 + x, below)
        slope = tl.where(x >= 0, 1.0, below * below)
    return tl.where(a >= floor, -slope, 0.0)


@triton.jit
def cos_sin(x, APPROXIMATE: tl.constexpr):
    """cos and sin of |x| <= pi.

    APPROXIMATE: the GPU's own instructions, within 2^-20.5 of the value in this range by PTX's
    table; Triton's interpreter has none.
    """
    if APPROXIMATE:
        c = tl.inline_asm_elementwise(
            "cos.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        s = tl.inline_asm_elementwise(
            "sin.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        c, s = tl.cos(x), tl.sin(x)
    return c, s
