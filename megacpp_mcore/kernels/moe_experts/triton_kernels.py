"""Triton kernels of the fused experts: routing, copying tokens to rows and back, activation.

A row is one (token, expert) pair. Rows are sorted by expert, those of an expert by token. Each
expert's rows are padded to a multiple of ALIGN; token[row] is -1 in a padding row. rows[t, k] is
the row of token t's k-th expert, or -1 where a token has fewer experts. All sums are in float32.
"""

import triton
import triton.language as tl


@triton.jit
def moe_count_tokens(
    routing_map, counts, TOKENS, EXPERTS, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    """counts[block, expert]: how many of the block's tokens the expert gets."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    e = tl.arange(0, WIDTH)[None, :]
    chosen = _chosen(routing_map, t, e, TOKENS, EXPERTS)
    at = counts + tl.program_id(0) * EXPERTS + tl.arange(0, WIDTH)
    tl.store(at, tl.sum(chosen, 0), mask=tl.arange(0, WIDTH) < EXPERTS)


@triton.jit
def _chosen(routing_map, t, e, TOKENS, EXPERTS):
    at = t.to(tl.int64) * EXPERTS + e
    found = tl.load(routing_map + at, mask=(t < TOKENS) & (e < EXPERTS), other=0)
    return (found != 0).to(tl.int32)


@triton.jit
def moe_place_tokens(
    routing_map, probs, counts, token, row_probs, rows, ends, TOKENS, EXPERTS, BLOCKS, CAPACITY,
    TOPK: tl.constexpr, TOPK_WIDTH: tl.constexpr, ALIGN: tl.constexpr, PADS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A stable counting sort: every program adds up the counts of the blocks before its own.

    ends[expert]: where its rows end, padding included. CAPACITY: rows that there are.
    """
    block = tl.program_id(0)
    expert = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.int32)
    before = tl.zeros([WIDTH], tl.int32)
    for first in range(0, BLOCKS, CHUNK):
        b = first + tl.arange(0, CHUNK)[:, None]
        inside = (b < BLOCKS) & (expert[None, :] < EXPERTS)
        found = tl.load(counts + b * EXPERTS + expert[None, :], mask=inside, other=0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where(b < block, found, 0), 0)
    padded = (total + ALIGN - 1) // ALIGN * ALIGN
    end = tl.cumsum(padded, 0)
    start = end - padded

    t = block * BLOCK + tl.arange(0, BLOCK)[:, None]
    e = expert[None, :]
    chosen = _chosen(routing_map, t, e, TOKENS, EXPERTS)
    row = (start + before)[None, :] + tl.cumsum(chosen, 0) - chosen
    slot = tl.cumsum(chosen, 1) - chosen
    kept = (chosen != 0) & (slot < TOPK) & (row < CAPACITY)
    prob = tl.load(probs + t.to(tl.int64) * EXPERTS + e, mask=kept, other=0.0)
    tl.store(token + row, t + tl.zeros_like(row), mask=kept)
    tl.store(row_probs + row, prob.to(tl.float32), mask=kept)
    tl.store(rows + t * TOPK + slot, row, mask=kept)
    k = tl.arange(0, TOPK_WIDTH)[None, :]
    taken = tl.sum(chosen, 1)[:, None]
    tl.store(rows + t * TOPK + k, k * 0 - 1, mask=(t < TOKENS) & (k < TOPK) & (k >= taken))
    if block == 0:
        tl.store(ends + expert, end, mask=expert < EXPERTS)
        for first in range(0, ALIGN - 1, PADS):
            pad = (start + total)[None, :] + first + tl.arange(0, PADS)[:, None]
            inside = (pad < end[None, :]) & (e < EXPERTS)
            tl.store(token + pad, pad * 0 - 1, mask=inside)
            tl.store(row_probs + pad, pad * 0.0, mask=inside)


@triton.jit
def moe_spread(
    x, out, rows, token, ends, TOKENS, WIDTH, TOPK: tl.constexpr, PADS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[rows[t, k]] = x[t], and zeros in padding rows: a program for every token, then one for
    each of the PADS last rows of every expert, which may be padding."""
    t = tl.program_id(0)
    if t < TOKENS:
        for first in range(0, WIDTH, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < WIDTH
            value = tl.load(x + t.to(tl.int64) * WIDTH + column, mask=inside)
            for k in tl.static_range(TOPK):
                row = tl.load(rows + t * TOPK + k).to(tl.int64)
                tl.store(out + row * WIDTH + column, value, mask=inside & (row >= 0))
    else:
        pad = t - TOKENS
        row = (tl.load(ends + pad // PADS) - 1 - pad % PADS).to(tl.int64)
        if tl.load(token + row, mask=row >= 0, other=0) < 0:
            for first in range(0, WIDTH, BLOCK):
                column = first + tl.arange(0, BLOCK)
                zero = tl.zeros([BLOCK], out.dtype.element_ty)
                tl.store(out + row * WIDTH + column, zero, mask=column < WIDTH)


@triton.jit
def moe_combine(
    y, rows, out, one, other, WIDTH, TOPK: tl.constexpr, HAS_ONE: tl.constexpr,
    HAS_OTHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] = the sum of y[rows[t, k]] over k, plus one[t] and other[t]; rounded once."""
    t = tl.program_id(0).to(tl.int64)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < WIDTH
        at = t * WIDTH + column
        total = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(TOPK):
            row = tl.load(rows + t * TOPK + k).to(tl.int64)
            here = inside & (row >= 0)
            total += tl.load(y + row * WIDTH + column, mask=here, other=0.0).to(tl.float32)
        if HAS_ONE:
            total += tl.load(one + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_OTHER:
            total += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def moe_sum_gradients(
    y, rows, one, d_logits, gate, out, TOKENS, WIDTH, EXPERTS: tl.constexpr, TOPK: tl.constexpr,
    HAS_ONE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] = the sum of y[rows[t, k]] over k, plus one[t] and d_logits[t] gate, of TILE tokens
    and BLOCK columns; rounded once. d_logits [t, e], float32. gate [e, h].

    The product is no matrix product of the hardware's: it is small, its operands are shared by
    few tokens, and its float32 factor would have to be split.
    """
    t = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = t < TOKENS
    inside = there & (column < WIDTH)
    total = tl.zeros([TILE, BLOCK], tl.float32)
    for k in tl.static_range(TOPK):
        row = tl.load(rows + t * TOPK + k, mask=there, other=-1).to(tl.int64)
        here = inside & (row >= 0)
        total += tl.load(y + row * WIDTH + column, mask=here, other=0.0).to(tl.float32)
    if HAS_ONE:
        total += tl.load(one + t * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    for e in tl.static_range(EXPERTS):
        factor = tl.load(d_logits + t * EXPERTS + e, mask=there, other=0.0)
        weight = tl.load(gate + e * WIDTH + column, mask=column < WIDTH, other=0.0)
        total += factor * weight.to(tl.float32)
    tl.store(out + t * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def moe_activate(
    h, probs, a, ends, EXPERTS, SIZE, WIDTH, GATED: tl.constexpr, HAS_PROBS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """a = probs silu(gate) up of h = [gate, up] where GATED, otherwise probs relu(h)^2.

    Rows after the last expert's are not touched. Without HAS_PROBS every row counts, as it is.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    used = row < (tl.load(ends + EXPERTS - 1) if HAS_PROBS else SIZE)
    UP: tl.constexpr = 2 if GATED else 1
    at_h, at_a = h + row.to(tl.int64) * (UP * WIDTH), a + row.to(tl.int64) * WIDTH
    if HAS_PROBS:
        prob = tl.load(probs + row, mask=used, other=0.0).to(tl.float32)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        inside = used & (column < WIDTH)
        value = tl.load(at_h + column, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(at_h + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
            value = value * tl.sigmoid(value) * up
        else:
            value = tl.maximum(value, 0.0) * tl.maximum(value, 0.0)
        if HAS_PROBS:
            value *= prob
        tl.store(at_a + column, value.to(a.dtype.element_ty), mask=inside)


@triton.jit
def moe_activate_backward(
    da, h, probs, dh, a, dprobs, ends, EXPERTS, SIZE, WIDTH, GATED: tl.constexpr,
    HAS_PROBS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dh; with HAS_PROBS also a, recomputed for fc2's weight gradient, and the gradient of each
    row's probability. dh may be h, and a may be da: a value is read before its place is written."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    used = row < (tl.load(ends + EXPERTS - 1) if HAS_PROBS else SIZE)
    UP: tl.constexpr = 2 if GATED else 1
    at_h, at_a = row.to(tl.int64) * (UP * WIDTH), row.to(tl.int64) * WIDTH
    if HAS_PROBS:
        prob = tl.load(probs + row, mask=used, other=0.0).to(tl.float32)
        of_prob = tl.zeros([ROWS, 1], tl.float32)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        inside = used & (column < WIDTH)
        gate = tl.load(h + at_h + column, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(da + at_a + column, mask=inside, other=0.0).to(tl.float32)
        scaled = grad * prob if HAS_PROBS else grad
        kind = dh.dtype.element_ty
        if GATED:
            up = tl.load(h + at_h + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            value = silu * up
            d_gate = scaled * up * sigmoid * (1 + gate * (1 - sigmoid))
            tl.store(dh + at_h + WIDTH + column, (scaled * silu).to(kind), mask=inside)
        else:
            positive = tl.maximum(gate, 0.0)
            value = positive * positive
            d_gate = scaled * 2 * positive
        tl.store(dh + at_h + column, d_gate.to(kind), mask=inside)
        if HAS_PROBS:
            of_prob += tl.sum(grad * value, 1, keep_dims=True)
            tl.store(a + at_a + column, (value * prob).to(a.dtype.element_ty), mask=inside)
    if HAS_PROBS:
        tl.store(dprobs + row, of_prob, mask=used)


@triton.jit
def moe_gather_probs(
    routing_map, rows, row_grads, grads, TOKENS, EXPERTS, TOPK: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """grads[t, e] = row_grads of the pair's row, 0 where there is none."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    e = tl.arange(0, WIDTH)[None, :]
    chosen = _chosen(routing_map, t, e, TOKENS, EXPERTS)
    slot = tl.cumsum(chosen, 1) - chosen
    kept = (chosen != 0) & (slot < TOPK)
    row = tl.load(rows + t * TOPK + slot, mask=kept, other=0)
    grad = tl.load(row_grads + row, mask=kept & (row >= 0), other=0.0)
    at = t.to(tl.int64) * EXPERTS + e
    tl.store(grads + at, grad.to(grads.dtype.element_ty), mask=(t < TOKENS) & (e < EXPERTS))
