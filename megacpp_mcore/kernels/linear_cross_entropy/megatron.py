"""Megatron's output layer and cross entropy: the logits in memory, and a float32 softmax of them.

Only a bench and the admission suite call this. A model for which dispatch chooses this backend
computes its losses in Megatron's own forward pass (`megacpp_mcore.layers.loss`).
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor
from torch.nn import functional

from megacpp_mcore.kernels.linear_cross_entropy.head import head_of
from megacpp_mcore.kernels.linear_cross_entropy.inputs import (
    LinearCrossEntropyInputError,
    Options,
    check_labels,
    rank_of,
)


def per_token(
    hidden: Tensor, weight: Tensor, labels: Tensor, options: Options, tp_group: Any
) -> Tensor:
    """The losses of `Head.per_token`. Without a tp_group, Megatron's own group must have one rank.

    Raises LinearCrossEntropyInputError also for what Megatron's cross entropy lacks: float64, a
    z-loss, and label smoothing over the whole of a split vocabulary.
    """
    ranks = rank_of(tp_group)[1]
    if hidden.dtype == torch.float64 or options.z_loss or (options.label_smoothing and ranks > 1):
        raise LinearCrossEntropyInputError(
            f"hidden is {hidden.dtype}, z_loss {options.z_loss}, label_smoothing "
            f"{options.label_smoothing} over {ranks} ranks: Megatron's cross entropy has no "
            "float64, no z-loss, and smoothes over a rank's part of the vocabulary; use the "
            "backend 'reference'"
        )
    check_labels(labels, weight.shape[0] * ranks, options.ignore_index)
    logits = functional.linear(hidden, weight)
    if options.logit_scale != 1.0:
        logits = logits * options.logit_scale
    if options.softcap:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    losses = vocab_parallel_cross_entropy(
        logits, labels.contiguous(), options.label_smoothing, tp_group
    )
    return losses.masked_fill(labels == options.ignore_index, 0.0)


MEGATRON = head_of(per_token)
