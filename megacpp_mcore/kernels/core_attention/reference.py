"""Causal attention as it is defined, with the scores of every head in memory.

Math (Vaswani et al., Attention Is All You Need, 3.2.1; sliding window: Beltagy et al., Longformer,
3.1), per head, queries grouped as in GQA, over the last `window` tokens before i and i itself:

    P_ij = exp(scale q_i k_j) / sum_{i - window <= l <= i} exp(scale q_i k_l)    for j so, else 0
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

    window: tokens before its own that a query sees; all of them when None.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    seen = hidden.tril() if window is None else hidden.tril().triu(-window)
    weights = (scores * scale).masked_fill(~seen, -math.inf).softmax(-1)
    return functional.dropout(weights, dropout).to(v.dtype) @ v
