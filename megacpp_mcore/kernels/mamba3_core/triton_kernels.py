"""The Triton kernels before Mamba-3's scan; `around.py` launches them, and those after it in the
backward pass, which are in `backward_kernels.py`.

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

from megacpp_mcore.kernels.elementwise_triton import cos_sin, decay, log1p_exp, sigmoid, tanh

PI = tl.constexpr(3.141592653589793)


@triton.jit
def _rows(proj, proj_s, proj_b, token, b, ALIGN: tl.constexpr):
    """Where the tokens' rows begin."""
    return proj + (token.to(tl.int64) * proj_s + b.to(tl.int64) * proj_b) * ALIGN


@triton.jit
def _add_flagged(done, x, next_done, y):
    """The sum of two runs one after the other: a flag in the second starts it anew."""
    return tl.maximum(done, next_done), tl.where(next_done > 0, y, x + y)


@triton.jit
def _starts(starts, token, S):
    """The first token of each token's document; past the row's end, S."""
    return tl.load(starts + token, mask=token < S, other=S)


@triton.jit
def _steps(
    row, next_row, follows, inside, h, dt_bias, dt, adt, scale, gamma, to, floor,
    DT_AT: tl.constexpr, A_AT: tl.constexpr, TRAP_AT: tl.constexpr, H: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """dt, A dt, and the factors of a token's own value and of k, of a block of heads, written at
    `to`; dt is zero where there is none. follows: the next token is of the same document."""
    mask = inside[:, None] & (h < H)[None, :]
    column = row[:, None] + h[None, :]
    bias = tl.load(dt_bias + h, mask=h < H, other=0.0)
    logit = tl.load(column + DT_AT, mask=mask, other=0.0).to(tl.float32)
    step = tl.where(mask, log1p_exp(logit + bias[None, :]), 0.0)
    tl.store(dt + to, step, mask=mask)
    logit = tl.load(column + A_AT, mask=mask, other=0.0).to(tl.float32)
    tl.store(adt + to, decay(logit, floor, SOFTPLUS) * step, mask=mask)
    own = step * sigmoid(tl.load(column + TRAP_AT, mask=mask, other=0.0).to(tl.float32))
    tl.store(gamma + to, own, mask=mask)
    mask_next = mask & follows[:, None]
    column = next_row[:, None] + h[None, :]
    logit = tl.load(column + DT_AT, mask=mask_next, other=0.0).to(tl.float32)
    after = log1p_exp(logit + bias[None, :])
    logit = tl.load(column + TRAP_AT, mask=mask_next, other=0.0).to(tl.float32)
    after = tl.where(mask_next, after * sigmoid(-logit), 0.0)
    tl.store(scale + to, own + after, mask=mask)
    return step


@triton.jit
def _speed(row, inside, a, ANGLE_AT: tl.constexpr, A: tl.constexpr):
    """pi tanh(angle), the rotation of a step of 1; zero where there is none."""
    mask = inside[:, None] & (a < A)[None, :]
    angle = tl.load(row[:, None] + ANGLE_AT + a[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, PI * tanh(angle), 0.0)


@triton.jit
def mamba3_before_scan(
    proj, dt_bias, starts, dt, adt, scale, gamma, sums, resets, S, CHUNKS, proj_s, proj_b, floor,
    DT_AT: tl.constexpr, A_AT: tl.constexpr, TRAP_AT: tl.constexpr, ANGLE_AT: tl.constexpr,
    H: tl.constexpr, A: tl.constexpr, A_BLOCK: tl.constexpr, H_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, ALIGN: tl.constexpr, SOFTPLUS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Steps, decays and sums of angles of a block of heads."""
    chunk, part, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = chunk * TOKENS + tl.arange(0, TOKENS)
    inside = token < S
    row = _rows(proj, proj_s, proj_b, token, b, ALIGN)
    h = part * H_BLOCK + tl.arange(0, H_BLOCK)
    vector = (b * H + h[None, :]).to(tl.int64) * S + token[:, None]
    next_row = _rows(proj, proj_s, proj_b, token + 1, b, ALIGN)
    follows = token + 1 < S
    if PACKED:
        follows = _starts(starts, token + 1, S) <= token
    step = _steps(row, next_row, follows, inside, h, dt_bias, dt, adt, scale, gamma, vector, floor,
                  DT_AT, A_AT, TRAP_AT, H, SOFTPLUS)  # fmt: skip
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
def mamba3_add_up_chunks(
    sums, resets, initial, before, CHUNKS, WIDTH,
    BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr, REVERSE: tl.constexpr, WRAP: tl.constexpr,
    PACKED: tl.constexpr, CARRIED: tl.constexpr,
):  # fmt: skip
    """(b, chunks, width) sums of each chunk -> of all chunks before (REVERSE: after) each one, and
    `initial` (b, width) before the first (CARRIED).

    resets: (chunks,), nonzero where a chunk's own sum starts anew. WRAP: modulo 2 pi.
    """
    column = tl.program_id(0) * WIDTH_BLOCK + tl.arange(0, WIDTH_BLOCK)
    row = tl.program_id(1).to(tl.int64) * CHUNKS * WIDTH
    carry = tl.zeros((WIDTH_BLOCK,), tl.float32)
    if CARRIED:
        carry = tl.load(initial + tl.program_id(1) * WIDTH + column, mask=column < WIDTH, other=0.0)
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
def _pairs(x, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    return tl.split(tl.reshape(x, (ROWS, PAIRS, 2)))


@triton.jit
def _pair_vector(at, N: tl.constexpr, PAIRS: tl.constexpr):
    n = tl.arange(0, 2 * PAIRS)
    x = tl.load(at + n, mask=n < N, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(x, (PAIRS, 2)))


@triton.jit
def _normed(at, mask, w0, w1, eps, N: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """RMSNorm of rows in pairs; and without the weight, and the factors of the rows."""
    x0, x1 = _pairs(tl.load(at, mask=mask, other=0.0).to(tl.float32), ROWS, PAIRS)
    scale = tl.rsqrt(tl.sum(x0 * x0 + x1 * x1, 1) / N + eps)
    x0, x1 = x0 * scale[:, None], x1 * scale[:, None]
    return x0 * w0[None, :], x1 * w1[None, :], x0, x1, scale


@triton.jit
def _store_pairs(at, x0, x1, mask, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    tl.store(at, tl.reshape(tl.join(x0, x1), (ROWS, 2 * PAIRS)), mask=mask)


@triton.jit
def mamba3_rotate(
    proj, b_weight, c_weight, b_bias, c_bias, starts, dt, scale, before, b_rows, c_rows, theta, q,
    k, S, CHUNKS, proj_s, proj_b, eps,
    B_AT: tl.constexpr, C_AT: tl.constexpr, ANGLE_AT: tl.constexpr, H: tl.constexpr,
    G: tl.constexpr, N: tl.constexpr, A: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr,
    ALIGN: tl.constexpr, PACKED: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """One group of a chunk, normed and rotated: b_rows, c_rows (b, G, s, N), B and C normed; and of
    its heads theta (b, H, s, A), in [-pi, pi), and q, k (b, H, s, N), the rows biased and rotated,
    k scaled. before: of `add_up_chunks`."""
    chunk, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = chunk * TOKENS + tl.arange(0, TOKENS)
    inside = token < S
    n, a = tl.arange(0, 2 * PAIRS), tl.arange(0, PAIRS)
    mask = inside[:, None] & (n < N)[None, :]
    turning = inside[:, None] & (a < A)[None, :]
    rows = _rows(proj, proj_s, proj_b, token, b, ALIGN)
    at = rows[:, None] + g * N + n[None, :]
    w0, w1 = _pair_vector(b_weight, N, PAIRS)
    kn0, kn1, _, _, _ = _normed(at + B_AT, mask, w0, w1, eps, N, TOKENS, PAIRS)
    w0, w1 = _pair_vector(c_weight, N, PAIRS)
    qn0, qn1, _, _, _ = _normed(at + C_AT, mask, w0, w1, eps, N, TOKENS, PAIRS)
    at = ((b * G + g).to(tl.int64) * S + token[:, None]) * N + n[None, :]
    _store_pairs(b_rows + at, kn0, kn1, mask, TOKENS, PAIRS)
    _store_pairs(c_rows + at, qn0, qn1, mask, TOKENS, PAIRS)
    speed = _speed(rows, inside, a, ANGLE_AT, A)
    if PACKED:
        start = _starts(starts, token, S)
        first = (start == token).to(tl.int32)
        flags = tl.broadcast_to(first[:, None], (TOKENS, PAIRS))
        goes_on = (start < chunk * TOKENS)[:, None]
    for i in range(H // G):
        h = g * (H // G) + i
        vector = (b * H + h).to(tl.int64) * S + token
        x = tl.load(dt + vector, mask=inside, other=0.0)[:, None] * speed
        cell = ((b * CHUNKS + chunk) * H + h) * A + a
        carried = tl.load(before + cell, mask=a < A, other=0.0)
        if PACKED:
            _flags, x = tl.associative_scan((flags, x), 0, _add_flagged)
            x += tl.where(goes_on, carried[None, :], 0.0)
        else:
            x = tl.cumsum(x, 0) + carried[None, :]
        x = x - 2 * PI * tl.floor(x / (2 * PI) + 0.5)
        tl.store(theta + vector[:, None] * A + a[None, :], x, mask=turning)
        c, s = cos_sin(x, APPROXIMATE)
        factor = tl.load(scale + vector, mask=inside, other=0.0)[:, None]
        x0, x1 = _pair_vector(b_bias + h * N, N, PAIRS)
        x0, x1 = kn0 + x0[None, :], kn1 + x1[None, :]
        at = vector[:, None] * N + n[None, :]
        _store_pairs(k + at, (x0 * c - x1 * s) * factor, (x0 * s + x1 * c) * factor, mask, TOKENS,
                     PAIRS)  # fmt: skip
        x0, x1 = _pair_vector(c_bias + h * N, N, PAIRS)
        x0, x1 = qn0 + x0[None, :], qn1 + x1[None, :]
        _store_pairs(q + at, x0 * c - x1 * s, x0 * s + x1 * c, mask, TOKENS, PAIRS)
