"""What the Triton kernels of `mla_up` share: tiles of tokens, of weights and of angles.

A tile of tokens has TOKEN_BLOCK of the s * b tokens, numbered as they lie in an (s, b, ...) tensor
without gaps. `there`: (TOKEN_BLOCK, 1), the tokens that exist; what does not is read as zero. Dims
and ranks that are no powers of two of 16 or more are filled up with zeros, as tensor cores take no
others.

INTERLEAVED: the two rows of a pair of rotated dims are neighbours in a weight, else half the dims
apart. Either way they are read as two operands, and their products need no exchange of values.
"""

import triton
import triton.language as tl


@triton.jit
def tokens_of(tile, tokens, batch, TOKEN_BLOCK: tl.constexpr):
    """Number, existence, s and b of a tile's tokens, (TOKEN_BLOCK, 1) each."""
    t = (tile * TOKEN_BLOCK + tl.arange(0, TOKEN_BLOCK))[:, None]
    return t.to(tl.int64), t < tokens, (t // batch).to(tl.int64), (t % batch).to(tl.int64)


@triton.jit
def angles(cos, sin, s, there, PAIRS: tl.constexpr, PAIR_BLOCK: tl.constexpr):
    """cos and sin of a tile's tokens, (TOKEN_BLOCK, PAIR_BLOCK) in float32."""
    pair = tl.arange(0, PAIR_BLOCK)[None, :]
    mask, at = there & (pair < PAIRS), s * PAIRS + pair
    return tl.load(cos + at, mask=mask, other=0.0), tl.load(sin + at, mask=mask, other=0.0)


@triton.jit
def load_dims(at, there, DIMS: tl.constexpr, BLOCK: tl.constexpr):
    """DIMS elements of every token's row, (TOKEN_BLOCK, BLOCK) in their dtype. at: (.., 1)."""
    dim = tl.arange(0, BLOCK)[None, :]
    return tl.load(at + dim, mask=there & (dim < DIMS), other=0.0)


@triton.jit
def store_dims(at, x, there, DIMS: tl.constexpr, BLOCK: tl.constexpr):
    """The inverse of load_dims, rounded once."""
    dim = tl.arange(0, BLOCK)[None, :]
    tl.store(at + dim, x.to(at.dtype.element_ty), mask=there & (dim < DIMS))


@triton.jit
def weight_rows(weight, ROWS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
                RANK: tl.constexpr, RANK_BLOCK: tl.constexpr):  # fmt: skip
    """ROWS rows of a weight, every STEP-th: (BLOCK, RANK_BLOCK)."""
    n, r = tl.arange(0, BLOCK)[:, None], tl.arange(0, RANK_BLOCK)[None, :]
    return tl.load(weight + n * (STEP * RANK) + r, mask=(n < ROWS) & (r < RANK), other=0.0)


@triton.jit
def store_weight_rows(weight, x, ROWS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
                      RANK: tl.constexpr, RANK_BLOCK: tl.constexpr):  # fmt: skip
    """The inverse of weight_rows, of x (RANK_BLOCK, BLOCK), the other way round."""
    n, r = tl.arange(0, BLOCK)[None, :], tl.arange(0, RANK_BLOCK)[:, None]
    tl.store(weight + n * (STEP * RANK) + r, x, mask=(n < ROWS) & (r < RANK))


@triton.jit
def product(a, b, total, WIDEN: tl.constexpr):
    """total + a b, in float32. WIDEN: for Triton's interpreter, which takes bfloat16's bits for
    integers; the products are the same, as bfloat16's values are exact in float32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def projected(latent, weight, ROWS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
              RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, WIDEN: tl.constexpr):  # fmt: skip
    """A tile's latents times rows of a weight, (TOKEN_BLOCK, BLOCK) in float32."""
    rows = weight_rows(weight, ROWS, STEP, BLOCK, RANK, RANK_BLOCK)
    return product(latent, tl.trans(rows), tl.zeros((latent.shape[0], BLOCK), tl.float32), WIDEN)


@triton.jit
def added_to_latent(total, dy, weight, ROWS: tl.constexpr, STEP: tl.constexpr,
                    BLOCK: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
                    WIDEN: tl.constexpr):  # fmt: skip
    """A latent's gradient so far, and dy (TOKEN_BLOCK, BLOCK) times rows of the weight."""
    rows = weight_rows(weight, ROWS, STEP, BLOCK, RANK, RANK_BLOCK)
    return product(dy, rows, total, WIDEN)
