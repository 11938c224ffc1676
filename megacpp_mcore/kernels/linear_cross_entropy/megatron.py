"""Megatron's output layer and cross entropy: the logits in memory, and a float32 softmax of them.

A model for which dispatch chooses this backend makes its losses by Megatron's own forward pass and
never comes here (`megacpp_mcore.layers.loss`); a bench and the admission suite do.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor
from torch.nn import functional

from megacpp_mcore.kernels.linear_cross_entropy.inputs import (
    IGNORE_INDEX,
    Head,
    LinearCrossEntropyInputError,
    check_inputs,
    check_labels,
    options_of,
    rank_of,
)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    tp_group: Any = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    loss_weights: Tensor | None = None,
) -> Tensor:
    """As the surface's. Without a tp_group Megatron's own is needed, of one rank.

    Raises LinearCrossEntropyInputError also for what Megatron's cross entropy has not: float64, a
    z-loss, and label smoothing over the whole of a split vocabulary.
    """
    options = options_of(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    check_inputs(hidden, weight, labels, options, tp_group, loss_weights)
    ranks = rank_of(tp_group)[1]
    if hidden.dtype == torch.float64 or z_loss or (label_smoothing and ranks > 1):
        raise LinearCrossEntropyInputError(
            f"hidden is {hidden.dtype}, z_loss {z_loss}, label_smoothing {label_smoothing} over "
            f"{ranks} ranks: Megatron's cross entropy has no float64, no z-loss, and smoothes over "
            "a rank's part of the vocabulary; use the backend 'reference'"
        )
    check_labels(labels, weight.shape[0] * ranks, ignore_index)
    logits = functional.linear(hidden, weight)
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    losses = vocab_parallel_cross_entropy(logits, labels.contiguous(), label_smoothing, tp_group)
    return losses.masked_fill(labels == ignore_index, 0.0)


def weighted_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """As the surface's; raises as `linear_cross_entropy`."""
    losses = linear_cross_entropy(hidden, weight, labels, loss_weights=loss_weights, **options)
    return (losses * loss_weights).sum(), losses.detach()


MEGATRON = Head(linear_cross_entropy, weighted_linear_cross_entropy)
