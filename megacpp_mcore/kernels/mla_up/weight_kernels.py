"""The Triton kernels of the gradients of `mla_up`'s weights; `triton.py` launches them.

A program has one head and one of the splits of the tokens, and loops over its split's tiles: the
sum of a split is in float32, and so is that over the splits, in their order, in `add_splits`.
Nothing is added by atomics: the same inputs give the same bits.
"""

import triton
import triton.language as tl

from megacpp_mcore.kernels.mla_up.tiles import (
    angles,
    load_dims,
    product,
    store_weight_rows,
    tokens_of,
)
from megacpp_mcore.kernels.rotary_triton import load_pairs


@triton.jit
def mla_up_q_weight_backward(
    dq, q_latent, cos, sin, sums, tokens, batch, HEADS, tiles_each,
    q_s, q_b, q_h, ql_s, ql_b,
    PLAIN: tl.constexpr, PAIRS: tl.constexpr, Q_RANK: tl.constexpr, PLAIN_BLOCK: tl.constexpr,
    PAIR_BLOCK: tl.constexpr, Q_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr, WIDEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One head's rows of one split's sum. sums: (splits, heads * dims, rank) in float32."""
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    SECOND: tl.constexpr = 1 if INTERLEAVED else PAIRS
    h, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dq += h * q_h
    plain = tl.zeros((Q_BLOCK, PLAIN_BLOCK), tl.float32)
    even = tl.zeros((Q_BLOCK, PAIR_BLOCK), tl.float32)
    odd = tl.zeros((Q_BLOCK, PAIR_BLOCK), tl.float32)
    last = tl.minimum((split + 1) * tiles_each, tl.cdiv(tokens, TOKEN_BLOCK))
    for tile in tl.range(split * tiles_each, last, num_stages=STAGES):
        _, there, s, b = tokens_of(tile, tokens, batch, TOKEN_BLOCK)
        c, d = angles(cos, sin, s, there, PAIRS, PAIR_BLOCK)
        latent = tl.trans(load_dims(q_latent + s * ql_s + b * ql_b, there, Q_RANK, Q_BLOCK))
        from_q = dq + s * q_s + b * q_b
        dy = load_dims(from_q, there, PLAIN, PLAIN_BLOCK)
        plain = product(latent, dy, plain, WIDEN)
        x, y = load_pairs(from_q + PLAIN, there, PAIRS, PAIR_BLOCK, False)
        kind = dq.dtype.element_ty
        even = product(latent, (x * c + y * d).to(kind), even, WIDEN)
        odd = product(latent, (y * c - x * d).to(kind), odd, WIDEN)
    sums += (split * HEADS + h) * ((PLAIN + 2 * PAIRS) * Q_RANK)
    store_weight_rows(sums, plain, PLAIN, 1, PLAIN_BLOCK, Q_RANK, Q_BLOCK)
    sums += PLAIN * Q_RANK
    store_weight_rows(sums, even, PAIRS, STEP, PAIR_BLOCK, Q_RANK, Q_BLOCK)
    store_weight_rows(sums + SECOND * Q_RANK, odd, PAIRS, STEP, PAIR_BLOCK, Q_RANK, Q_BLOCK)


@triton.jit
def mla_up_kv_weight_backward(
    dk, dv, kv_latent, sums, tokens, batch, HEADS, tiles_each,
    k_s, k_b, k_h, v_s, v_b, v_h, kvl_s, kvl_b,
    PLAIN: tl.constexpr, V_DIM: tl.constexpr, KV_RANK: tl.constexpr, PLAIN_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, TOKEN_BLOCK: tl.constexpr,
    WIDEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As q_weight_backward, of k's plain dims and of v."""
    h, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dk += h * k_h
    dv += h * v_h
    plain = tl.zeros((KV_BLOCK, PLAIN_BLOCK), tl.float32)
    value = tl.zeros((KV_BLOCK, V_BLOCK), tl.float32)
    last = tl.minimum((split + 1) * tiles_each, tl.cdiv(tokens, TOKEN_BLOCK))
    for tile in tl.range(split * tiles_each, last, num_stages=STAGES):
        _, there, s, b = tokens_of(tile, tokens, batch, TOKEN_BLOCK)
        latent = tl.trans(load_dims(kv_latent + s * kvl_s + b * kvl_b, there, KV_RANK, KV_BLOCK))
        dy = load_dims(dk + s * k_s + b * k_b, there, PLAIN, PLAIN_BLOCK)
        plain = product(latent, dy, plain, WIDEN)
        dy = load_dims(dv + s * v_s + b * v_b, there, V_DIM, V_BLOCK)
        value = product(latent, dy, value, WIDEN)
    sums += (split * HEADS + h) * ((PLAIN + V_DIM) * KV_RANK)
    store_weight_rows(sums, plain, PLAIN, 1, PLAIN_BLOCK, KV_RANK, KV_BLOCK)
    store_weight_rows(sums + PLAIN * KV_RANK, value, V_DIM, 1, V_BLOCK, KV_RANK, KV_BLOCK)


@triton.jit
def mla_up_add_splits(sums, target, size, splits, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """The sum over the splits, rounded once to the target's dtype. ADD: to what is there."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(splits):
        total += tl.load(sums + at, mask=there, other=0.0)
        sums += size
    if ADD:
        total += tl.load(target + at, mask=there, other=0.0).to(tl.float32)
    tl.store(target + at, total.to(target.dtype.element_ty), mask=there)
