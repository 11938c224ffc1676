"""The Triton kernels of `mla_up` whose programs have a tile of tokens: the forward pass, and the
gradients of the latents; `triton.py` launches them.

A program loops over heads with its tile of latents, or of their gradients, on the chip. The sums
over heads are in float32 and in a fixed order. Strides are in elements, of tokens s, b and heads h.
"""

import triton
import triton.language as tl

from megacpp_mcore.kernels.mla_up.tiles import (
    added_to_latent,
    angles,
    load_dims,
    projected,
    store_dims,
    tokens_of,
)
from megacpp_mcore.kernels.rotary_triton import load_pairs, store_pairs


@triton.jit
def mla_up_forward(
    q_latent, kv_latent, k_pos, q_weight, kv_weight, cos, sin, q, k, v,
    tokens, batch, HEADS, heads_each, ql_s, ql_b, kvl_s, kvl_b, pos_s, pos_b,
    PLAIN: tl.constexpr, PAIRS: tl.constexpr, V_DIM: tl.constexpr,
    Q_RANK: tl.constexpr, KV_RANK: tl.constexpr, PLAIN_BLOCK: tl.constexpr,
    PAIR_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr, WIDEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """q, k and v, without gaps, of a tile of tokens and `heads_each` heads. Programs of the same
    tokens run side by side: together they write whole rows."""
    DIM: tl.constexpr = PLAIN + 2 * PAIRS
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    SECOND: tl.constexpr = 1 if INTERLEAVED else PAIRS
    t, there, s, b = tokens_of(tl.program_id(1), tokens, batch, TOKEN_BLOCK)
    c, d = angles(cos, sin, s, there, PAIRS, PAIR_BLOCK)
    k_x, k_y = load_pairs(k_pos + s * pos_s + b * pos_b, there, PAIRS, PAIR_BLOCK, INTERLEAVED)
    kind = k.dtype.element_ty
    k_a, k_b = (k_x * c - k_y * d).to(kind), (k_y * c + k_x * d).to(kind)
    x_q = load_dims(q_latent + s * ql_s + b * ql_b, there, Q_RANK, Q_BLOCK)
    x_kv = load_dims(kv_latent + s * kvl_s + b * kvl_b, there, KV_RANK, KV_BLOCK)

    first = tl.program_id(0) * heads_each
    for h in tl.range(first, tl.minimum(first + heads_each, HEADS), num_stages=STAGES):
        w = q_weight + h * (DIM * Q_RANK)
        to_q, to_k = q + (t * HEADS + h) * DIM, k + (t * HEADS + h) * DIM
        to_v = v + (t * HEADS + h) * V_DIM
        y = projected(x_q, w, PLAIN, 1, PLAIN_BLOCK, Q_RANK, Q_BLOCK, WIDEN)
        store_dims(to_q, y, there, PLAIN, PLAIN_BLOCK)
        w += PLAIN * Q_RANK
        x = projected(x_q, w, PAIRS, STEP, PAIR_BLOCK, Q_RANK, Q_BLOCK, WIDEN)
        w += SECOND * Q_RANK
        y = projected(x_q, w, PAIRS, STEP, PAIR_BLOCK, Q_RANK, Q_BLOCK, WIDEN)
        store_pairs(to_q + PLAIN, x * c - y * d, y * c + x * d, there, PAIRS, PAIR_BLOCK, False)

        w = kv_weight + h * ((PLAIN + V_DIM) * KV_RANK)
        y = projected(x_kv, w, PLAIN, 1, PLAIN_BLOCK, KV_RANK, KV_BLOCK, WIDEN)
        store_dims(to_k, y, there, PLAIN, PLAIN_BLOCK)
        store_pairs(to_k + PLAIN, k_a, k_b, there, PAIRS, PAIR_BLOCK, False)
        w += PLAIN * KV_RANK
        y = projected(x_kv, w, V_DIM, 1, V_BLOCK, KV_RANK, KV_BLOCK, WIDEN)
        store_dims(to_v, y, there, V_DIM, V_BLOCK)


@triton.jit
def mla_up_latents_backward(
    dq, dk, dv, q_weight, kv_weight, cos, sin, dq_latent, dkv_latent, dk_pos,
    tokens, batch, HEADS, q_s, q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h,
    PLAIN: tl.constexpr, PAIRS: tl.constexpr, V_DIM: tl.constexpr,
    Q_RANK: tl.constexpr, KV_RANK: tl.constexpr, PLAIN_BLOCK: tl.constexpr,
    PAIR_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr, WIDEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile's latents and k_pos, without gaps, summed over all heads."""
    DIM: tl.constexpr = PLAIN + 2 * PAIRS
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    SECOND: tl.constexpr = 1 if INTERLEAVED else PAIRS
    t, there, s, b = tokens_of(tl.program_id(0), tokens, batch, TOKEN_BLOCK)
    c, d = angles(cos, sin, s, there, PAIRS, PAIR_BLOCK)
    kind = dq.dtype.element_ty
    from_q, from_k, from_v = s * q_s + b * q_b, s * k_s + b * k_b, s * v_s + b * v_b
    d_q = tl.zeros((TOKEN_BLOCK, Q_BLOCK), tl.float32)
    d_kv = tl.zeros((TOKEN_BLOCK, KV_BLOCK), tl.float32)
    k_x = tl.zeros((TOKEN_BLOCK, PAIR_BLOCK), tl.float32)
    k_y = tl.zeros((TOKEN_BLOCK, PAIR_BLOCK), tl.float32)

    for _ in tl.range(HEADS, num_stages=STAGES):
        dy = load_dims(dq + from_q, there, PLAIN, PLAIN_BLOCK)
        w = q_weight
        d_q = added_to_latent(d_q, dy, w, PLAIN, 1, PLAIN_BLOCK, Q_RANK, Q_BLOCK, WIDEN)
        x, y = load_pairs(dq + PLAIN + from_q, there, PAIRS, PAIR_BLOCK, False)
        dy = (x * c + y * d).to(kind)
        w += PLAIN * Q_RANK
        d_q = added_to_latent(d_q, dy, w, PAIRS, STEP, PAIR_BLOCK, Q_RANK, Q_BLOCK, WIDEN)
        dy = (y * c - x * d).to(kind)
        w += SECOND * Q_RANK
        d_q = added_to_latent(d_q, dy, w, PAIRS, STEP, PAIR_BLOCK, Q_RANK, Q_BLOCK, WIDEN)

        dy = load_dims(dk + from_k, there, PLAIN, PLAIN_BLOCK)
        w = kv_weight
        d_kv = added_to_latent(d_kv, dy, w, PLAIN, 1, PLAIN_BLOCK, KV_RANK, KV_BLOCK, WIDEN)
        x, y = load_pairs(dk + PLAIN + from_k, there, PAIRS, PAIR_BLOCK, False)
        k_x += x
        k_y += y
        dy = load_dims(dv + from_v, there, V_DIM, V_BLOCK)
        w += PLAIN * KV_RANK
        d_kv = added_to_latent(d_kv, dy, w, V_DIM, 1, V_BLOCK, KV_RANK, KV_BLOCK, WIDEN)
        dq += q_h
        dk += k_h
        dv += v_h
        q_weight += DIM * Q_RANK
        kv_weight += (PLAIN + V_DIM) * KV_RANK

    store_dims(dq_latent + t * Q_RANK, d_q, there, Q_RANK, Q_BLOCK)
    store_dims(dkv_latent + t * KV_RANK, d_kv, there, KV_RANK, KV_BLOCK)
    k_a, k_b = k_x * c + k_y * d, k_y * c - k_x * d
    store_pairs(dk_pos + t * (2 * PAIRS), k_a, k_b, there, PAIRS, PAIR_BLOCK, INTERLEAVED)
