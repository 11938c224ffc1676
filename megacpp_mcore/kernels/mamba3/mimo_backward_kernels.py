"""The Triton kernels of the backward pass of a Mamba-3 MIMO scan; `mimo_ops.py` launches them.

Math, layouts and words are those of `mimo_kernels.py`.
"""

import triton
import triton.language as tl

from megacpp_mcore.kernels.elementwise_triton import sigmoid
from megacpp_mcore.kernels.mamba3.mimo_kernels import _of_rank, _rows_of
from megacpp_mcore.kernels.mamba3_core.scan_kernels import (
    _beyond,
    _decays,
    _exp2,
    _head,
    _put,
    _state_at,
    _tile,
    _vector,
)


@triton.jit(do_not_specialize=["CHUNKS", "SEGMENT", "SEGMENTS"])
def mimo_backward(
    q, k, x, d, adt, scale, gamma, D, mimo_v, starts, states, sums, throughs, final, dfinal,
    dq, dk, dadt, dscale, dgamma, dD, dinitial, S, CHUNKS, SEGMENT, SEGMENTS,
    x_s, x_b, x_h,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, P_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr, CHUNK: tl.constexpr, RANK: tl.constexpr, ALIGN: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, CARRIED: tl.constexpr, FINAL: tl.constexpr,
    APPROXIMATE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """d: of Y, (b, H, s R, P), overwritten with that of the values; a tile is its program's alone.
    dq, dk: like q and k. dadt, dscale, dgamma: (b, H, s R), the first's of a token is its first
    row's, the others' the sum over its rows. dD (b, segments, H): sums over a segment. FINAL:
    `final` and `dfinal` (b, H, P, N) are the state after the row and its gradient. CARRIED: that of
    the one before goes to `dinitial`.

    Row sums and column sums of one tile make dadt, so that they cancel where they should. Sums over
    a token's rows are left to `mimo_values_backward`: here they would be spilled registers, twice.
    """
    h, segment, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, p, i = tl.arange(0, N_BLOCK), tl.arange(0, P_BLOCK), tl.arange(0, CHUNK)
    skip = tl.load(D + h)
    head = (b * H + h).to(tl.int64) * S
    within = (p < P)[:, None] & (n < N)[None, :]
    dstate = _beyond(sums, throughs, dfinal, h, b, segment, within, p, n, SEGMENTS, H, P, N,
                     P_BLOCK, N_BLOCK, True, FINAL)  # fmt: skip
    begin = segment * SEGMENT
    count = min(SEGMENT, CHUNKS - begin)
    end = _state_at(h, b, begin + count, p, n, H, P, N, CHUNKS)
    after = tl.load(states + end, mask=within & (begin + count < CHUNKS), other=0.0)
    later = tl.sum(tl.sum(after.to(tl.float32) * dstate, 1), 0)
    if FINAL:
        row_end = final + _state_at(h, b, 0, p, n, H, P, N, 1)
        last = tl.load(row_end, mask=within & (segment == SEGMENTS - 1), other=0.0)
        later += tl.sum(tl.sum(last * dstate, 1), 0)
    skipped = 0.0
    for step in tl.range(0, count, num_stages=STAGES):
        chunk = begin + count - 1 - step
        first = chunk * CHUNK
        inside = first + i < S
        to = head + first
        at = to * N + i[:, None] * N + n[None, :]
        ks = _tile(k + at, inside, n, N, N_BLOCK, WHOLE)
        qs = _tile(q + at, inside, n, N, N_BLOCK, WHOLE)
        value = _rows_of(x, x_s, x_b, x_h, first, i, b, h, p, inside, RANK, P, P_BLOCK, ALIGN,
                         WHOLE)  # fmt: skip
        value = (value * _of_rank(mimo_v, h, i, p, RANK, P)).to(ks.dtype)
        at_d = d + to * P + i[:, None] * P + p[None, :]
        of_y = _tile(at_d, inside, p, P, P_BLOCK, WHOLE)
        weight = _vector(scale + to // RANK + i // RANK, inside, WHOLE)
        own = _vector(gamma + to // RANK + i // RANK, inside, WHOLE)
        upto, before, to_end, through, start = _decays(adt + to // RANK, starts, first, i, inside,
                                                       S, CHUNK, PACKED, WHOLE, APPROXIMATE,
                                                       RANK)  # fmt: skip
        upper = dstate.to(value.dtype)
        # Rows are the earlier tokens', columns the later ones'.
        follows = (i // RANK)[None, :] > (i // RANK)[:, None]
        if PACKED:
            follows = follows & (start[:, None] == start[None, :])
        same = (i // RANK)[None, :] == (i // RANK)[:, None]
        fade = tl.where(follows, _exp2(upto[None, :] - upto[:, None], APPROXIMATE), 0.0)

        scores = tl.dot(ks, tl.trans(qs))
        products = tl.dot(value, tl.trans(of_y))
        diagonal = i[None, :] == i[:, None]
        skipped += tl.sum(tl.sum(tl.where(diagonal, products, 0.0), 1), 0)
        both = scores * products
        tl.store(dgamma + to + i, tl.sum(tl.where(same, both, 0.0), 1), mask=inside)
        both = both * fade
        earlier = tl.sum(both, 1)
        ddecay = tl.sum(both * weight[:, None], 0)
        fade = tl.where(same, own[:, None], fade * weight[:, None])
        scores = (scores * fade + tl.where(diagonal, skip, 0.0)).to(value.dtype)
        products = (products * fade).to(value.dtype)

        found = tl.dot(ks, tl.trans(upper)) * to_end[:, None]
        earlier += tl.sum(value.to(tl.float32) * found, 1)
        tl.store(dscale + to + i, earlier, mask=inside)
        found = tl.dot(scores, of_y, found * weight[:, None])
        _put(at_d, found, inside, p, P, P_BLOCK, WHOLE)

        found = tl.dot(value, upper) * (to_end * weight)[:, None]
        found = tl.dot(products, qs, found)
        _put(dk + at, found, inside, n, N, N_BLOCK, WHOLE)
        kept = states + _state_at(h, b, chunk, p, n, H, P, N, CHUNKS)
        state = tl.load(kept, mask=within, other=0.0)
        found = tl.dot(of_y, state) * before[:, None]
        ddecay += tl.sum(qs.to(tl.float32) * found, 1) - weight * earlier
        found = tl.dot(tl.trans(products), ks, found)
        _put(dq + at, found, inside, n, N, N_BLOCK, WHOLE)
        if PACKED:
            with_it = (i[None, :] >= i[:, None]) & (start[:, None] == start[None, :])
            ddecay = tl.sum(tl.where(with_it, ddecay[None, :], 0.0), 1)
            last_start = tl.max(tl.where(inside, start, 0), 0)
            ddecay += tl.where(start == last_start, later, 0.0)
        else:
            ddecay = tl.cumsum(ddecay, 0, reverse=True) + later
        tl.store(dadt + to + i, ddecay, mask=inside)
        weighted = (qs * before[:, None]).to(value.dtype)
        dstate = tl.dot(tl.trans(of_y), weighted, dstate * through)
        later = tl.sum(tl.sum(state.to(tl.float32) * dstate, 1), 0)
    tl.store(dD + (b * SEGMENTS + segment) * H + h, skipped)
    if CARRIED and segment == 0:
        tl.store(dinitial + _state_at(h, b, 0, p, n, H, P, N, 1), dstate, mask=within)


@triton.jit
def mimo_gate_backward(
    z, dy, inner, mimo_z, mimo_out, d, dz, sums, TOKENS, BLOCKS, z_s, z_b, z_h, dy_s, dy_b, dy_h,
    H: tl.constexpr, P: tl.constexpr, P_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    RANK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Y's gradient d, like inner; dz (b, s, H, P); sums (b, blocks, 2, H, R, P): over a block's
    tokens, of mimo_z's gradient and of mimo_out's."""
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t, p = tl.arange(0, BLOCK), tl.arange(0, P_BLOCK)
    first = block * BLOCK
    inside = first + t < TOKENS
    mask = inside[:, None] & (p < P)[None, :]
    at = _head(z, z_s, z_b, z_h, first, t, b, h, p, ALIGN)
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at = _head(dy, dy_s, dy_b, dy_h, first, t, b, h, p, ALIGN)
    of_y = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    of_z = tl.zeros((BLOCK, P_BLOCK), tl.float32)
    row = ((b * H + h).to(tl.int64) * TOKENS + first + t) * RANK
    part = ((b * BLOCKS + block).to(tl.int64) * 2 * H + h) * RANK
    for r in tl.static_range(RANK):
        on_z = tl.load(mimo_z + (h * RANK + r) * P + p, mask=p < P, other=0.0)[None, :]
        on_y = tl.load(mimo_out + (h * RANK + r) * P + p, mask=p < P, other=0.0)[None, :]
        at = (row + r)[:, None] * P + p[None, :]
        out = tl.load(inner + at, mask=mask, other=0.0).to(tl.float32)
        share = sigmoid(gate * on_z)
        silu = gate * on_z * share
        tl.store(d + at, of_y * on_y * silu, mask=mask)
        dgated = of_y * on_y * out * share * (1 + gate * on_z * (1 - share))
        of_z += dgated * on_z
        tl.store(sums + (part + r) * P + p, tl.sum(dgated * gate, 0), mask=p < P)
        tl.store(sums + (part + H * RANK + r) * P + p, tl.sum(of_y * out * silu, 0), mask=p < P)
    at = ((b.to(tl.int64) * TOKENS + first + t) * H + h)[:, None] * P + p[None, :]
    tl.store(dz + at, of_z, mask=mask)


@triton.jit
def mimo_values_backward(
    x, dvalues, mimo_v, dx, sums, TOKENS, BLOCKS, x_s, x_b, x_h,
    H: tl.constexpr, P: tl.constexpr, P_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    RANK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """The gradients dx (b, s, H, P) and, as sums over a block's tokens, of mimo_v (b, blocks, H, R,
    P), from the values' (b, H, s R, P)."""
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t, p = tl.arange(0, BLOCK), tl.arange(0, P_BLOCK)
    first = block * BLOCK
    mask = (first + t < TOKENS)[:, None] & (p < P)[None, :]
    at = _head(x, x_s, x_b, x_h, first, t, b, h, p, ALIGN)
    token = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    found = tl.zeros((BLOCK, P_BLOCK), tl.float32)
    row = ((b * H + h).to(tl.int64) * TOKENS + first + t) * RANK
    part = ((b * BLOCKS + block).to(tl.int64) * H + h) * RANK
    for r in tl.static_range(RANK):
        on_x = tl.load(mimo_v + (h * RANK + r) * P + p, mask=p < P, other=0.0)[None, :]
        at = (row + r)[:, None] * P + p[None, :]
        of_value = tl.load(dvalues + at, mask=mask, other=0.0).to(tl.float32)
        found += of_value * on_x
        tl.store(sums + (part + r) * P + p, tl.sum(of_value * token, 0), mask=p < P)
    at = ((b.to(tl.int64) * TOKENS + first + t) * H + h)[:, None] * P + p[None, :]
    tl.store(dx + at, found, mask=mask)
