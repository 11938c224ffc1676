"""The two Triton kernels of MLA's RoPE; `triton.py` launches them.

A program has one token and loops over blocks of heads: cos and sin are read once for all heads, and
the gradient of k's shared rotary part is summed over them in float32, in a fixed order. A head's
dims are three tiles: `plain`, the rotated pairs, and `rest`, the rotary part's unrotated dims.
Sizes that are not powers of two are masked. Strides are in elements, of tokens s, b and heads h.
"""

import triton
import triton.language as tl

from megacpp_mcore.kernels.rotary_triton import copy_dims, load_pairs, position, store_pairs


@triton.jit
def _angle(cos, sin, s, bounds, count, PAIRS, PAIR_BLOCK: tl.constexpr, PACKED: tl.constexpr,
           BOUNDS_BLOCK: tl.constexpr):  # fmt: skip
    """cos and sin of token s, (1, PAIR_BLOCK) in float32."""
    row = s
    if PACKED:
        row = position(s, bounds, count, BOUNDS_BLOCK)
    pair = tl.arange(0, PAIR_BLOCK)
    at = row.to(tl.int64) * PAIRS + pair
    c = tl.load(cos + at, mask=pair < PAIRS, other=0.0).to(tl.float32)
    d = tl.load(sin + at, mask=pair < PAIRS, other=0.0).to(tl.float32)
    return c[None, :], d[None, :]


@triton.jit
def mla_rope_forward(
    q, kv, k_pos, cos, sin, bounds, q_out, k_out, v_out, batch, count, HEADS,
    q_s, q_b, q_h, kv_s, kv_b, kv_h, pos_s, pos_b,
    qo_s, qo_b, qo_h, ko_s, ko_b, ko_h, vo_s, vo_b, vo_h,
    PLAIN: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, V_DIM: tl.constexpr,
    PLAIN_BLOCK: tl.constexpr, PAIR_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
    IN_PLACE: tl.constexpr, PACKED: tl.constexpr, BOUNDS_BLOCK: tl.constexpr,
):  # fmt: skip
    """q, k and v of one token from q, kv and k_pos. IN_PLACE: q_out is q."""
    s, b = (tl.program_id(0) // batch).to(tl.int64), (tl.program_id(0) % batch).to(tl.int64)
    c, d = _angle(cos, sin, s, bounds, count, PAIRS, PAIR_BLOCK, PACKED, BOUNDS_BLOCK)
    q += s * q_s + b * q_b
    kv += s * kv_s + b * kv_b
    k_pos += s * pos_s + b * pos_b
    q_out += s * qo_s + b * qo_b
    k_out += s * ko_s + b * ko_b
    v_out += s * vo_s + b * vo_b

    one = tl.full((1, 1), 0, tl.int32)
    k_x, k_y = load_pairs(k_pos + one, one == 0, PAIRS, PAIR_BLOCK, INTERLEAVED)
    k_a, k_b = k_x * c - k_y * d, k_y * c + k_x * d
    if REST > 0:
        rest = tl.arange(0, REST_BLOCK)[None, :]
        k_rest = tl.load(k_pos + 2 * PAIRS + rest, mask=rest < REST, other=0.0)

    for first in range(0, HEADS, HEAD_BLOCK):
        h = first + tl.arange(0, HEAD_BLOCK)[:, None]
        heads, far = h < HEADS, h.to(tl.int64)  # what is read may lie in any strides
        from_q, from_kv = q + far * q_h, kv + far * kv_h
        to_q, to_k = q_out + h * qo_h, k_out + h * ko_h
        if not IN_PLACE:
            copy_dims(from_q, to_q, heads, PLAIN, PLAIN_BLOCK)
        copy_dims(from_kv, to_k, heads, PLAIN, PLAIN_BLOCK)
        copy_dims(from_kv + PLAIN, v_out + h * vo_h, heads, V_DIM, V_BLOCK)
        x, y = load_pairs(from_q + PLAIN, heads, PAIRS, PAIR_BLOCK, INTERLEAVED)
        if IN_PLACE:
            tl.debug_barrier()  # a pair's place is another pair's target
        store_pairs(to_q + PLAIN, x * c - y * d, y * c + x * d, heads, PAIRS, PAIR_BLOCK, False)
        all_a, all_b = tl.broadcast_to(k_a, x.shape), tl.broadcast_to(k_b, x.shape)
        store_pairs(to_k + PLAIN, all_a, all_b, heads, PAIRS, PAIR_BLOCK, False)
        if REST > 0:
            after = PLAIN + 2 * PAIRS
            if not IN_PLACE:
                copy_dims(from_q + after, to_q + after, heads, REST, REST_BLOCK)
            tl.store(to_k + after + rest, tl.broadcast_to(k_rest, (HEAD_BLOCK, REST_BLOCK)),
                     mask=heads & (rest < REST))  # fmt: skip


@triton.jit
def mla_rope_backward(
    dq, dk, dv, cos, sin, bounds, dq_in, dkv, dk_pos, batch, count, HEADS,
    q_s, q_b, q_h, k_s, k_b, k_h, v_s, v_b, v_h,
    qi_s, qi_b, qi_h, kv_s, kv_b, kv_h, pos_s, pos_b,
    PLAIN: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, V_DIM: tl.constexpr,
    PLAIN_BLOCK: tl.constexpr, PAIR_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
    IN_PLACE: tl.constexpr, PACKED: tl.constexpr, BOUNDS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of one token's q, kv and k_pos: inverse rotations, k_pos's summed over heads.
    IN_PLACE: dq_in is dq."""
    s, b = (tl.program_id(0) // batch).to(tl.int64), (tl.program_id(0) % batch).to(tl.int64)
    c, d = _angle(cos, sin, s, bounds, count, PAIRS, PAIR_BLOCK, PACKED, BOUNDS_BLOCK)
    dq += s * q_s + b * q_b
    dk += s * k_s + b * k_b
    dv += s * v_s + b * v_b
    dq_in += s * qi_s + b * qi_b
    dkv += s * kv_s + b * kv_b
    dk_pos += s * pos_s + b * pos_b

    k_x = tl.zeros((HEAD_BLOCK, PAIR_BLOCK), tl.float32)
    k_y = tl.zeros((HEAD_BLOCK, PAIR_BLOCK), tl.float32)
    if REST > 0:
        rest = tl.arange(0, REST_BLOCK)[None, :]
        k_rest = tl.zeros((HEAD_BLOCK, REST_BLOCK), tl.float32)

    for first in range(0, HEADS, HEAD_BLOCK):
        h = first + tl.arange(0, HEAD_BLOCK)[:, None]
        heads, far = h < HEADS, h.to(tl.int64)
        from_q, from_k, to_q = dq + far * q_h, dk + far * k_h, dq_in + h * qi_h
        if not IN_PLACE:
            copy_dims(from_q, to_q, heads, PLAIN, PLAIN_BLOCK)
        copy_dims(from_k, dkv + h * kv_h, heads, PLAIN, PLAIN_BLOCK)
        copy_dims(dv + far * v_h, dkv + h * kv_h + PLAIN, heads, V_DIM, V_BLOCK)
        x, y = load_pairs(from_q + PLAIN, heads, PAIRS, PAIR_BLOCK, False)
        if IN_PLACE:
            tl.debug_barrier()
        store_pairs(
            to_q + PLAIN, x * c + y * d, y * c - x * d, heads, PAIRS, PAIR_BLOCK, INTERLEAVED
        )
        x, y = load_pairs(from_k + PLAIN, heads, PAIRS, PAIR_BLOCK, False)
        k_x += x
        k_y += y
        if REST > 0:
            after = PLAIN + 2 * PAIRS
            if not IN_PLACE:
                copy_dims(from_q + after, to_q + after, heads, REST, REST_BLOCK)
            mask = heads & (rest < REST)
            k_rest += tl.load(from_k + after + rest, mask=mask, other=0.0).to(tl.float32)

    x_sum, y_sum = tl.sum(k_x, 0)[None, :], tl.sum(k_y, 0)[None, :]
    k_a, k_b = x_sum * c + y_sum * d, y_sum * c - x_sum * d
    one = tl.full((1, 1), 0, tl.int32)
    store_pairs(dk_pos + one, k_a, k_b, one == 0, PAIRS, PAIR_BLOCK, INTERLEAVED)
    if REST > 0:
        total = tl.sum(k_rest, 0)[None, :]
        tl.store(dk_pos + 2 * PAIRS + rest, total.to(dk_pos.dtype.element_ty), mask=rest < REST)
