"""The E layer from router to output as it is defined, in plain float64: token by token where a
choice is made, expert by expert where something is computed. Nothing of it is Megatron's or ours.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Whole:
    """y: [s, b, h]. losses: what the router adds to the objective. chosen: (tokens, E), bool.

    margin: by how much the closest of all choices was decided, as a share of the largest of the
    scores that were compared.
    """

    y: Tensor
    losses: Tensor
    chosen: Tensor
    margin: float


def whole_layer(recipe, weights: dict[str, Tensor], x: Tensor, bias: Tensor | None) -> Whole:
    """weights: by the layer's names, in float64, as x [s, b, h]. bias: of the experts' choice, as
    the router has it: expert_bias, or qb_beta, which is taken away."""
    moe, (length, rows, hidden) = recipe.moe, x.shape
    tokens = x.reshape(-1, hidden)
    logits = tokens @ weights["router.weight"].t()
    choice = _Choice()
    chosen = _chosen(moe, logits.detach(), bias, choice)
    probs = _probs(moe, logits, chosen)
    y = torch.zeros_like(tokens)
    for expert in range(moe.num_experts):
        taken = chosen[:, expert].nonzero().flatten()
        up = weights["experts.linear_fc1.weight"][expert]
        down = weights["experts.linear_fc2.weight"][expert]
        inner = _activated(recipe, tokens[taken] @ up.t()) * probs[taken, expert, None]
        y = y.index_add(0, taken, inner @ down.t())
    y = y + _shared(recipe, weights, tokens)
    losses = _losses(moe, logits, length, rows, choice)
    return Whole(y.view_as(x), losses, chosen, choice.margin)


def _activated(recipe, h: Tensor) -> Tensor:
    if recipe.model.squared_relu:
        return functional.relu(h) ** 2
    gate, up = h.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def _shared(recipe, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    if recipe.moe.moe_shared_expert_intermediate_size is None:
        return torch.zeros_like(tokens)
    up, down = (weights[f"shared_experts.linear_fc{i}.weight"] for i in (1, 2))
    y = _activated(recipe, tokens @ up.t()) @ down.t()
    if recipe.moe.moe_shared_expert_gate:
        y = y * torch.sigmoid(tokens @ weights["shared_experts.gate_weight"].t())
    return y


class _Choice:
    """The best k of some scores, and how close it was."""

    margin = math.inf

    def best(self, scores: list[float], k: int, among: set[int] | None = None) -> set[int]:
        among = set(range(len(scores))) if among is None else among
        order = sorted(among, key=lambda i: -scores[i])
        if len(order) > k:
            gap = scores[order[k - 1]] - scores[order[k]]
            self.margin = min(self.margin, gap / max(map(abs, scores)))
        return set(order[:k])


def _chosen(moe, logits: Tensor, bias: Tensor | None, choice: _Choice) -> Tensor:
    """(tokens, E), bool: each token's experts."""
    scores = _deciding(moe, logits, bias)
    chosen = torch.zeros_like(logits, dtype=torch.bool)
    for token, row in enumerate(scores.tolist()):
        among = _of_best_groups(moe, row, choice) if moe.moe_router_group_topk else None
        chosen[token, list(choice.best(row, moe.moe_router_topk, among))] = True
    return chosen


def _of_best_groups(moe, scores: list[float], choice: _Choice) -> set[int]:
    """The experts of the groups whose best experts' scores have the largest sums."""
    size = len(scores) // moe.moe_router_num_groups
    each = moe.moe_router_topk // moe.moe_router_group_topk
    groups = [scores[i : i + size] for i in range(0, len(scores), size)]
    sums = [sum(sorted(group, reverse=True)[:each]) for group in groups]
    best = choice.best(sums, moe.moe_router_group_topk)
    return {group * size + i for group in best for i in range(size)}


def _deciding(moe, logits: Tensor, bias: Tensor | None) -> Tensor:
    """The scores by which a token's experts are chosen."""
    (kind, *_) = moe.moe_router_load_balancing_type
    if kind == "sinkhorn":
        return _balanced(logits)
    if kind == "quantile_balancing":
        return logits - bias
    if moe.moe_router_score_function == "softmax" and not moe.moe_router_pre_softmax:
        return logits
    scores = _scores(moe, logits)
    return scores if bias is None else scores + bias


def _balanced(logits: Tensor) -> Tensor:
    """Sinkhorn's scaling of exp(logits): rows that sum to 1 / tokens and columns to 1 / E."""
    cost = logits.exp()
    column = torch.ones(cost.shape[1], dtype=cost.dtype)
    change = math.inf
    while change > 1e-4:  # Megatron's
        row = 1 / (cost.shape[0] * (cost @ column + 1e-8))
        before, column = column, 1 / (cost.shape[1] * (row @ cost + 1e-8))
        change = (column - before).abs().mean().item()
    return row[:, None] * cost * column


def _scores(moe, logits: Tensor) -> Tensor:
    if moe.moe_router_score_function == "softmax":
        return torch.softmax(logits, dim=-1)
    if moe.moe_router_score_function == "sigmoid":
        return torch.sigmoid(logits)
    return functional.softplus(logits).sqrt()


def _probs(moe, logits: Tensor, chosen: Tensor) -> Tensor:
    """What each token's experts are multiplied by; 0 elsewhere."""
    if moe.moe_router_load_balancing_type[0] == "sinkhorn":
        one = moe.moe_router_topk == 1
        return (torch.sigmoid(logits) if one else torch.softmax(logits, dim=-1)) * chosen
    if moe.moe_router_score_function == "softmax":
        among = logits if moe.moe_router_pre_softmax else logits.masked_fill(~chosen, -math.inf)
        probs = torch.softmax(among, dim=-1) * chosen
    else:
        probs = _scores(moe, logits) * chosen
        if moe.moe_router_topk > 1:
            probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs * (moe.moe_router_topk_scaling_factor or 1)


def _losses(moe, logits: Tensor, length: int, rows: int, choice: _Choice) -> Tensor:
    """The z loss and the load balancing losses, each times its coefficient."""
    total = (moe.moe_z_loss_coeff or 0) * (torch.logsumexp(logits, dim=-1) ** 2).mean()
    kinds = dict(zip(moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff, strict=True))
    if not any(kinds.values()):
        return total
    scores = _scores(moe, logits)
    scores = scores / scores.sum(dim=-1, keepdim=True)
    taken = torch.zeros_like(scores)
    for token, row in enumerate(scores.tolist()):
        taken[token, list(choice.best(row, moe.moe_router_topk))] = 1
    by_sequence = [t.view(length, rows, -1).unbind(1) for t in (scores, taken)]
    of_sequences = [_uneven(*pair) for pair in zip(*by_sequence, strict=True)]
    of_all = _uneven(scores, taken)
    # Of one micro batch on one rank the global loss is that of all tokens.
    found = {
        "seq_aux_loss": sum(of_sequences) / rows,
        "aux_loss": of_all,
        "global_aux_loss": of_all,
    }
    return total + sum(coefficient * found[kind] for kind, coefficient in kinds.items())


def _uneven(scores: Tensor, taken: Tensor) -> Tensor:
    """E times the sum over experts of their share of the choices times their mean score."""
    share = taken.sum(0) / taken.sum()
    return scores.shape[1] * (share * scores.mean(0)).sum()
