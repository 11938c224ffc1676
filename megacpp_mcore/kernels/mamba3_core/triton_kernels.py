"""The Triton kernels around Mamba-3's scan; `around.py` launches them.

S tokens, H heads of P, G groups of state dim N, A rotated pairs. `proj` is in_proj's output, (s, b,
rows), its columns [z, x, B, C, dt, A, trap, angle]; so is `dproj`, its gradient. Their strides come
divided by ALIGN, which every offset of a part divides: only so does the compiler know that it may
load 16 bytes at once. Whatever else lies between kernels has the tokens of a head together: (b, H,
s, ...), (b, G, s, ...).

A program has TOKENS tokens of one row, a chunk. Angles add up over the tokens of a document: over a
chunk in one program, over chunks in `add_up_chunks`. `starts`: (s,) the first token of each token's
document (PACKED), of one row.
"""

import triton
import triton.language as tl

from megacpp_mcore.kernels.elementwise_triton import (
    cos_sin,
    decay,
    decay_derivative,
    log1p_exp,
    sigmoid,
    tanh,
    tanh_derivative,
)

PI = tl.constexpr(3.141592653589793)


@triton.jit
def _rows(proj, proj_s, proj_b, token, b, ALIGN: tl.constexpr):
    """Where the tokens' rows begin."""
    return proj + (token.to(tl.int64) * proj_s + b.to(tl.int64) * proj_b) * ALIGN


@triton.jit
def _add_flagged(done, x, next_done, y):
    """Of two runs one after the other: a flag in the second starts the sum anew."""
    return tl.maximum(done, next_done), tl.where(next_done > 0, y, x + y)


@triton.jit
def _add_2(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add_5(a, b, c, d, e, f, g, h, i, j):
    return a + f, b + g, c + h, d + i, e + j


@triton.jit
def _starts(starts, token, S):
    """The first token of each token's document; of one behind the row, S."""
    return tl.load(starts + token, mask=token < S, other=S)


@triton.jit
def _norm(source, target, weight, n, mask, eps, N: tl.constexpr):
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + n, mask=n < N, other=0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / N + eps)[:, None] * w[None, :]
    tl.store(target, x, mask=mask)


@triton.jit
def _steps(
    row, token, inside, h, dt_bias, dt, adt, trap, to, floor,
    DT_AT: tl.constexpr, A_AT: tl.constexpr, TRAP_AT: tl.constexpr, H: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """dt, A dt and trap of a block of heads, written at `to`; dt is zero where there is none."""
    mask = inside[:, None] & (h < H)[None, :]
    column = row[:, None] + h[None, :]
    bias = tl.load(dt_bias + h, mask=h < H, other=0.0)
    logit = tl.load(column + DT_AT, mask=mask, other=0.0).to(tl.float32)
    step = tl.where(mask, log1p_exp(logit + bias[None, :]), 0.0)
    tl.store(dt + to, step, mask=mask)
    logit = tl.load(column + A_AT, mask=mask, other=0.0).to(tl.float32)
    tl.store(adt + to, decay(logit, floor, SOFTPLUS) * step, mask=mask)
    logit = tl.load(column + TRAP_AT, mask=mask, other=0.0).to(tl.float32)
    tl.store(trap + to, logit, mask=mask)
    return step


@triton.jit
def _speed(row, inside, a, ANGLE_AT: tl.constexpr, A: tl.constexpr):
    """pi tanh(angle), what a step of 1 turns; zero where there is none."""
    mask = inside[:, None] & (a < A)[None, :]
    angle = tl.load(row[:, None] + ANGLE_AT + a[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, PI * tanh(angle), 0.0)


@triton.jit
def before_scan(
    proj, dt_bias, b_weight, c_weight, starts, q, k, dt, adt, trap, sums, resets,
    S, CHUNKS, proj_s, proj_b, floor, eps,
    B_AT: tl.constexpr, C_AT: tl.constexpr, DT_AT: tl.constexpr, A_AT: tl.constexpr,
    TRAP_AT: tl.constexpr, ANGLE_AT: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
    N: tl.constexpr, A: tl.constexpr, N_BLOCK: tl.constexpr, A_BLOCK: tl.constexpr,
    H_BLOCK: tl.constexpr, TOKENS: tl.constexpr, ALIGN: tl.constexpr, SOFTPLUS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Normed B and C of one group, or steps, decays and sums of angles of a block of heads."""
    chunk, part, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = chunk * TOKENS + tl.arange(0, TOKENS)
    inside = token < S
    row = _rows(proj, proj_s, proj_b, token, b, ALIGN)
    if part < G:
        n = tl.arange(0, N_BLOCK)
        mask = inside[:, None] & (n < N)[None, :]
        to = ((b * G + part).to(tl.int64) * S + token[:, None]) * N + n[None, :]
        source = row[:, None] + part * N + n[None, :]
        _norm(source + B_AT, k + to, b_weight, n, mask, eps, N)
        _norm(source + C_AT, q + to, c_weight, n, mask, eps, N)
    else:
        h = (part - G) * H_BLOCK + tl.arange(0, H_BLOCK)
        vector = (b * H + h[None, :]).to(tl.int64) * S + token[:, None]
        step = _steps(row, token, inside, h, dt_bias, dt, adt, trap, vector, floor, DT_AT, A_AT,
                      TRAP_AT, H, SOFTPLUS)  # fmt: skip
        a = tl.arange(0, A_BLOCK)
        speed = _speed(row, inside, a, ANGLE_AT, A)
        if PACKED:
            # Of the last document alone: the others have ended.
            start = _starts(starts, token, S)
            last = tl.max(tl.where(inside, start, -1), 0)
            step = tl.where((start == last)[:, None], step, 0.0)
            tl.store(resets + chunk, (last >= chunk * TOKENS).to(tl.int32))
        total = tl.dot(tl.trans(step), speed, input_precision="ieee")
        cell = ((b * CHUNKS + chunk) * H + h[:, None]) * A + a[None, :]
        tl.store(sums + cell, total, mask=(h < H)[:, None] & (a < A)[None, :])


@triton.jit
def add_up_chunks(
    sums, resets, before, CHUNKS, WIDTH,
    BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr, REVERSE: tl.constexpr, WRAP: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """(b, chunks, width) sums of each chunk -> of all chunks before (REVERSE: behind) each one.

    resets: (chunks,), nonzero where a chunk's own sum starts anew. WRAP: modulo 2 pi.
    """
    column = tl.program_id(0) * WIDTH_BLOCK + tl.arange(0, WIDTH_BLOCK)
    row = tl.program_id(1).to(tl.int64) * CHUNKS * WIDTH
    carry = tl.zeros((WIDTH_BLOCK,), tl.float32)
    step = -WIDTH if REVERSE else WIDTH
    for first in range(0, CHUNKS, BLOCK):
        i = first + tl.arange(0, BLOCK)
        chunk = CHUNKS - 1 - i if REVERSE else i
        at = row + chunk[:, None] * WIDTH + column[None, :]
        mask = (i < CHUNKS)[:, None] & (column < WIDTH)[None, :]
        x = tl.load(sums + at, mask=mask, other=0.0)
        front = (tl.arange(0, BLOCK) == 0)[:, None]
        tl.store(before + at, tl.broadcast_to(carry[None, :], x.shape), mask=mask & front)
        if PACKED:
            reset = tl.load(resets + chunk, mask=i < CHUNKS, other=0)
            x += tl.where(front & (reset == 0)[:, None], carry[None, :], 0.0)
            flags = tl.broadcast_to(reset[:, None], x.shape)
            _done, upto = tl.associative_scan((flags, x), 0, _add_flagged)
        else:
            x += tl.where(front, carry[None, :], 0.0)
            upto = tl.cumsum(x, 0)
        if WRAP:
            upto = upto - 2 * PI * tl.floor(upto / (2 * PI))
        end = (tl.arange(0, BLOCK) == BLOCK - 1)[:, None]
        carry = tl.sum(tl.where(end, upto, 0.0), 0)
        follows = (column < WIDTH)[None, :] & (i < CHUNKS - 1)[:, None]
        tl.store(before + at + step, upto, mask=follows & ~end)


@triton.jit
def angles(
    proj, starts, dt, before, theta, S, CHUNKS, proj_s, proj_b,
    ANGLE_AT: tl.constexpr, H: tl.constexpr, A: tl.constexpr, A_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, ALIGN: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """theta (b, H, s, A), in [-pi, pi): HEADS heads of a chunk. before: of `add_up_chunks`."""
    chunk, b = tl.program_id(0), tl.program_id(2)
    token = chunk * TOKENS + tl.arange(0, TOKENS)
    inside = token < S
    a = tl.arange(0, A_BLOCK)
    mask = inside[:, None] & (a[None, :] < A)
    speed = _speed(_rows(proj, proj_s, proj_b, token, b, ALIGN), inside, a, ANGLE_AT, A)
    if PACKED:
        start = _starts(starts, token, S)
        first = (start == token).to(tl.int32)
        flags = tl.broadcast_to(first[:, None], (TOKENS, A_BLOCK))
        goes_on = (start < chunk * TOKENS)[:, None]
    for i in range(HEADS):
        h = tl.program_id(1) * HEADS + i
        if h < H:
            step = tl.load(dt + (b * H + h).to(tl.int64) * S + token, mask=inside, other=0.0)
            turn = tl.load(before + ((b * CHUNKS + chunk) * H + h) * A + a, mask=a < A, other=0.0)
            x = step[:, None] * speed
            if PACKED:
                _done, x = tl.associative_scan((flags, x), 0, _add_flagged)
                x += tl.where(goes_on, turn[None, :], 0.0)
            else:
                x = tl.cumsum(x, 0) + turn[None, :]
            x = x - 2 * PI * tl.floor(x / (2 * PI) + 0.5)
            at = ((b * H + h).to(tl.int64) * S + token[:, None]) * A + a[None, :]
            tl.store(theta + at, x, mask=mask)


@triton.jit
def gate_backward(
    proj, dy, y, dproj, dy_inner, S, proj_s, proj_b, dy_s, dy_b, dproj_s, dproj_b,
    H: tl.constexpr, P: tl.constexpr, P_BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Of y * silu(z), for a head of a chunk: dz, and y's gradient (b, H, s, P)."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    h, b = tl.program_id(1), tl.program_id(2)
    p = tl.arange(0, P_BLOCK)
    mask = (token < S)[:, None] & (p < P)[None, :]
    column = h * P + p[None, :]
    at = _rows(proj, proj_s, proj_b, token, b, ALIGN)[:, None] + column
    z = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at = _rows(dy, dy_s, dy_b, token, b, ALIGN)[:, None] + column
    d = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    inner = ((b * H + h).to(tl.int64) * S + token[:, None]) * P + p[None, :]
    out = tl.load(y + inner, mask=mask, other=0.0).to(tl.float32)
    gate = sigmoid(z)
    tl.store(dy_inner + inner, d * z * gate, mask=mask)
    at = _rows(dproj, dproj_s, dproj_b, token, b, ALIGN)[:, None] + column
    tl.store(at, d * out * gate * (1 + z * (1 - gate)), mask=mask)


@triton.jit
def _pairs(x, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    return tl.split(tl.reshape(x, (ROWS, PAIRS, 2)))


@triton.jit
def _pair_vector(at, N: tl.constexpr, PAIRS: tl.constexpr):
    n = tl.arange(0, 2 * PAIRS)
    x = tl.load(at + n, mask=n < N, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(x, (PAIRS, 2)))


@triton.jit
def _store_pair_vector(at, x, y, N: tl.constexpr, PAIRS: tl.constexpr):
    n = tl.arange(0, 2 * PAIRS)
    tl.store(at + n, tl.reshape(tl.join(x, y), (2 * PAIRS,)), mask=n < N)


@triton.jit
def _normed(at, mask, w0, w1, eps, N: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """RMSNorm of rows in pairs; and without the weight, and the factors of the rows."""
    x0, x1 = _pairs(tl.load(at, mask=mask, other=0.0).to(tl.float32), ROWS, PAIRS)
    scale = tl.rsqrt(tl.sum(x0 * x0 + x1 * x1, 1) / N + eps)
    x0, x1 = x0 * scale[:, None], x1 * scale[:, None]
    return x0 * w0[None, :], x1 * w1[None, :], x0, x1, scale


@triton.jit
def _norm_backward(
    at, to, weight_to, mask, d0, d1, w0, w1, eps,
    N: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """d0, d1: the gradient of the normed rows at `at` -> of the rows, at `to`, and the weight's."""
    _, _, x0, x1, scale = _normed(at, mask, w0, w1, eps, N, ROWS, PAIRS)
    sum0, sum1 = tl.reduce((d0 * x0, d1 * x1), 0, _add_2)
    _store_pair_vector(weight_to, sum0, sum1, N, PAIRS)
    d0, d1 = d0 * w0[None, :], d1 * w1[None, :]
    along = tl.sum(d0 * x0 + d1 * x1, 1)[:, None] / N
    d0, d1 = (d0 - x0 * along) * scale[:, None], (d1 - x1 * along) * scale[:, None]
    tl.store(to, tl.reshape(tl.join(d0, d1), (ROWS, 2 * PAIRS)), mask=mask)


@triton.jit
def _angle_pairs(theta, mask, TOKENS: tl.constexpr, PAIRS: tl.constexpr):
    """float32 angles, read as pairs of 16 bits: as pairs of q and k are, in the same registers."""
    low, high = _pairs(tl.load(theta, mask=mask, other=0), TOKENS, PAIRS)
    bits = (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def rotation_backward(
    proj, b_weight, c_weight, b_bias, c_bias, starts, dt, theta, scale, gamma, dq, dk, dqk,
    dproj, dscale, dboth, ddt, dspeed, sums, resets, partial,
    S, CHUNKS, proj_s, proj_b, dproj_s, dproj_b, partial_row, eps,
    B_AT: tl.constexpr, C_AT: tl.constexpr, ANGLE_AT: tl.constexpr, H: tl.constexpr,
    G: tl.constexpr, N: tl.constexpr, A: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr,
    TOKENS: tl.constexpr, ALIGN: tl.constexpr, PACKED: tl.constexpr, APPROXIMATE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Back through rotation, biases and norms of B and C: one group of a chunk, its heads in turn.

    In: dq, dk (b, H, s, N), of the rotated q and of the rotated and scaled k; dqk (b, H, s), of
    gamma (q k); theta as int16, two an angle. Out: dB, dC; dscale, dboth (b, H, s), of k's scale,
    and the same plus gamma's; ddt (b, H, s) and dspeed (b, G, s, A), of dt and of pi tanh(angle),
    as far as the chunk's own angles go; sums (b, chunks, H, A), the angles' gradients of the
    document that begins before the chunk or with it; partial: a row of sums over the chunk's tokens
    for b_bias, c_bias, and G times b_weight and c_weight.

    What a head has of vectors is kept for HEADS heads and written at once: a store in the loop
    would move each between threads.
    """
    chunk, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = chunk * TOKENS + tl.arange(0, TOKENS)
    inside = token < S
    n, pair, own = tl.arange(0, 2 * PAIRS), tl.arange(0, PAIRS), tl.arange(0, HEADS)
    mask = inside[:, None] & (n < N)[None, :]
    rows = _rows(proj, proj_s, proj_b, token, b, ALIGN)
    row = rows[:, None]
    column = g * N + n[None, :]
    bw0, bw1 = _pair_vector(b_weight, N, PAIRS)
    cw0, cw1 = _pair_vector(c_weight, N, PAIRS)
    kn0, kn1, _, _, _ = _normed(row + B_AT + column, mask, bw0, bw1, eps, N, TOKENS, PAIRS)
    qn0, qn1, _, _, _ = _normed(row + C_AT + column, mask, cw0, cw1, eps, N, TOKENS, PAIRS)
    speed = _speed(rows, inside, pair, ANGLE_AT, A)
    ends = (token == S - 1).to(tl.int32)
    if PACKED:
        start = _starts(starts, token, S)
        ends = (_starts(starts, token + 1, S) != start).to(tl.int32)
        first = tl.min(start, 0)
        if g == 0:
            tl.store(resets + chunk, tl.max(tl.where(inside, ends, 0), 0))
    partial += (b * CHUNKS + chunk).to(tl.int64) * partial_row

    zero = tl.zeros((TOKENS, PAIRS), tl.float32)
    dqn0, dqn1, dkn0, dkn1, dw = zero, zero, zero, zero, zero
    for block in range(0, H // G, HEADS):
        none = tl.zeros((TOKENS, HEADS), tl.float32)
        empty = tl.zeros((HEADS, PAIRS), tl.float32)
        all_scale, all_both, all_dt = none, none, none
        all_k0, all_k1, all_q0, all_q1, all_turn = empty, empty, empty, empty, empty
        for i in tl.range(min(HEADS, H // G - block), num_stages=STAGES):
            h = g * (H // G) + block + i
            vector = (b * H + h).to(tl.int64) * S + token
            at = vector[:, None] * N + n[None, :]
            d = tl.load(dq + at, mask=mask, other=0.0)
            e = tl.load(dk + at, mask=mask, other=0.0)
            turning = inside[:, None] & (n < 2 * A)[None, :]
            x = _angle_pairs(theta + vector[:, None] * (2 * A) + n[None, :], turning, TOKENS, PAIRS)
            mix = tl.load(dqk + vector, mask=inside, other=0.0)
            factor = tl.load(scale + vector, mask=inside, other=0.0)
            step = tl.load(dt + vector, mask=inside, other=0.0)
            diagonal = tl.load(gamma + vector, mask=inside, other=0.0)
            q0, q1 = _pair_vector(c_bias + h * N, N, PAIRS)
            k0, k1 = _pair_vector(b_bias + h * N, N, PAIRS)
            q0, q1 = q0[None, :] + qn0, q1[None, :] + qn1
            k0, k1 = k0[None, :] + kn0, k1[None, :] + kn1
            dq0, dq1 = _pairs(d.to(tl.float32), TOKENS, PAIRS)
            dk0, dk1 = _pairs(e.to(tl.float32), TOKENS, PAIRS)
            c, s = cos_sin(x, APPROXIMATE)

            r0, r1 = k0 * c - k1 * s, k0 * s + k1 * c
            # Sums of several tiles at once share their barriers.
            along, dgamma = tl.reduce((dk0 * r0 + dk1 * r1, q0 * k0 + q1 * k1), 1, _add_2)
            dk0, dk1 = dk0 * factor[:, None], dk1 * factor[:, None]
            turn = dk1 * r0 - dk0 * r1
            r0, r1 = q0 * c - q1 * s, q0 * s + q1 * c
            turn += dq1 * r0 - dq0 * r1
            both = (mix * diagonal)[:, None]
            dq0, dq1 = dq0 * c + dq1 * s + both * k0, dq1 * c - dq0 * s + both * k1
            dk0, dk1 = dk0 * c + dk1 * s + both * q0, dk1 * c - dk0 * s + both * q1
            dqn0, dqn1, dkn0, dkn1 = dqn0 + dq0, dqn1 + dq1, dkn0 + dk0, dkn1 + dk1
            turn = tl.where((pair < A)[None, :], turn, 0.0)
            counted = turn
            if PACKED:
                counted = tl.where((start == first)[:, None], turn, 0.0)
            dk0, dk1, dq0, dq1, total = tl.reduce((dk0, dk1, dq0, dq1, counted), 0, _add_5)

            # A token's angle turns all later ones of its document.
            if PACKED:
                flags = tl.broadcast_to(ends[:, None], turn.shape)
                flags, turn = tl.associative_scan((flags, turn), 0, _add_flagged, reverse=True)
            else:
                turn = tl.cumsum(turn, 0, reverse=True)
            dw += step[:, None] * turn
            here = (own == i)[None, :]
            all_scale = tl.where(here, along[:, None], all_scale)
            all_both = tl.where(here, (along + mix * dgamma)[:, None], all_both)
            all_dt = tl.where(here, tl.sum(speed * turn, 1)[:, None], all_dt)
            here = (own == i)[:, None]
            all_k0 = tl.where(here, dk0[None, :], all_k0)
            all_k1 = tl.where(here, dk1[None, :], all_k1)
            all_q0 = tl.where(here, dq0[None, :], all_q0)
            all_q1 = tl.where(here, dq1[None, :], all_q1)
            all_turn = tl.where(here, total[None, :], all_turn)

        within = own < H // G - block
        h = g * (H // G) + block + own
        vector = (b * H + h[None, :]).to(tl.int64) * S + token[:, None]
        mine = inside[:, None] & within[None, :]
        tl.store(dscale + vector, all_scale, mask=mine)
        tl.store(dboth + vector, all_both, mask=mine)
        tl.store(ddt + vector, all_dt, mask=mine)
        at = h[:, None] * N + n[None, :]
        mine = within[:, None] & (n < N)[None, :]
        x = tl.reshape(tl.join(all_k0, all_k1), (HEADS, 2 * PAIRS))
        tl.store(partial + at, x, mask=mine)
        x = tl.reshape(tl.join(all_q0, all_q1), (HEADS, 2 * PAIRS))
        tl.store(partial + H * N + at, x, mask=mine)
        to = sums + ((b * CHUNKS + chunk) * H + h[:, None]) * A + pair[None, :]
        tl.store(to, all_turn, mask=within[:, None] & (pair < A)[None, :])
    at = ((b * G + g).to(tl.int64) * S + token[:, None]) * A + pair[None, :]
    tl.store(dspeed + at, dw, mask=inside[:, None] & (pair < A)[None, :])
    to = _rows(dproj, dproj_s, dproj_b, token, b, ALIGN)[:, None]
    partial += (2 * H + g) * N
    _norm_backward(row + B_AT + column, to + B_AT + column, partial, mask, dkn0, dkn1, bw0, bw1,
                   eps, N, TOKENS, PAIRS)  # fmt: skip
    _norm_backward(row + C_AT + column, to + C_AT + column, partial + G * N, mask, dqn0, dqn1, cw0,
                   cw1, eps, N, TOKENS, PAIRS)  # fmt: skip


@triton.jit
def steps_backward(
    proj, dt_bias, starts, dt, dadt, dscale, dboth, ddt, dspeed, behind, dproj, partial,
    S, CHUNKS, proj_s, proj_b, dproj_s, dproj_b, partial_row, floor,
    DT_AT: tl.constexpr, A_AT: tl.constexpr, TRAP_AT: tl.constexpr, ANGLE_AT: tl.constexpr,
    END: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr, G: tl.constexpr, A: tl.constexpr,
    A_BLOCK: tl.constexpr, H_BLOCK: tl.constexpr, PAD_BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    ALIGN: tl.constexpr, SOFTPLUS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """d dt, dA, dtrap and dangle of a chunk, zeros behind them, and dt_bias's sums over its tokens.

    behind: of `add_up_chunks`. The rest: of `rotation_backward`, and dadt (b, H, s).
    """
    chunk, b = tl.program_id(0), tl.program_id(1)
    token = chunk * TOKENS + tl.arange(0, TOKENS)
    inside = token < S
    row = _rows(proj, proj_s, proj_b, token, b, ALIGN)[:, None]
    to = _rows(dproj, dproj_s, dproj_b, token, b, ALIGN)[:, None]
    partial += (b * CHUNKS + chunk).to(tl.int64) * partial_row
    a = tl.arange(0, A_BLOCK)
    turning = inside[:, None] & (a < A)[None, :]
    angle = tl.load(row + ANGLE_AT + a[None, :], mask=turning, other=0.0).to(tl.float32)
    speed = tl.where(turning, PI * tanh(angle), 0.0)
    follows = token > 0
    if PACKED:
        start = _starts(starts, token, S)
        follows = start < token
        # Later chunks turn with the tokens whose document goes on there.
        goes_on = inside & (start == tl.load(starts + (chunk + 1) * TOKENS,
                                             mask=(chunk + 1) * TOKENS < S, other=S))  # fmt: skip
    dw = tl.zeros((TOKENS, A_BLOCK), tl.float32)
    for g in range(G):
        at = ((b * G + g).to(tl.int64) * S + token[:, None]) * A + a[None, :]
        dw += tl.load(dspeed + at, mask=turning, other=0.0)

    for first in range(0, H, H_BLOCK):
        h = first + tl.arange(0, H_BLOCK)
        mask = inside[:, None] & (h < H)[None, :]
        vector = (b * H + h[None, :]).to(tl.int64) * S + token[:, None]
        step = tl.load(dt + vector, mask=mask, other=0.0)
        at = ((b * CHUNKS + chunk) * H + h[:, None]) * A + a[None, :]
        later = tl.load(behind + at, mask=(h[:, None] < H) & (a[None, :] < A), other=0.0)
        moved, turned = step, tl.dot(speed, tl.trans(later), input_precision="ieee")
        if PACKED:
            moved = tl.where(goes_on[:, None], moved, 0.0)
            turned = tl.where(goes_on[:, None], turned, 0.0)
        dw += tl.dot(moved, later, input_precision="ieee")

        d = turned + tl.load(ddt + vector, mask=mask, other=0.0)
        both = tl.load(dboth + vector, mask=mask, other=0.0)
        past = tl.load(dscale + vector - 1, mask=mask & follows[:, None], other=0.0)
        logit = tl.load(row + TRAP_AT + h[None, :], mask=mask, other=0.0).to(tl.float32)
        share = sigmoid(logit)
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
