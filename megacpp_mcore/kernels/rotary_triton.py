"""Shared by the Triton kernels of RoPE: positions in packed documents, and pairs of dims.

Tiles are (heads, dims); `heads` masks the rows that exist. Sizes that are not powers of two are
masked. Rotations are computed in float32 for every dtype of the tensors.
"""

import triton
import triton.language as tl


@triton.jit
def position(s, bounds, count, BLOCK: tl.constexpr):
    """The position of token s in its document: s minus the last of the `count` bounds <= s."""
    start = s * 0
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        bound = tl.load(bounds + at, mask=at < count, other=0)
        start = tl.maximum(start, tl.max(tl.where(bound <= s, bound, 0), 0).to(s.dtype))
    return s - start


@triton.jit
def load_pairs(at, heads, PAIRS, PAIR_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both elements of every pair, (heads, PAIR_BLOCK) each in float32. at: (heads, 1)."""
    if INTERLEAVED:
        dim = tl.arange(0, 2 * PAIR_BLOCK)[None, :]
        x = tl.load(at + dim, mask=heads & (dim < 2 * PAIRS), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (x.shape[0], PAIR_BLOCK, 2)))
    else:
        pair = tl.arange(0, PAIR_BLOCK)[None, :]
        mask = heads & (pair < PAIRS)
        a = tl.load(at + pair, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(at + PAIRS + pair, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def store_pairs(at, a, b, heads, PAIRS, PAIR_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The inverse of load_pairs, rounded once to the dtype of `at`."""
    kind = at.dtype.element_ty
    if INTERLEAVED:
        dim = tl.arange(0, 2 * PAIR_BLOCK)[None, :]
        x = tl.reshape(tl.join(a, b), (a.shape[0], 2 * PAIR_BLOCK))
        tl.store(at + dim, x.to(kind), mask=heads & (dim < 2 * PAIRS))
    else:
        pair = tl.arange(0, PAIR_BLOCK)[None, :]
        mask = heads & (pair < PAIRS)
        tl.store(at + pair, a.to(kind), mask=mask)
        tl.store(at + PAIRS + pair, b.to(kind), mask=mask)


@triton.jit
def copy_dims(source, target, heads, DIM, BLOCK: tl.constexpr):
    """Copy DIM elements of every row."""
    dim = tl.arange(0, BLOCK)[None, :]
    mask = heads & (dim < DIM)
    tl.store(target + dim, tl.load(source + dim, mask=mask), mask=mask)
