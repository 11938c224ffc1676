"""The Triton kernels of a Mamba-3 MIMO scan; `mimo_ops.py` launches them. Those of the backward
pass are in `mimo_backward_kernels.py`.

A token of rank R is R rows here: q and k of a rank each, and the value x times mimo_v[r]. Rows of
one token see each other and those of every earlier one, so that the scan is SISO's over rows with
other masks: with t(i) the token of row i, L_ij the decay between two tokens, c = scale and g =
gamma of the earlier row's token (`mamba3_core/around.py`), S the state before a chunk, T after it,
e_i and r_j the decays from its begin and to its end, and d the gradient of Y:

    W_ij = L_ij c_j for t(j) < t(i), g_j for t(j) = t(i), else 0
    Y_i  = e_i S q_i + sum_j W_ij (q_i k_j) v_j + D v_i
    T    = e S + sum_j r_j c_j v_j k_j^T
    y_t  = sum_r Y_tr silu(z_t mimo_z[r]) mimo_out[r]

    dq_i = e_i S^T d_i + sum_j W_ij (d_i v_j) k_j
    dk_j = r_j c_j dT^T v_j + sum_i W_ij (d_i v_j) q_i
    dv_j = r_j c_j dT k_j + sum_i W_ij (q_i k_j) d_i + D d_j
    dS   = e dT + sum_i e_i d_i q_i^T
    dc_j = r_j v_j dT k_j + sum_{t(i)>t(j)} L_ij (q_i k_j) (d_i v_j)
    dg_j = sum_{t(i)=t(j)} (q_i k_j) (d_i v_j)
    da_t = sum_{t(i)>=t} (e_i q_i S^T d_i + sum_j c_j L_ij (q_i k_j) (d_i v_j)) - c_i dc_i + <T, dT>

Only q, k and Y have R rows a token in memory: x, z and y are read and written once. Layouts: q, k
(b, H, s R, N); adt, scale, gamma (b, H, s); x, z in any strides of token, sequence and head, given
divided by ALIGN; y, dx (b, s, H, P); mimo_* (H, R, P); what only kernels see (b, H, s R, ...).
S: rows of a sequence. A chunk has CHUNK rows. WHOLE: CHUNK divides S. Other words are those of
`mamba3_core/scan_kernels.py`.
"""

import triton
import triton.language as tl

from megacpp_mcore.kernels.mamba3_core.scan_kernels import (
    _beyond,
    _decays,
    _exp2,
    _head,
    _put,
    _silu,
    _state_at,
    _tile,
    _vector,
)


@triton.jit
def _of_rank(at, h, i, p, RANK: tl.constexpr, P: tl.constexpr):
    """A head's (R, P) parameters, of each row's rank."""
    at = at + (h * RANK + i % RANK)[:, None] * P + p[None, :]
    return tl.load(at, mask=(p < P)[None, :], other=0.0)


@triton.jit
def _rows_of(x, x_s, x_b, x_h, first, i, b, h, p, inside, RANK: tl.constexpr, P: tl.constexpr,
             P_BLOCK: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """(rows, P): each token of a head as often as it has rows."""
    at = _head(x, x_s, x_b, x_h, first // RANK, i // RANK, b, h, p, ALIGN)
    return _tile(at, inside, p, P, P_BLOCK, WHOLE)


@triton.jit(do_not_specialize=["CHUNKS", "SEGMENT", "SEGMENTS"])
def mimo_states(
    rows, values, mimo_v, adt, scale, starts, sums, throughs, S, CHUNKS, SEGMENT, SEGMENTS,
    v_s, v_b, v_h,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, P_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr, CHUNK: tl.constexpr, RANK: tl.constexpr, ALIGN: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, REVERSE: tl.constexpr, APPROXIMATE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """As `mamba3_segment_states`: rows are k and the values x. REVERSE: rows are q, and the values
    d, (b, H, s R, P)."""
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
        tile = _tile(rows + to * N + i[:, None] * N + n[None, :], inside, n, N, N_BLOCK, WHOLE)
        _, before, to_end, through, _ = _decays(adt + to // RANK, starts, first, i, inside, S,
                                                CHUNK, PACKED, WHOLE, APPROXIMATE,
                                                RANK)  # fmt: skip
        if REVERSE:
            at = values + to * P + i[:, None] * P + p[None, :]
            value = _tile(at, inside, p, P, P_BLOCK, WHOLE)
            weight = before
        else:
            value = _rows_of(values, v_s, v_b, v_h, first, i, b, h, p, inside, RANK, P, P_BLOCK,
                             ALIGN, WHOLE)  # fmt: skip
            value = (value * _of_rank(mimo_v, h, i, p, RANK, P)).to(tile.dtype)
            weight = to_end * _vector(scale + to // RANK + i // RANK, inside, WHOLE)
        tile = (tile * weight[:, None]).to(value.dtype)
        state = tl.dot(tl.trans(value), tile, state * through)
        all_through = all_through * through
    at = _state_at(h, b, segment, p, n, H, P, N, SEGMENTS)
    tl.store(sums + at, state, mask=(p < P)[:, None] & (n < N)[None, :])
    tl.store(throughs + (b * H + h) * SEGMENTS + segment, all_through)


@triton.jit(do_not_specialize=["CHUNKS", "SEGMENT", "SEGMENTS"])
def mimo_forward(
    q, k, x, z, adt, scale, gamma, D, mimo_v, mimo_z, mimo_out, starts, sums, throughs, initial,
    y, inner, states, final, S, CHUNKS, SEGMENT, SEGMENTS, x_s, x_b, x_h, z_s, z_b, z_h,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, P_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr, CHUNK: tl.constexpr, RANK: tl.constexpr, ALIGN: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, SAVE: tl.constexpr, CARRIED: tl.constexpr,
    FINAL: tl.constexpr, APPROXIMATE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y. SAVE: inner, which is Y, and states (b, H, chunks, P, N) before each chunk. CARRIED: from
    `initial`, (b, H, P, N). FINAL: to `final`, the state after the row."""
    h, segment, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, p, i = tl.arange(0, N_BLOCK), tl.arange(0, P_BLOCK), tl.arange(0, CHUNK)
    t = tl.arange(0, CHUNK // RANK)
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
        value = _rows_of(x, x_s, x_b, x_h, first, i, b, h, p, inside, RANK, P, P_BLOCK, ALIGN,
                         WHOLE)  # fmt: skip
        value = (value * _of_rank(mimo_v, h, i, p, RANK, P)).to(ks.dtype)
        weight = _vector(scale + to // RANK + i // RANK, inside, WHOLE)
        own = _vector(gamma + to // RANK + i // RANK, inside, WHOLE)
        upto, before, to_end, through, start = _decays(adt + to // RANK, starts, first, i, inside,
                                                       S, CHUNK, PACKED, WHOLE, APPROXIMATE,
                                                       RANK)  # fmt: skip
        lower = state.to(value.dtype)
        if SAVE:
            at = _state_at(h, b, chunk, p, n, H, P, N, CHUNKS)
            tl.store(states + at, lower, mask=within)
        earlier = (i // RANK)[:, None] > (i // RANK)[None, :]
        if PACKED:
            earlier = earlier & (start[:, None] == start[None, :])
        fade = _exp2(upto[:, None] - upto[None, :], APPROXIMATE) * weight[None, :]
        same = (i // RANK)[:, None] == (i // RANK)[None, :]
        fade = tl.where(earlier, fade, tl.where(same, own[None, :], 0.0))
        scores = tl.dot(qs, tl.trans(ks)) * fade
        scores += tl.where(i[:, None] == i[None, :], skip, 0.0)
        out = tl.dot(qs, tl.trans(lower)) * before[:, None]
        out = tl.dot(scores.to(value.dtype), value, out)
        weighted = (ks * (to_end * weight)[:, None]).to(value.dtype)
        state = tl.dot(tl.trans(value), weighted, state * through)
        if SAVE:
            at = inner + to * P + i[:, None] * P + p[None, :]
            _put(at, out, inside, p, P, P_BLOCK, WHOLE)
        gate = _rows_of(z, z_s, z_b, z_h, first, i, b, h, p, inside, RANK, P, P_BLOCK, ALIGN,
                        WHOLE).to(tl.float32)  # fmt: skip
        gate = gate * _of_rank(mimo_z, h, i, p, RANK, P)
        out = out * _silu(gate, APPROXIMATE) * _of_rank(mimo_out, h, i, p, RANK, P)
        out = tl.sum(tl.reshape(out, (CHUNK // RANK, RANK, P_BLOCK)), 1)
        token = first // RANK + t
        at = (b.to(tl.int64) * (S // RANK) + token) * (H * P) + h * P
        at = y + at[:, None] + p[None, :]
        _put(at, out, token < S // RANK, p, P, P_BLOCK, WHOLE)
    if FINAL and segment == SEGMENTS - 1:
        tl.store(final + _state_at(h, b, 0, p, n, H, P, N, 1), state, mask=within)
