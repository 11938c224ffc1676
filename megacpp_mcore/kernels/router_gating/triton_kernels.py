"""Triton kernels of the router's gating product: every token is read once in each direction.

KIND: dtype of the products' operands, all bf16 values: bf16, or float32 in Triton's interpreter,
which does not multiply bf16.
"""

import triton
import triton.language as tl


@triton.jit
def logits_of_tokens(
    x, weight, logits, TOKENS, HIDDEN, EXPERTS, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """logits[t, e] = x[t] . weight[e], summed in float32: a program for BLOCK tokens."""
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    e = tl.arange(0, WIDTH)[None, :]
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    for first in range(0, HIDDEN, COLUMNS):
        row = first + tl.arange(0, COLUMNS)[None, :]
        column = first + tl.arange(0, COLUMNS)[:, None]
        token = tl.load(x + t * HIDDEN + row, mask=(t < TOKENS) & (row < HIDDEN), other=0.0)
        inside = (e < EXPERTS) & (column < HIDDEN)
        of_expert = tl.load(weight + e * HIDDEN + column, mask=inside, other=0.0)
        total = tl.dot(token.to(KIND), of_expert.to(KIND), total)
    tl.store(logits + t * EXPERTS + e, total, mask=(t < TOKENS) & (e < EXPERTS))


@triton.jit
def gradients_of_logits(
    x, weight, dlogits, dx, dweight, TOKENS, HIDDEN, EXPERTS, BLOCKS, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """dx = dlogits weight, and dweight[part] = dlogits^T x of the tokens of one part.

    A program has COLUMNS columns of BLOCKS blocks of tokens. The float32 gradient is the sum of
    three bf16 values of eight bits each.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    part = tl.program_id(1)
    wide, tall = tl.arange(0, WIDTH)[None, :], tl.arange(0, WIDTH)[:, None]
    inside = (tall < EXPERTS) & (column < HIDDEN)
    of_experts = tl.load(weight + tall * HIDDEN + column, mask=inside, other=0.0).to(KIND)
    of_weight = tl.zeros([WIDTH, COLUMNS], tl.float32)
    for block in range(BLOCKS):
        t = (part * BLOCKS + block).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
        at, here = t * HIDDEN + column, (t < TOKENS) & (column < HIDDEN)
        token = tl.load(x + at, mask=here, other=0.0).to(KIND)
        chosen = (t < TOKENS) & (wide < EXPERTS)
        grad = tl.load(dlogits + t * EXPERTS + wide, mask=chosen, other=0.0)
        high = grad.to(tl.bfloat16)
        rest = grad - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16).to(KIND)
        high, middle = high.to(KIND), middle.to(KIND)
        of_token = tl.dot(low, of_experts)
        of_token = tl.dot(middle, of_experts, of_token)
        of_token = tl.dot(high, of_experts, of_token)
        tl.store(dx + at, of_token.to(dx.dtype.element_ty), mask=here)
        of_weight = tl.dot(tl.trans(low), token, of_weight)
        of_weight = tl.dot(tl.trans(middle), token, of_weight)
        of_weight = tl.dot(tl.trans(high), token, of_weight)
    tl.store(dweight + (part * EXPERTS + tall) * HIDDEN + column, of_weight, mask=inside)
