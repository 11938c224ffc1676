"""The Triton kernel of `rope_qk`, forward and backward; `triton.py` launches it.

A program has one token and loops over blocks of heads, so sine and cosine are computed once for all
heads. Query h is row (h / RATIO, h % RATIO) of its source or target, as in Megatron's projection.
Strides are in elements, of tokens s, b, groups g and queries of a group r.
"""

import triton
import triton.language as tl

from megacpp_mcore.kernels.rotary_triton import copy_dims, load_pairs, position, store_pairs


@triton.jit
def _rotate_rows(
    source, target, heads, c, d, PAIRS: tl.constexpr, REST: tl.constexpr,
    PAIR_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    x, y = load_pairs(source, heads, PAIRS, PAIR_BLOCK, INTERLEAVED)
    store_pairs(target, x * c - y * d, y * c + x * d, heads, PAIRS, PAIR_BLOCK, INTERLEAVED)
    if REST > 0:
        copy_dims(source + 2 * PAIRS, target + 2 * PAIRS, heads, REST, REST_BLOCK)


@triton.jit
def rope_qk_rotate(
    q, k, v, q_to, k_to, v_to, angles, bounds, batch, count, positions, mscale,
    q_s, q_b, q_g, q_r, k_s, k_b, k_g, v_s, v_b, v_g,
    qt_s, qt_b, qt_g, qt_r, kt_s, kt_b, kt_g, vt_s, vt_b, vt_g, angle_s, angle_i,
    HEADS: tl.constexpr, RATIO: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    PAIR_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, GROUP_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr, HAS_V: tl.constexpr, PACKED: tl.constexpr, BOUNDS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate one token's queries and keys, back in the backward pass, and copy its values."""
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch, token % batch
    row = s
    if PACKED:
        row = position(s, bounds, count, BOUNDS_BLOCK)
    pair = tl.arange(0, PAIR_BLOCK)[None, :]
    known = row < positions
    at = angles + row * angle_s + pair * angle_i
    angle = tl.load(at, mask=(pair < PAIRS) & known, other=0.0).to(tl.float32)
    scale = tl.where(known, mscale, 1.0)
    c, d = tl.cos(angle) * scale, tl.sin(angle) * scale
    if BACKWARD:
        d = -d

    q += s * q_s + b * q_b
    k += s * k_s + b * k_b
    q_to += s * qt_s + b * qt_b
    k_to += s * kt_s + b * kt_b
    for first in range(0, HEADS, HEAD_BLOCK):
        h = first + tl.arange(0, HEAD_BLOCK)[:, None]
        g, r = (h // RATIO).to(tl.int64), (h % RATIO).to(tl.int64)
        source, target = q + g * q_g + r * q_r, q_to + g * qt_g + r * qt_r
        _rotate_rows(source, target, h < HEADS, c, d, PAIRS, REST, PAIR_BLOCK, REST_BLOCK,
                   INTERLEAVED)  # fmt: skip
    GROUPS: tl.constexpr = HEADS // RATIO
    for first in range(0, GROUPS, GROUP_BLOCK):
        g = (first + tl.arange(0, GROUP_BLOCK)[:, None]).to(tl.int64)
        mask = g < GROUPS
        _rotate_rows(k + g * k_g, k_to + g * kt_g, mask, c, d, PAIRS, REST, PAIR_BLOCK, REST_BLOCK,
                   INTERLEAVED)  # fmt: skip
        if HAS_V:
            v_from = v + s * v_s + b * v_b + g * v_g
            copy_dims(v_from, v_to + s * vt_s + b * vt_b + g * vt_g, mask, 2 * PAIRS + REST,
                      DIM_BLOCK)  # fmt: skip
