"""The Triton kernels of Mamba-3's scan; `scan.py` launches them. That of its backward pass is in
`scan_backward_kernels.py`.

H heads of P, state dim N; a head's state is (P, N). A row of S tokens is cut into chunks of CHUNK,
and SEGMENT chunks are a segment: a program processes the chunks of one segment of one head with the
state in registers. What it begins with it adds up from the segments before, which
`mamba3_segment_states` has summed.

Of a chunk of one head, with a the log decay, L_ij = exp(a_{j+1} + ... + a_i), e_i the decay from
the chunk's begin to i, r_j that from j to its end, e all of it, g = gamma, k scaled (K without), S
the state before the chunk and T after it, d the gradient of y before the gate:

    y_i  = e_i S q_i + sum_{j<i} L_ij (q_i k_j) v_j + (g_i q_i K_i + D) v_i
    T    = e S + sum_j r_j v_j k_j^T
    dq_i = e_i S^T d_i + sum_{j<i} L_ij (d_i v_j) k_j
    dk_j = r_j dT^T v_j + sum_{i>j} L_ij (d_i v_j) q_i
    dv_j = r_j dT k_j + sum_{i>j} L_ij (q_i k_j) d_i + (g_j q_j K_j + D) d_j
    dS   = e dT + sum_i e_i d_i q_i^T
    da_t = sum_{i>=t} (q_i dq_i - k_i dk_i) + <T, dT>

Layouts: q, k (b, H, s, N), rotated, k scaled; adt, scale, gamma (b, H, s); x, z, y, dx in
any strides of token, sequence and head, given divided by ALIGN (see `triton_kernels.py`); what only
kernels see (b, H, s, ...). WHOLE: CHUNK divides S.
"""

import triton
import triton.language as tl

from megacpp_mcore.kernels.elementwise_triton import sigmoid
from megacpp_mcore.kernels.mamba3_core.triton_kernels import _starts

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _exp2(x, APPROXIMATE: tl.constexpr):
    """2^x. APPROXIMATE: one instruction, within 2^-22; what is below 2^-126 becomes 0, for which
    tl.exp2 takes three more."""
    if APPROXIMATE:
        x = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        x = tl.exp2(x)
    return x


@triton.jit
def _silu(x, APPROXIMATE: tl.constexpr):
    """x sigmoid(x). APPROXIMATE: within a few epsilons of float32, in three instructions."""
    if APPROXIMATE:
        x = x * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + _exp2(-LOG2E * x, True)],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        x = x * sigmoid(x)
    return x


@triton.jit
def _tile(at, inside, n, SIZE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """A (tokens, SIZE) tile, zeros around it."""
    if WHOLE and SIZE == BLOCK:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=inside[:, None] & (n < SIZE)[None, :], other=0.0)
    return x


@triton.jit
def _put(at, x, inside, n, SIZE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    if WHOLE and SIZE == BLOCK:
        tl.store(at, x)
    else:
        tl.store(at, x, mask=inside[:, None] & (n < SIZE)[None, :])


@triton.jit
def _vector(at, inside, WHOLE: tl.constexpr):
    return tl.load(at) if WHOLE else tl.load(at, mask=inside, other=0.0)


@triton.jit
def _head(x, x_s, x_b, x_h, first, i, b, h, p, ALIGN: tl.constexpr):
    """Where (tokens, P) of a head are, of a chunk that begins at `first`."""
    begin = (first.to(tl.int64) * x_s + b.to(tl.int64) * x_b + h.to(tl.int64) * x_h) * ALIGN
    return x + begin + (i * (x_s * ALIGN))[:, None] + p[None, :]


@triton.jit
def _decays(adt, starts, first, i, inside, S, CHUNK: tl.constexpr, PACKED: tl.constexpr,
            WHOLE: tl.constexpr, APPROXIMATE: tl.constexpr, RANK: tl.constexpr = 1):  # fmt: skip
    """Decays, in powers of two: the log decay up to each token, from the chunk's begin; and
    factors: of the state before the chunk at a token (0 in later documents), of a token's part in
    the state after the chunk (0 of documents that have ended), of the state before in the state
    after. Last, the first token of each token's document (PACKED).

    RANK: rows that a token has here; adt has one value a token, which is its first row's."""
    if RANK == 1:
        upto = _vector(adt + i, inside, WHOLE) * LOG2E
    else:
        upto = tl.load(adt + i // RANK, mask=inside & (i % RANK == 0), other=0.0) * LOG2E
    total = tl.sum(upto, 0)
    upto = tl.cumsum(upto, 0)
    before, to_end = _exp2(upto, APPROXIMATE), _exp2(total - upto, APPROXIMATE)
    through = tl.exp2(total)
    start = i
    if PACKED:
        start = _starts(starts, first + i, S)
        last = tl.max(tl.where(inside, start, 0), 0)
        before = tl.where(start < first, before, 0.0)
        to_end = tl.where(start == last, to_end, 0.0)
        through = tl.where(last < first, through, 0.0)
    return upto, before, to_end, through, start


@triton.jit
def _state_at(h, b, i, p, n, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, COUNT):
    """The i-th of a head's COUNT states, (P, N)."""
    return ((b * H + h).to(tl.int64) * COUNT + i) * (P * N) + p[:, None] * N + n[None, :]


@triton.jit(do_not_specialize=["CHUNKS", "SEGMENT", "SEGMENTS"])
def mamba3_segment_states(
    x, v, adt, starts, sums, throughs,
    S, CHUNKS, SEGMENT, SEGMENTS, v_s, v_b, v_h,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, P_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr, CHUNK: tl.constexpr, ALIGN: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, REVERSE: tl.constexpr, APPROXIMATE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """sums (b, H, segments, P, N): what the tokens of a segment add to the state after it, x being
    k and v the values; REVERSE: to the gradient of the state before it, x being q and v the
    gradient of y. throughs (b, H, segments): the factor of what comes from beyond it.
    """
    h, segment, b = tl.program_id(0), tl.program_id(1) + REVERSE, tl.program_id(2)
    n, p, i = tl.arange(0, N_BLOCK), tl.arange(0, P_BLOCK), tl.arange(0, CHUNK)
    head = (b * H + h).to(tl.int64) * S
    state = tl.zeros((P_BLOCK, N_BLOCK), tl.float32)
    all_through = 1.0
    count = min(SEGMENT, CHUNKS - segment * SEGMENT)
    for step in tl.range(0, count, num_stages=STAGES):
        first = (segment * SEGMENT + (count - 1 - step if REVERSE else step)) * CHUNK
        inside = first + i < S
        to = head + first
        rows = _tile(x + to * N + i[:, None] * N + n[None, :], inside, n, N, N_BLOCK, WHOLE)
        at = _head(v, v_s, v_b, v_h, first, i, b, h, p, ALIGN)
        value = _tile(at, inside, p, P, P_BLOCK, WHOLE)
        _, before, to_end, through, _ = _decays(adt + to, starts, first, i, inside, S, CHUNK,
                                                PACKED, WHOLE, APPROXIMATE)  # fmt: skip
        rows = (rows * (before if REVERSE else to_end)[:, None]).to(value.dtype)
        state = tl.dot(tl.trans(value), rows, state * through)
        all_through = all_through * through
    at = _state_at(h, b, segment, p, n, H, P, N, SEGMENTS)
    tl.store(sums + at, state, mask=(p < P)[:, None] & (n < N)[None, :])
    tl.store(throughs + (b * H + h) * SEGMENTS + segment, all_through)


@triton.jit
def _beyond(sums, throughs, initial, h, b, segment, within, p, n, SEGMENTS, H: tl.constexpr,
            P: tl.constexpr, N: tl.constexpr, P_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr,
            REVERSE: tl.constexpr, CARRIED: tl.constexpr):  # fmt: skip
    """The state that a segment begins with, from the sums of those before it (REVERSE: after), and
    from `initial` (b, H, P, N), the row's (CARRIED)."""
    state = tl.zeros((P_BLOCK, N_BLOCK), tl.float32)
    if CARRIED:
        state = tl.load(initial + _state_at(h, b, 0, p, n, H, P, N, 1), mask=within, other=0.0)
    for step in range(SEGMENTS - 1 - segment if REVERSE else segment):
        j = SEGMENTS - 1 - step if REVERSE else step
        at = _state_at(h, b, j, p, n, H, P, N, SEGMENTS)
        through = tl.load(throughs + (b * H + h) * SEGMENTS + j)
        state = state * through + tl.load(sums + at, mask=within, other=0.0)
    return state


@triton.jit(do_not_specialize=["CHUNKS", "SEGMENT", "SEGMENTS"])
def mamba3_scan_forward(
    q, k, x, z, adt, scale, gamma, D, starts, sums, throughs, initial,
    y, inner, states, final, S, CHUNKS, SEGMENT, SEGMENTS,
    x_s, x_b, x_h, z_s, z_b, z_h, y_s, y_b, y_h,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, P_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr, CHUNK: tl.constexpr, ALIGN: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, SAVE: tl.constexpr, CARRIED: tl.constexpr,
    FINAL: tl.constexpr, APPROXIMATE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y, gated; SAVE: inner, y before the gate, and states (b, H, chunks, P, N) before each chunk.
    CARRIED: from `initial`, (b, H, P, N). FINAL: to `final`, the state after the row.

    gamma q k + D of a token's own value stands on the diagonal of the chunk's products of q and k.
    """
    h, segment, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, p, i = tl.arange(0, N_BLOCK), tl.arange(0, P_BLOCK), tl.arange(0, CHUNK)
    skip = tl.load(D + h)
    head = (b * H + h).to(tl.int64) * S
    within = (p < P)[:, None] & (n < N)[None, :]
    state = _beyond(sums, throughs, initial, h, b, segment, within, p, n, SEGMENTS, H, P, N,
                    P_BLOCK, N_BLOCK, False, CARRIED)  # fmt: skip
    begin = segment * SEGMENT
    for chunk in tl.range(begin, min(begin + SEGMENT, CHUNKS), num_stages=STAGES):
        first = chunk * CHUNK
        inside = first + i < S
        to = head + first
        at = to * N + i[:, None] * N + n[None, :]
        ks = _tile(k + at, inside, n, N, N_BLOCK, WHOLE)
        qs = _tile(q + at, inside, n, N, N_BLOCK, WHOLE)
        at = _head(x, x_s, x_b, x_h, first, i, b, h, p, ALIGN)
        value = _tile(at, inside, p, P, P_BLOCK, WHOLE)
        factor = _vector(scale + to + i, inside, WHOLE)
        own = _vector(gamma + to + i, inside, WHOLE)
        own = tl.where(factor > 0.0, own / tl.where(factor > 0.0, factor, 1.0), 0.0)
        upto, before, to_end, through, start = _decays(adt + to, starts, first, i, inside, S,
                                                       CHUNK, PACKED, WHOLE,
                                                       APPROXIMATE)  # fmt: skip
        weighted = (ks * to_end[:, None]).to(value.dtype)
        lower = state.to(value.dtype)
        if SAVE:
            at = _state_at(h, b, chunk, p, n, H, P, N, CHUNKS)
            tl.store(states + at, lower, mask=within)
        scores = tl.dot(qs, tl.trans(ks))
        earlier = i[:, None] > i[None, :]
        if PACKED:
            earlier = earlier & (start[:, None] == start[None, :])
        decayed = scores * _exp2(upto[:, None] - upto[None, :], APPROXIMATE)
        diagonal = tl.where(i[:, None] == i[None, :], scores * own[:, None] + skip, 0.0)
        scores = tl.where(earlier, decayed, diagonal).to(value.dtype)
        out = tl.dot(qs, tl.trans(lower)) * before[:, None]
        out = tl.dot(scores, value, out)
        state = tl.dot(tl.trans(value), weighted, state * through)
        if SAVE:
            at = inner + to * P + i[:, None] * P + p[None, :]
            _put(at, out, inside, p, P, P_BLOCK, WHOLE)
        at = _head(z, z_s, z_b, z_h, first, i, b, h, p, ALIGN)
        gate = _tile(at, inside, p, P, P_BLOCK, WHOLE).to(tl.float32)
        out = out * _silu(gate, APPROXIMATE)
        at = _head(y, y_s, y_b, y_h, first, i, b, h, p, ALIGN)
        _put(at, out, inside, p, P, P_BLOCK, WHOLE)
    if FINAL and segment == SEGMENTS - 1:
        tl.store(final + _state_at(h, b, 0, p, n, H, P, N, 1), state, mask=within)
