"""Logits and their cross entropy as they are defined, with the logits of all tokens in memory.

Math, for a token with hidden state x and label l, V the size of the whole vocabulary:

    u = logit_scale W x              z = u, or with a softcap c: c tanh(u / c)
    lse = log(sum_v exp(z_v))
    loss = lse - (1 - s) z_l - s mean_v(z_v) + z_loss lse^2,     s = label_smoothing V / (V - 1)

The smoothing is Megatron-Core's (`tensor_parallel/cross_entropy.py`): label_smoothing is shared out
among the V - 1 wrong classes. Megatron has no z-loss on its head; this is PaLM's
(arXiv 2204.02311), with the coefficient in front.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from megacpp_mcore.kernels.linear_cross_entropy.inputs import Options, check_labels, rank_of


def per_token(
    hidden: Tensor, weight: Tensor, labels: Tensor, options: Options, tp_group: Any = None
) -> Tensor:
    """The losses: hidden (..., h), weight (V_local, h), labels (...) -> (...).

    In float32, or float64 for float64. The logits are in hidden's dtype, as Megatron's output layer
    makes them, and widened before anything else.
    """
    rank, ranks = rank_of(tp_group)
    own = weight.shape[0]
    check_labels(labels, own * ranks, options.ignore_index)
    logits = functional.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * options.logit_scale
    if options.softcap:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    largest = logits.detach().amax(-1, keepdim=True)
    if ranks > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, tp_group)
    # Subtract the largest first: the difference of two large sums would lose the loss's bits.
    logits = logits - largest
    label = labels - rank * own
    is_own = (label >= 0) & (label < own)
    picked = logits.gather(-1, (label * is_own).unsqueeze(-1)).squeeze(-1) * is_own
    sums = torch.stack([logits.exp().sum(-1), picked, logits.sum(-1)])
    if ranks > 1:
        sums = _Sum.apply(sums, tp_group)
    exponentials, picked, total = sums
    lse = exponentials.log()
    vocab_size = own * ranks
    smoothing = smoothing_of(options, vocab_size)
    losses = lse - (1 - smoothing) * picked - smoothing * total / vocab_size
    if options.z_loss:
        losses = losses + options.z_loss * (lse + largest.squeeze(-1)) ** 2
    return losses.masked_fill(labels == options.ignore_index, 0.0)


def smoothing_of(options: Options, vocab_size: int) -> float:
    """s of the math: the weight of the mean over all classes, the right one among them."""
    if not options.label_smoothing:
        return 0.0
    return options.label_smoothing * vocab_size / (vocab_size - 1)


class _Sum(torch.autograd.Function):
    """The sum over the ranks. Every rank has the same loss and differentiates it once, so the
    gradient of a rank's addend is that of the sum."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
