"""Triton kernels of the router's choice: scores, top-k, weights and the balance of the load.

A program has BLOCK tokens and all experts, WIDTH of them with padding. Sums over tokens are made
in two steps, a row of `partial` for each program, so that their order is always the same.
"""

import triton
import triton.language as tl

EPSILON = tl.constexpr(1e-20)  # Megatron's, in both denominators


@triton.jit
def router_choose(
    logits, bias, probs, routing_map, counts, balance_counts, score_sums, TOKENS, EXPERTS, SCALING,
    TOPK: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """probs and routing_map [t, e]; of the program's tokens, for each expert: how many choose it,
    how many would without the bias, and the sum of its share of their scores."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    e = tl.arange(0, WIDTH)[None, :]
    inside = (t < TOKENS) & (e < EXPERTS)
    at = t.to(tl.int64) * EXPERTS + e
    score = tl.where(inside, tl.sigmoid(tl.load(logits + at, mask=inside, other=0.0)), 0.0)
    unbiased = _topk(score, inside, e, TOPK, WIDTH)
    if HAS_BIAS:
        offset = tl.load(bias + e, mask=e < EXPERTS, other=0.0)
        chosen = _topk(score + offset, inside, e, TOPK, WIDTH)
    else:
        chosen = unbiased
    prob = tl.where(chosen, score, 0.0)
    if TOPK > 1:
        prob = prob / (tl.sum(prob, 1, keep_dims=True) + EPSILON)
    tl.store(probs + at, prob * SCALING, mask=inside)
    tl.store(routing_map + at, chosen.to(tl.uint8), mask=inside)

    share = score / (tl.sum(score, 1, keep_dims=True) + EPSILON)
    expert = tl.arange(0, WIDTH)
    row = tl.program_id(0) * EXPERTS + expert
    there = expert < EXPERTS
    tl.store(counts + row, tl.sum(chosen.to(tl.int32), 0), mask=there)
    tl.store(balance_counts + row, tl.sum(unbiased.to(tl.int32), 0), mask=there)
    tl.store(score_sums + row, tl.sum(share, 0), mask=there)


@triton.jit
def _topk(value, inside, e, TOPK: tl.constexpr, WIDTH: tl.constexpr):
    """Marks the TOPK largest of each row; of equal ones the first. NaN is larger than anything, as
    in torch.topk, so that it reaches the weights."""
    left = tl.where(inside, tl.where(value == value, value, float("inf")), -float("inf"))
    chosen = inside & (e < 0)
    for _ in tl.static_range(TOPK):
        largest = tl.max(left, 1, keep_dims=True)
        first = tl.min(tl.where((left == largest) & ~chosen & inside, e, WIDTH), 1, keep_dims=True)
        chosen = chosen | (e == first)
        left = tl.where(chosen, -float("inf"), left)
    return chosen


@triton.jit
def router_balance(
    counts, balance_counts, score_sums, total_counts, total_balance_counts, balance, EXPERTS,
    BLOCKS, SCALE, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Adds up the programs' rows, and balance = SCALE * sum of score_sums * balance_counts."""
    expert = tl.arange(0, WIDTH)
    there = expert < EXPERTS
    chosen = tl.zeros([WIDTH], tl.int32)
    unbiased = tl.zeros([WIDTH], tl.int32)
    scores = tl.zeros([WIDTH], tl.float32)
    for first in range(0, BLOCKS, CHUNK):
        b = first + tl.arange(0, CHUNK)[:, None]
        at = b * EXPERTS + expert[None, :]
        inside = (b < BLOCKS) & there[None, :]
        chosen += tl.sum(tl.load(counts + at, mask=inside, other=0), 0)
        unbiased += tl.sum(tl.load(balance_counts + at, mask=inside, other=0), 0)
        scores += tl.sum(tl.load(score_sums + at, mask=inside, other=0.0), 0)
    tl.store(total_counts + expert, chosen, mask=there)
    tl.store(total_balance_counts + expert, unbiased, mask=there)
    tl.store(balance, SCALE * tl.sum(scores * unbiased.to(tl.float32), 0))


@triton.jit
def router_choose_backward(
    logits, routing_map, d_probs, balance_counts, d_balance, d_logits, TOKENS, EXPERTS, SCALING,
    SCALE, TOPK: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits [t, e] from those of probs [t, e] and of balance."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    e = tl.arange(0, WIDTH)[None, :]
    inside = (t < TOKENS) & (e < EXPERTS)
    at = t.to(tl.int64) * EXPERTS + e
    score = tl.where(inside, tl.sigmoid(tl.load(logits + at, mask=inside, other=0.0)), 0.0)
    chosen = tl.load(routing_map + at, mask=inside, other=0) != 0
    d_prob = tl.load(d_probs + at, mask=chosen, other=0.0) * SCALING
    d_score = d_prob
    if TOPK > 1:
        picked = tl.where(chosen, score, 0.0)
        d_score = tl.where(chosen, _of_shares(d_prob, picked), 0.0)
    n = tl.load(balance_counts + e, mask=e < EXPERTS, other=0).to(tl.float32)
    d_score += _of_shares(tl.load(d_balance) * SCALE * n, score)
    tl.store(d_logits + at, d_score * score * (1 - score), mask=inside)


@triton.jit
def _of_shares(d_share, score):
    """The gradient of scores from that of score / (sum of a token's scores)."""
    total = tl.sum(score, 1, keep_dims=True) + EPSILON
    return (d_share - tl.sum(d_share * score, 1, keep_dims=True) / total) / total
