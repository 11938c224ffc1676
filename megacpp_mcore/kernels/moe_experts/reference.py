"""The experts as they are defined, one after another.

Math (Shazeer, GLU Variants Improve Transformer, eq. 6; the router's weight multiplies fc2's input,
as in Megatron, which is the same as fc2 has no bias), for a token x of expert e with weight p:

    [a, b] = W1_e x        y = W2_e (p silu(a) b)
"""

import torch
from torch import Tensor
from torch.nn import functional


def experts(x: Tensor, counts: Tensor, w1: Tensor, w2: Tensor, probs: Tensor) -> Tensor:
    """Shapes as in the package."""
    sizes = counts.tolist()
    outputs = [
        weighted_swiglu(tokens @ up.t(), weights) @ down.t()
        for tokens, weights, up, down in zip(
            x.split(sizes), probs.split(sizes), w1, w2, strict=True
        )
    ]
    return torch.cat(outputs)


def weighted_swiglu(h: Tensor, probs: Tensor) -> Tensor:
    """h (t, 2f) -> (t, f) in h's dtype: silu of the first half, times the second, times probs."""
    gate, up = h.chunk(2, dim=-1)
    return (functional.silu(gate) * up * probs.unsqueeze(-1)).to(h.dtype)
