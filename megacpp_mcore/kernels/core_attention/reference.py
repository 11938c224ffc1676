"""Causal attention as it is defined, with the scores of every head in memory.

Math (Vaswani et al., Attention Is All You Need, 3.2.1; sliding window: Beltagy et al., Longformer,
3.1), per head, queries grouped as in GQA, where query i sees the keys j with i - window <= j <= i:

    P_ij = exp(scale q_i k_j) / sum_{i - window <= l <= i} exp(scale q_i k_l)    0 for other j
    y_i  = sum_j P_ij v_j
"""

import math

import torch
from torch import Tensor
from torch.nn import functional


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float = 0.0,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Shapes as in the package; the softmax is computed in float32, or float64 for float64.

    window: how many earlier tokens a query sees; None is all of them.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    seen = ones.tril() if window is None else ones.tril().triu(-window)
    weights = (scores * scale).masked_fill(~seen, -math.inf).softmax(-1)
    return functional.dropout(weights, dropout).to(v.dtype) @ v
