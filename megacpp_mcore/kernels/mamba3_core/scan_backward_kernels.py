"""The Triton kernel of the backward pass of Mamba-3's scan; `scan.py` launches it.

Math, layouts and words are those of `scan_kernels.py`.
"""

import triton
import triton.language as tl

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
def mamba3_scan_backward(
    q, k, x, dy, adt, scale, gamma, D, starts, states, sums, throughs, final, dfinal,
    dx, both, dadt, dscale, dboth, dD, dinitial, S, CHUNKS, SEGMENT, SEGMENTS,
    x_s, x_b, x_h, dx_s, dx_b, dx_h,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, P_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr, CHUNK: tl.constexpr, ALIGN: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, CARRIED: tl.constexpr, FINAL: tl.constexpr,
    APPROXIMATE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dy: of y before the gate, (b, H, s, P). q, k: overwritten with the gradients of the rotated q
    and the unscaled k; a tile is its program's alone, which has loaded it long before. (b, H, s):
    both, of q k of one token; dadt; dscale; dboth, that plus gamma's. dD: (b, segments, H).
    FINAL: `final` and `dfinal` (b, H, P, N) are the state after the row and its gradient. CARRIED:
    that of the state before the row goes to `dinitial`, (b, H, P, N).

    The decay between two tokens is in q times its gradient of the later one and in k times its
    gradient of the earlier one: their difference, added up from the chunk's end, is that of A dt.
    Both are of the same rounded products, so that the differences cancel where they should.
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
    # Added before the loop: what the compiler keeps across it are spilled registers.
    x += (b.to(tl.int64) * x_b + h.to(tl.int64) * x_h) * ALIGN
    for step in tl.range(0, count, num_stages=STAGES):
        chunk = begin + count - 1 - step
        first = chunk * CHUNK
        inside = first + i < S
        to = head + first
        at = to * N + i[:, None] * N + n[None, :]
        ks = _tile(k + at, inside, n, N, N_BLOCK, WHOLE)
        qs = _tile(q + at, inside, n, N, N_BLOCK, WHOLE)
        at = x + first.to(tl.int64) * (x_s * ALIGN) + (i * (x_s * ALIGN))[:, None] + p[None, :]
        value = _tile(at, inside, p, P, P_BLOCK, WHOLE)
        at = dy + to * P + i[:, None] * P + p[None, :]
        d = _tile(at, inside, p, P, P_BLOCK, WHOLE)
        factor = _vector(scale + to + i, inside, WHOLE)
        own = _vector(gamma + to + i, inside, WHOLE)
        inverse = tl.where(factor > 0.0, 1.0 / tl.where(factor > 0.0, factor, 1.0), 0.0)
        upto, before, to_end, through, start = _decays(adt + to, starts, first, i, inside, S,
                                                       CHUNK, PACKED, WHOLE,
                                                       APPROXIMATE)  # fmt: skip
        upper = dstate.to(value.dtype)
        # Rows are the earlier tokens, columns the later ones.
        follows = i[None, :] > i[:, None]
        if PACKED:
            follows = follows & (start[:, None] == start[None, :])
        fade = tl.where(follows, _exp2(upto[None, :] - upto[:, None], APPROXIMATE), 0.0)
        same = i[None, :] == i[:, None]

        scores = tl.dot(ks, tl.trans(qs))
        qk = tl.sum(tl.where(same, scores, 0.0), 1) * inverse
        diagonal = tl.where(same, (own * qk + skip)[:, None], 0.0)
        scores = (scores * fade + diagonal).to(value.dtype)
        found = tl.dot(ks, tl.trans(upper)) * to_end[:, None]
        found = tl.dot(scores, d, found)
        at = _head(dx, dx_s, dx_b, dx_h, first, i, b, h, p, ALIGN)
        _put(at, found, inside, p, P, P_BLOCK, WHOLE)

        products = tl.dot(value, tl.trans(d))
        mix = tl.sum(tl.where(same, products, 0.0), 1)
        tl.store(both + to + i, mix * own, mask=inside)
        skipped += tl.sum(mix, 0)
        products = (products * fade).to(value.dtype)
        found = tl.dot(value, upper) * to_end[:, None]
        found = tl.dot(products, qs, found)
        ddecay = -tl.sum(ks.to(tl.float32) * found, 1)
        tl.store(dscale + to + i, -ddecay * inverse, mask=inside)
        tl.store(dboth + to + i, mix * qk - ddecay * inverse, mask=inside)
        found = found * factor[:, None]
        at = to * N + i[:, None] * N + n[None, :]
        _put(k + at, found, inside, n, N, N_BLOCK, WHOLE)
        # Loaded no earlier, and qs weighted no earlier: at N 128 registers are what is scarce.
        kept = states + _state_at(h, b, chunk, p, n, H, P, N, CHUNKS)
        state = tl.load(kept, mask=within, other=0.0)
        found = tl.dot(d, state) * before[:, None]
        found = tl.dot(tl.trans(products), ks, found)
        ddecay += tl.sum(qs.to(tl.float32) * found, 1)
        _put(q + at, found, inside, n, N, N_BLOCK, WHOLE)
        if PACKED:
            with_it = (i[None, :] >= i[:, None]) & (start[:, None] == start[None, :])
            ddecay = tl.sum(tl.where(with_it, ddecay[None, :], 0.0), 1)
            last = tl.max(tl.where(inside, start, 0), 0)
            ddecay += tl.where(start == last, later, 0.0)
        else:
            ddecay = tl.cumsum(ddecay, 0, reverse=True) + later
        tl.store(dadt + to + i, ddecay, mask=inside)
        weighted = (qs * before[:, None]).to(value.dtype)
        dstate = tl.dot(tl.trans(d), weighted, dstate * through)
        later = tl.sum(tl.sum(state.to(tl.float32) * dstate, 1), 0)
    tl.store(dD + (b * SEGMENTS + segment) * H + h, skipped)
    if CARRIED and segment == 0:
        tl.store(dinitial + _state_at(h, b, 0, p, n, H, P, N, 1), dstate, mask=within)
