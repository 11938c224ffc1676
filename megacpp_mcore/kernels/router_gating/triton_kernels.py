"""Triton kernel of the router's gating product."""

import triton
import triton.language as tl


@triton.jit
def split_bf16(x, parts, SIZE, WIDTH, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """x (t, WIDTH) in float32 -> parts (t, PARTS WIDTH): blocks of columns whose sum is x."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(x + at, mask=at < SIZE, other=0.0)
    to = parts + at // WIDTH * (PARTS * WIDTH) + at % WIDTH
    for i in tl.static_range(PARTS):
        part = left.to(tl.bfloat16)
        tl.store(to + i * WIDTH, part, mask=at < SIZE)
        left -= part.to(tl.float32)
