"""The Triton kernels of the backward pass around Mamba-3's scan; `around.py` launches them.

Layouts and words are those of `triton_kernels.py`.
"""

import triton
import triton.language as tl

from megacpp_mcore.kernels.elementwise_triton import (
    cos_sin,
    decay,
    decay_derivative,
    sigmoid,
    tanh,
    tanh_derivative,
)
from megacpp_mcore.kernels.mamba3_core.triton_kernels import (
    PI,
    _add_flagged,
    _normed,
    _pair_vector,
    _pairs,
    _rows,
    _speed,
    _starts,
    _store_pairs,
)


@triton.jit
def _add_5(a, b, c, d, e, f, g, h, i, j):
    return a + f, b + g, c + h, d + i, e + j


@triton.jit
def mamba3_gate_backward(
    proj, dy, y, dproj, S, proj_s, proj_b, dy_s, dy_b, dproj_s, dproj_b,
    H: tl.constexpr, P: tl.constexpr, P_BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """The gradients of y * silu(z), for a head of a chunk: dz, and y's where y is, (b, H, s, P)."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    h, b = tl.program_id(1), tl.program_id(2)
    p = tl.arange(0, P_BLOCK)
    mask = (token < S)[:, None] & (p < P)[None, :]
    column = h * P + p[None, :]
    at = _rows(proj, proj_s, proj_b, token, b, ALIGN)[:, None] + column
    z = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at = _rows(dy, dy_s, dy_b, token, b, ALIGN)[:, None] + column
    d = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    inner = y + ((b * H + h).to(tl.int64) * S + token[:, None]) * P + p[None, :]
    out = tl.load(inner, mask=mask, other=0.0).to(tl.float32)
    gate = sigmoid(z)
    tl.store(inner, d * z * gate, mask=mask)
    at = _rows(dproj, dproj_s, dproj_b, token, b, ALIGN)[:, None] + column
    tl.store(at, d * out * gate * (1 + z * (1 - gate)), mask=mask)


@triton.jit
def _norm_backward(
    source, to, weight, partial, n, mask, eps, N: tl.constexpr, ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    w0, w1 = _pair_vector(weight, N, PAIRS)
    _, _, x0, x1, scale = _normed(source, mask, w0, w1, eps, N, ROWS, PAIRS)
    d0, d1 = _pairs(tl.load(to, mask=mask, other=0.0).to(tl.float32), ROWS, PAIRS)
    sums = tl.join(tl.sum(d0 * x0, 0), tl.sum(d1 * x1, 0))
    tl.store(partial + n, tl.reshape(sums, (2 * PAIRS,)), mask=n < N)
    d0, d1 = d0 * w0[None, :], d1 * w1[None, :]
    along = tl.sum(d0 * x0 + d1 * x1, 1)[:, None] / N
    _store_pairs(to, (d0 - x0 * along) * scale[:, None], (d1 - x1 * along) * scale[:, None], mask,
                 ROWS, PAIRS)  # fmt: skip


@triton.jit
def mamba3_norms_backward(
    proj, b_weight, c_weight, dproj, partial, S, SPANS, proj_s, proj_b, dproj_s, dproj_b, eps,
    B_AT: tl.constexpr, C_AT: tl.constexpr, G: tl.constexpr, N: tl.constexpr, PAIRS: tl.constexpr,
    SPAN: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """The gradients of the normed B and C of one group of a span -> of B and C, where they stand in
    dproj; partial (b, spans, 2, G, N): the sums over the span's tokens for b_weight and c_weight.
    """
    span, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = span * SPAN + tl.arange(0, SPAN)
    n = tl.arange(0, 2 * PAIRS)
    mask = (token < S)[:, None] & (n < N)[None, :]
    at = _rows(proj, proj_s, proj_b, token, b, ALIGN)[:, None] + g * N + n[None, :]
    to = _rows(dproj, dproj_s, dproj_b, token, b, ALIGN)[:, None] + g * N + n[None, :]
    partial += ((b * SPANS + span) * 2 * G + g) * N
    _norm_backward(at + B_AT, to + B_AT, b_weight, partial, n, mask, eps, N, SPAN, PAIRS)
    partial += G * N
    _norm_backward(at + C_AT, to + C_AT, c_weight, partial, n, mask, eps, N, SPAN, PAIRS)


@triton.jit
def _head_pairs(x, HEADS: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr):
    return tl.split(tl.reshape(x, (HEADS, TOKENS, PAIRS, 2)))


@triton.jit
def _bias_pairs(at, mask, HEADS: tl.constexpr, PAIRS: tl.constexpr):
    x0, x1 = _pairs(tl.load(at, mask=mask, other=0.0), HEADS, PAIRS)
    return x0[:, None, :], x1[:, None, :]


@triton.jit
def mamba3_rotation_backward(
    proj, b_rows, c_rows, b_bias, c_bias, starts, dt, theta, dq, dk, both,
    dproj, ddt, dspeed, sums, resets, partial, S, SPANS, proj_s, proj_b, dproj_s, dproj_b,
    B_AT: tl.constexpr, C_AT: tl.constexpr, ANGLE_AT: tl.constexpr, H: tl.constexpr,
    G: tl.constexpr, N: tl.constexpr, A: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr,
    SPAN: tl.constexpr, TOKENS: tl.constexpr, ALIGN: tl.constexpr, PACKED: tl.constexpr,
    APPROXIMATE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Back through rotation and biases: the heads of a group, all at once, over a span of tokens,
    TOKENS at a time from its end.

    In: dq, dk (b, H, s, N), of the rotated q and k; both (b, H, s), of q k before rotation; b_rows,
    c_rows: of `rotate`; theta as int16, two an angle. Out: the gradients of the normed B and C,
    where dproj has those of B and C; ddt (b, H, s) and dspeed (b, G, s, A), of dt and of
    pi tanh(angle), as far as the span's own angles go; sums (b, spans, H, A), the angles' gradients
    of the document that begins before the span or with it; partial (b, spans, 2, H, N): the sums
    over the span's tokens for b_bias and c_bias.

    Of a (head, token, pair) tile a thread has all tokens: sums over them stay in its registers,
    and those over heads and pairs go over the lanes of few warps.
    """
    span, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, pair, own = tl.arange(0, 2 * PAIRS), tl.arange(0, PAIRS), tl.arange(0, HEADS)
    h = g * (H // G) + own
    mine = own < H // G
    of_head = h[:, None] * N + n[None, :]
    within = mine[:, None] & (n < N)[None, :]
    turning = (pair < A)[None, :]
    kb0, kb1 = _bias_pairs(b_bias + of_head, within, HEADS, PAIRS)
    qb0, qb1 = _bias_pairs(c_bias + of_head, within, HEADS, PAIRS)
    heads = (b * H + h).to(tl.int64) * S
    zero = tl.zeros((HEADS, PAIRS), tl.float32)
    all_k0, all_k1, all_q0, all_q1, later = zero, zero, zero, zero, zero
    reset = 0
    for step in tl.range(0, SPAN // TOKENS, num_stages=STAGES):
        token = (span + 1) * SPAN - (step + 1) * TOKENS + tl.arange(0, TOKENS)
        inside = token < S
        mask = inside[:, None] & (n < N)[None, :]
        at = ((b * G + g).to(tl.int64) * S + token[:, None]) * N + n[None, :]
        kn0, kn1 = _pairs(tl.load(b_rows + at, mask=mask, other=0.0), TOKENS, PAIRS)
        qn0, qn1 = _pairs(tl.load(c_rows + at, mask=mask, other=0.0), TOKENS, PAIRS)
        rows = _rows(proj, proj_s, proj_b, token, b, ALIGN)
        speed = _speed(rows, inside, pair, ANGLE_AT, A)
        vector = heads[:, None] + token[None, :]
        some = mine[:, None] & inside[None, :]
        at = vector[:, :, None] * N + n[None, None, :]
        all_of = some[:, :, None] & (n < N)[None, None, :]
        dq0, dq1 = _head_pairs(tl.load(dq + at, mask=all_of, other=0.0), HEADS, TOKENS, PAIRS)
        dk0, dk1 = _head_pairs(tl.load(dk + at, mask=all_of, other=0.0), HEADS, TOKENS, PAIRS)
        at = vector[:, :, None] * (2 * A) + n[None, None, :]
        all_of = some[:, :, None] & (n < 2 * A)[None, None, :]
        low, high = _head_pairs(tl.load(theta + at, mask=all_of, other=0), HEADS, TOKENS, PAIRS)
        bits = (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)
        mix = tl.load(both + vector, mask=some, other=0.0)[:, :, None]
        passed = tl.load(dt + vector, mask=some, other=0.0)[:, :, None]
        c, s = cos_sin(bits.to(tl.float32, bitcast=True), APPROXIMATE)
        dq0, dq1, dk0, dk1 = (dq0.to(tl.float32), dq1.to(tl.float32), dk0.to(tl.float32),
                              dk1.to(tl.float32))  # fmt: skip

        # The gradients of the rows before rotation; the angle's is of them and the rows as well.
        dq0, dq1 = dq0 * c + dq1 * s, dq1 * c - dq0 * s
        dk0, dk1 = dk0 * c + dk1 * s, dk1 * c - dk0 * s
        q0, q1 = qn0[None, :, :] + qb0, qn1[None, :, :] + qb1
        k0, k1 = kn0[None, :, :] + kb0, kn1[None, :, :] + kb1
        dangle = dq1 * q0 - dq0 * q1 + dk1 * k0 - dk0 * k1
        dangle = tl.where(turning[None, :, :] & some[:, :, None], dangle, 0.0)
        dq0, dq1, dk0, dk1 = dq0 + mix * k0, dq1 + mix * k1, dk0 + mix * q0, dk1 + mix * q1
        all_k0 += tl.sum(dk0, 1)
        all_k1 += tl.sum(dk1, 1)
        all_q0 += tl.sum(dq0, 1)
        all_q1 += tl.sum(dq1, 1)

        # A token's angle rotates all later ones of its document.
        if PACKED:
            start = _starts(starts, token, S)
            ends = (_starts(starts, token + 1, S) != start).to(tl.int32)
            reset = tl.maximum(reset, tl.max(tl.where(inside, ends, 0), 0))
            flags = tl.broadcast_to(ends[None, :, None], dangle.shape)
            flags, dangle = tl.associative_scan((flags, dangle), 1, _add_flagged, reverse=True)
            dangle += tl.where(flags > 0, 0.0, later[:, None, :])
        elif TOKENS > 1:
            dangle = tl.cumsum(dangle, 1, reverse=True) + later[:, None, :]
        else:
            dangle += later[:, None, :]
        first = (tl.arange(0, TOKENS) == 0)[None, :, None]
        later = tl.sum(tl.where(first, dangle, 0.0), 1)
        tl.store(ddt + vector, tl.sum(speed[None, :, :] * dangle, 2), mask=some)

        # Sums of several tiles at once share what they cost.
        dk0, dk1, dq0, dq1, dw = tl.reduce((dk0, dk1, dq0, dq1, passed * dangle), 0, _add_5)
        at = ((b * G + g).to(tl.int64) * S + token[:, None]) * A + pair[None, :]
        tl.store(dspeed + at, dw, mask=inside[:, None] & turning)
        to = _rows(dproj, dproj_s, dproj_b, token, b, ALIGN)[:, None] + g * N + n[None, :]
        _store_pairs(to + B_AT, dk0, dk1, mask, TOKENS, PAIRS)
        _store_pairs(to + C_AT, dq0, dq1, mask, TOKENS, PAIRS)

    if PACKED and g == 0:
        tl.store(resets + span, reset)
    partial += ((b * SPANS + span) * 2 * H).to(tl.int64) * N
    _store_pairs(partial + of_head, all_k0, all_k1, within, HEADS, PAIRS)
    _store_pairs(partial + H * N + of_head, all_q0, all_q1, within, HEADS, PAIRS)
    at = sums + ((b * SPANS + span) * H + h[:, None]) * A + pair[None, :]
    tl.store(at, later, mask=mine[:, None] & turning)


@triton.jit
def mamba3_steps_backward(
    proj, dt_bias, starts, dt, dadt, dscale, dboth, dahead, ddt, dspeed, after, dproj, partial,
    S, CHUNKS, SPANS, proj_s, proj_b, dproj_s, dproj_b, floor,
    DT_AT: tl.constexpr, A_AT: tl.constexpr, TRAP_AT: tl.constexpr, ANGLE_AT: tl.constexpr,
    END: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr, G: tl.constexpr, A: tl.constexpr,
    A_BLOCK: tl.constexpr, H_BLOCK: tl.constexpr, PAD_BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    SPAN: tl.constexpr, ALIGN: tl.constexpr, SOFTPLUS: tl.constexpr, PACKED: tl.constexpr,
    CARRIED: tl.constexpr,
):  # fmt: skip
    """d dt, dA, dtrap and dangle of a chunk, zeros after them; partial (b, chunks, H): dt_bias's
    sums over its tokens.

    dadt, dscale, dboth (b, H, s): of A dt, of k's factor, and that plus gamma's. after: of
    `add_up_chunks`, for spans. ddt, dspeed: of `rotation_backward`. CARRIED: dahead (b, H) is what
    dscale of the token before the row would be.
    """
    chunk, b = tl.program_id(0), tl.program_id(1)
    token = chunk * TOKENS + tl.arange(0, TOKENS)
    inside = token < S
    row = _rows(proj, proj_s, proj_b, token, b, ALIGN)[:, None]
    to = _rows(dproj, dproj_s, dproj_b, token, b, ALIGN)[:, None]
    partial += (b * CHUNKS + chunk).to(tl.int64) * H
    span = chunk * TOKENS // SPAN
    a = tl.arange(0, A_BLOCK)
    turning = inside[:, None] & (a < A)[None, :]
    angle = tl.load(row + ANGLE_AT + a[None, :], mask=turning, other=0.0).to(tl.float32)
    speed = tl.where(turning, PI * tanh(angle), 0.0)
    follows = token > 0
    if PACKED:
        start = _starts(starts, token, S)
        follows = start < token
        # Later spans are rotated by the tokens whose document goes on there.
        goes_on = inside & (start == tl.load(starts + (span + 1) * SPAN,
                                             mask=(span + 1) * SPAN < S, other=S))  # fmt: skip
    dw = tl.zeros((TOKENS, A_BLOCK), tl.float32)
    for g in range(G):
        at = ((b * G + g).to(tl.int64) * S + token[:, None]) * A + a[None, :]
        dw += tl.load(dspeed + at, mask=turning, other=0.0)

    for first in range(0, H, H_BLOCK):
        h = first + tl.arange(0, H_BLOCK)
        mask = inside[:, None] & (h < H)[None, :]
        vector = (b * H + h[None, :]).to(tl.int64) * S + token[:, None]
        step = tl.load(dt + vector, mask=mask, other=0.0)
        at = ((b * SPANS + span) * H + h[:, None]) * A + a[None, :]
        later = tl.load(after + at, mask=(h[:, None] < H) & (a[None, :] < A), other=0.0)
        moved, rotated = step, tl.dot(speed, tl.trans(later), input_precision="ieee")
        if PACKED:
            moved = tl.where(goes_on[:, None], moved, 0.0)
            rotated = tl.where(goes_on[:, None], rotated, 0.0)
        dw += tl.dot(moved, later, input_precision="ieee")

        d = rotated + tl.load(ddt + vector, mask=mask, other=0.0)
        both = tl.load(dboth + vector, mask=mask, other=0.0)
        past = tl.load(dscale + vector - 1, mask=mask & follows[:, None], other=0.0)
        logit = tl.load(row + TRAP_AT + h[None, :], mask=mask, other=0.0).to(tl.float32)
        share = sigmoid(logit)
        if CARRIED:
            ahead = tl.load(dahead + b * H + h, mask=h < H, other=0.0)
            past += tl.where((token == 0)[:, None], ahead[None, :], 0.0)
        d += both * share + past * (1 - share)
        dtrap = (both - past) * step * share * (1 - share)
        tl.store(to + TRAP_AT + h[None, :], dtrap, mask=mask)

        logit = tl.load(row + A_AT + h[None, :], mask=mask, other=0.0).to(tl.float32)
        da = tl.load(dadt + vector, mask=mask, other=0.0)
        d += da * decay(logit, floor, SOFTPLUS)
        da *= step * decay_derivative(logit, floor, SOFTPLUS)
        tl.store(to + A_AT + h[None, :], da, mask=mask)

        logit = tl.load(row + DT_AT + h[None, :], mask=mask, other=0.0).to(tl.float32)
        bias = tl.load(dt_bias + h, mask=h < H, other=0.0)
        d = tl.where(mask, d * sigmoid(logit + bias[None, :]), 0.0)
        tl.store(to + DT_AT + h[None, :], d, mask=mask)
        tl.store(partial + h, tl.sum(d, 0), mask=h < H)

    dangle = PI * tanh_derivative(angle) * dw
    tl.store(to + ANGLE_AT + a[None, :], dangle, mask=turning)
    if END < COLUMNS:
        pad = END + tl.arange(0, PAD_BLOCK)[None, :]
        zero = tl.zeros((TOKENS, PAD_BLOCK), tl.float32)
        tl.store(to + pad, zero, mask=inside[:, None] & (pad < COLUMNS))
