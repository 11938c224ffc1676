"""Causal attention as it is defined, with the scores of every head in memory.

Math (Vaswani et al., Attention Is All You Need, 3.2.1), per head, queries grouped as in GQA:

    P_ij = exp(scale q_i k_j) / sum_{l <= i} exp(scale q_i k_l)    for j <= i, else 0
    y_i  = sum_j P_ij v_j
"""

import math

import torch
from torch import Tensor
from torch.nn import functional


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float = 0.0) -> Tensor:
    """Shapes as in the package; the softmax is computed in float32, or float64 for float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    weights = (scores * scale).masked_fill(future, -math.inf).softmax(-1)
    return functional.dropout(weights, dropout).to(v.dtype) @ v
