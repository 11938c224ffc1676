"""Logits and their cross entropy as they are defined, the logits of all tokens in memory.

Math, for a token with hidden state x and label l:

    z = W x        loss = log(sum_v exp(z_v)) - z_l
"""

import torch
from torch import Tensor
from torch.nn import functional


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """hidden (s, b, h), weight (V, h), labels (s, b) integers in [0, V) -> losses (s, b), in nats.

    The losses are float32, or float64 for float64: nothing is averaged or masked. The logits are in
    hidden's dtype, as Megatron's output layer makes them, and widened for the sum. A label outside
    [0, V) raises IndexError or RuntimeError on a CPU and stops a GPU's process.
    """
    logits = functional.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # The largest goes out first: of two sums near it the difference would be rounded away.
    logits = logits - logits.detach().amax(-1, keepdim=True)
    picked = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return logits.exp().sum(-1).log() - picked
