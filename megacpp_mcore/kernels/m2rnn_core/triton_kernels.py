"""The Triton kernels around M2RNN's recurrence; `around.py` launches them.

S tokens, C = 2 K + H V channels of the convolution, of them H V values. `proj` is in_proj's output,
(s, b, rows), its columns [q (K), k (K), v (H V), gate (H V), decay (H)]; so is `dproj`, its
gradient. Their strides come divided by ALIGN, so that the compiler knows that it may load 16 bytes
at once. `starts`: (s,) the first token of each token's document (PACKED), of one row.
"""

import triton
import triton.language as tl

from megacpp_mcore.kernels.elementwise_triton import log1p_exp, sigmoid


@triton.jit
def _rows(proj, proj_s, proj_b, token, b, ALIGN: tl.constexpr):
    """Where the tokens' rows begin."""
    return proj + (token.to(tl.int64) * proj_s + b.to(tl.int64) * proj_b) * ALIGN


@triton.jit
def _start(starts, token, S, PACKED: tl.constexpr):
    """The first token of each token's document; past the row's end, S."""
    start = tl.where(token < S, 0, S)
    if PACKED:
        start = tl.load(starts + token, mask=token < S, other=S)
    return start


@triton.jit
def _input(proj, proj_s, proj_b, at, start, b, column, S, ALIGN: tl.constexpr):
    """x at tokens `at`, zero before `start`, in float32."""
    rows = _rows(proj, proj_s, proj_b, at, b, ALIGN)
    mask = ((at >= start) & (at < S))[:, None]
    return tl.load(rows[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _convolved(
    proj, weight, bias, proj_s, proj_b, token, start, b, column, S, TAPS: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """The depthwise causal convolution at `token`, whose documents begin at `start`."""
    out = tl.load(bias + column).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        at = token - (TAPS - 1 - tap)
        x = _input(proj, proj_s, proj_b, at, start, b, column, S, ALIGN)
        out += x * tl.load(weight + column * TAPS + tap).to(tl.float32)[None, :]
    return out


@triton.jit
def _rate(a_log, h, H: tl.constexpr):
    return tl.exp(tl.load(a_log + h, mask=h < H, other=0.0))[None, :]


@triton.jit
def _decay_logit(rows, dt_bias, h, mask, H: tl.constexpr, DECAY_AT: tl.constexpr):
    x = tl.load(rows[:, None] + DECAY_AT + h[None, :], mask=mask, other=0.0).to(tl.float32)
    return x + tl.load(dt_bias + h, mask=h < H, other=0.0)[None, :]


@triton.jit
def _convolve(
    proj, weight, bias, starts, mixed, token, b, part, S, BATCH, proj_s, proj_b,
    C: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    column = part * BLOCK + tl.arange(0, BLOCK)
    start = _start(starts, token, S, PACKED)
    x = _convolved(proj, weight, bias, proj_s, proj_b, token, start, b, column, S, TAPS, ALIGN)
    to = (token.to(tl.int64)[:, None] * BATCH + b) * C + column[None, :]
    tl.store(mixed + to, x * sigmoid(x), mask=(token < S)[:, None])


@triton.jit
def _forget(
    proj, a_log, dt_bias, f, token, b, S, proj_s, proj_b, H: tl.constexpr, DECAY_AT: tl.constexpr,
    H_BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    h = tl.arange(0, H_BLOCK)
    mask = (token < S)[:, None] & (h < H)[None, :]
    rows = _rows(proj, proj_s, proj_b, token, b, ALIGN)
    x = _decay_logit(rows, dt_bias, h, mask, H, DECAY_AT)
    to = (b.to(tl.int64) * S + token[:, None]) * H + h[None, :]
    tl.store(f + to, tl.exp(-_rate(a_log, h, H) * log1p_exp(x)), mask=mask)


@triton.jit
def m2rnn_before(
    proj, weight, bias, a_log, dt_bias, starts, mixed, f, S, BATCH, proj_s, proj_b,
    C: tl.constexpr, H: tl.constexpr, DECAY_AT: tl.constexpr, TAPS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, H_BLOCK: tl.constexpr, ALIGN: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """mixed (s, b, C): silu of the convolution, a block of channels; or f (b, s, H)."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    part, b = tl.program_id(1), tl.program_id(2)
    if part < C // BLOCK:
        _convolve(proj, weight, bias, starts, mixed, token, b, part, S, BATCH, proj_s, proj_b, C,
                  TAPS, BLOCK, ALIGN, PACKED)  # fmt: skip
    else:
        _forget(proj, a_log, dt_bias, f, token, b, S, proj_s, proj_b, H, DECAY_AT, H_BLOCK, ALIGN)


@triton.jit
def _gated(y, values, gate, skip, mask):
    """y + D v, gate, and v; in float32."""
    v = tl.load(values, mask=mask, other=0.0).to(tl.float32)
    whole = tl.load(y, mask=mask, other=0.0).to(tl.float32) + skip * v
    return whole, tl.load(gate, mask=mask, other=0.0).to(tl.float32), v


@triton.jit
def m2rnn_after(
    proj, mixed, y, skip, weight, out, S, BATCH, proj_s, proj_b, eps,
    C: tl.constexpr, HV: tl.constexpr, V_AT: tl.constexpr, GATE_AT: tl.constexpr,
    HV_BLOCK: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """out (s, b, H V) = RMSNorm((y + D v) silu(gate)): ROWS tokens of one row. y: (b, s, H V)."""
    token, b = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    c = tl.arange(0, HV_BLOCK)[None, :]
    mask = (token < S)[:, None] & (c < HV)
    row = (token.to(tl.int64) * BATCH + b)[:, None]
    d = tl.load(skip + c, mask=c < HV, other=0.0)
    gate = _rows(proj, proj_s, proj_b, token, b, ALIGN)[:, None] + GATE_AT + c
    own = (b.to(tl.int64) * S + token[:, None]) * HV + c
    x, g, _ = _gated(y + own, mixed + row * C + V_AT + c, gate, d, mask)
    x *= g * sigmoid(g)
    x *= tl.rsqrt(tl.sum(x * x, 1) / HV + eps)[:, None]
    w = tl.load(weight + c, mask=c < HV, other=0.0).to(tl.float32)
    tl.store(out + row * HV + c, x * w, mask=mask)


@triton.jit
def m2rnn_after_backward(
    proj, mixed, y, skip, weight, dout, dproj, dy, partial, S, BATCH, BLOCKS, proj_s, proj_b,
    dproj_s, dproj_b, dout_s, dout_b, eps,
    C: tl.constexpr, HV: tl.constexpr, V_AT: tl.constexpr, GATE_AT: tl.constexpr,
    HV_BLOCK: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """dgate, dy (b, s, H V), and sums for D and the norm's weight over BLOCKS times ROWS tokens."""
    b = tl.program_id(1)
    c = tl.arange(0, HV_BLOCK)[None, :]
    d = tl.load(skip + c, mask=c < HV, other=0.0)
    w = tl.load(weight + c, mask=c < HV, other=0.0).to(tl.float32)
    dskip, dweight = tl.zeros((ROWS, HV_BLOCK), tl.float32), tl.zeros((ROWS, HV_BLOCK), tl.float32)
    for block in range(BLOCKS):
        token = (tl.program_id(0) * BLOCKS + block) * ROWS + tl.arange(0, ROWS)
        mask = (token < S)[:, None] & (c < HV)
        row = (token.to(tl.int64) * BATCH + b)[:, None]
        gate = _rows(proj, proj_s, proj_b, token, b, ALIGN)[:, None] + GATE_AT + c
        own = (b.to(tl.int64) * S + token[:, None]) * HV + c
        whole, g, v = _gated(y + own, mixed + row * C + V_AT + c, gate, d, mask)
        at = _rows(dout, dout_s, dout_b, token, b, ALIGN)[:, None] + c
        dx = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        s = sigmoid(g)
        x = whole * g * s
        scale = tl.rsqrt(tl.sum(x * x, 1) / HV + eps)[:, None]
        x *= scale
        dweight += dx * x
        dx *= w
        dx = (dx - x * (tl.sum(dx * x, 1) / HV)[:, None]) * scale
        at = _rows(dproj, dproj_s, dproj_b, token, b, ALIGN)[:, None] + GATE_AT + c
        tl.store(at, dx * whole * s * (1 + g * (1 - s)), mask=mask)
        dx *= g * s
        tl.store(dy + own, dx, mask=mask)
        dskip += dx * v
    to = (b * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * 2 * HV + tl.arange(0, HV_BLOCK)
    tl.store(partial + to, tl.sum(dskip, 0), mask=tl.arange(0, HV_BLOCK) < HV)
    tl.store(partial + to + HV, tl.sum(dweight, 0), mask=tl.arange(0, HV_BLOCK) < HV)


@triton.jit
def _mixed_gradient(
    dq, dk, dv, dy, skip, at, b, column, part, S,
    K: tl.constexpr, HV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """That of silu's output at tokens `at`: v's comes from the recurrence and from D's skip."""
    mask = (at < S)[:, None]
    row = b.to(tl.int64) * S + at
    if part < K // BLOCK:
        d = tl.load(dq + row[:, None] * K + column[None, :], mask=mask, other=0.0).to(tl.float32)
    elif part < 2 * K // BLOCK:
        own = row[:, None] * K + column[None, :] - K
        d = tl.load(dk + own, mask=mask, other=0.0).to(tl.float32)
    else:
        own = row[:, None] * HV + column[None, :] - 2 * K
        d = tl.load(dv + own, mask=mask, other=0.0).to(tl.float32)
        factor = tl.load(skip + column - 2 * K)[None, :]
        d += tl.load(dy + own, mask=mask, other=0.0).to(tl.float32) * factor
    return d


@triton.jit
def _convolve_backward(
    proj, weight, bias, starts, skip, dq, dk, dv, dy, to, partial, token, b, part, S,
    proj_s, proj_b, K: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    column = part * BLOCK + tl.arange(0, BLOCK)
    dx = tl.zeros((TOKENS, BLOCK), tl.float32)
    for ahead in tl.static_range(TAPS):
        # What the convolution at a later token has of these: its tap so many tokens back.
        at = token + ahead
        start = _start(starts, at, S, PACKED)
        x = _convolved(proj, weight, bias, proj_s, proj_b, at, start, b, column, S, TAPS, ALIGN)
        d = _mixed_gradient(dq, dk, dv, dy, skip, at, b, column, part, S, K, C - 2 * K, BLOCK)
        s = sigmoid(x)
        d *= s * (1 + x * (1 - s))
        tap = tl.load(weight + column * TAPS + TAPS - 1 - ahead).to(tl.float32)[None, :]
        dx += tl.where((start <= token)[:, None], d * tap, 0.0)
        if ahead == 0:
            tl.store(partial + C * TAPS + column, tl.sum(d, 0))
            for back in tl.static_range(TAPS):
                x = _input(proj, proj_s, proj_b, token - back, start, b, column, S, ALIGN)
                tl.store(partial + column * TAPS + TAPS - 1 - back, tl.sum(d * x, 0))
    tl.store(to[:, None] + column[None, :], dx, mask=(token < S)[:, None])


@triton.jit
def _forget_backward(
    proj, a_log, dt_bias, f, df, to, partial, token, b, S, proj_s, proj_b, H: tl.constexpr,
    DECAY_AT: tl.constexpr, COLUMNS: tl.constexpr, H_BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    h = tl.arange(0, H_BLOCK)
    inside = (token < S)[:, None]
    mask = inside & (h < H)[None, :]
    rows = _rows(proj, proj_s, proj_b, token, b, ALIGN)
    x = _decay_logit(rows, dt_bias, h, mask, H, DECAY_AT)
    own = (b.to(tl.int64) * S + token[:, None]) * H + h[None, :]
    d = tl.load(df + own, mask=mask, other=0.0) * tl.load(f + own, mask=mask, other=0.0)
    d *= -_rate(a_log, h, H)
    tl.store(partial + H + h, tl.sum(d * log1p_exp(x), 0), mask=h < H)
    d *= sigmoid(x)
    tl.store(partial + h, tl.sum(d, 0), mask=h < H)
    # What is masked is zero: so are the columns after, in the same block.
    wide = inside & (DECAY_AT + h < COLUMNS)[None, :]
    tl.store(to[:, None] + DECAY_AT + h[None, :], d, mask=wide)


@triton.jit
def m2rnn_before_backward(
    proj, weight, bias, a_log, dt_bias, starts, skip, dq, dk, dv, dy, f, df, dproj, partial,
    S, proj_s, proj_b, dproj_s, dproj_b,
    K: tl.constexpr, C: tl.constexpr, H: tl.constexpr, DECAY_AT: tl.constexpr,
    COLUMNS: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    H_BLOCK: tl.constexpr, ALIGN: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv of a block of channels, or ddecay and zeros after it, into dproj.

    partial: a row of sums over the tokens, (C, TAPS) of the weight, C of the bias, H of dt_bias,
    H of A_log.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    part, b = tl.program_id(1), tl.program_id(2)
    to = _rows(dproj, dproj_s, dproj_b, token, b, ALIGN)
    sums = (b * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    partial += sums * (C * (TAPS + 1) + 2 * H)
    if part < C // BLOCK:
        _convolve_backward(proj, weight, bias, starts, skip, dq, dk, dv, dy, to, partial, token, b,
                           part, S, proj_s, proj_b, K, C, TAPS, TOKENS, BLOCK, ALIGN,
                           PACKED)  # fmt: skip
    else:
        _forget_backward(proj, a_log, dt_bias, f, df, to, partial + C * (TAPS + 1), token, b, S,
                         proj_s, proj_b, H, DECAY_AT, COLUMNS, H_BLOCK, ALIGN)  # fmt: skip
