"""The router's choice as Megatron defines it, in plain torch.

Math: sigmoid scores with a bias that only selects (DeepSeek-V3, arXiv 2412.19437, eq. 16) and the
load-balancing loss of Switch Transformers (arXiv 2101.03961, eq. 4), as Megatron-Core's
`topk_routing_with_score_function` and `switch_load_balancing_loss_func` have them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_EPSILON = 1e-20  # Megatron's


class Choice(NamedTuple):
    """probs (t, E): weights of a token's experts, 0 for the others. routing_map (t, E), bool.
    counts (E,), int32: the tokens of each expert. balance (): `scale` times the sum over experts of
    the tokens that have the expert among their highest scores, and of its shares of the scores."""

    probs: Tensor
    routing_map: Tensor
    counts: Tensor
    balance: Tensor


def router_topk(
    logits: Tensor, bias: Tensor | None, topk: int, scaling: float = 1.0, scale: float = 1.0
) -> Choice:
    """logits (t, E), bias (E,) or None -> the `topk` experts of every token.

    The bias is added to the scores for the choice alone. scaling: of the weights. scale: of
    balance.
    """
    scores = logits.sigmoid()
    chosen = scores.detach() if bias is None else scores.detach() + bias
    routing_map = _marked(chosen, topk)
    picked = scores * routing_map
    if topk > 1:
        picked = picked / (picked.sum(-1, keepdim=True) + _EPSILON)
    shares = scores / (scores.sum(-1, keepdim=True) + _EPSILON)
    balance_counts = _marked(scores.detach(), topk).sum(0)
    balance = scale * (shares.sum(0) * balance_counts).sum()
    return Choice(picked * scaling, routing_map, routing_map.sum(0, dtype=torch.int32), balance)


def _marked(scores: Tensor, topk: int) -> Tensor:
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return chosen.scatter_(1, scores.topk(topk, dim=1).indices, True)
