"""Apple's Cut Cross Entropy: the logits are computed tile by tile in both passes and never stored.

Its filter, which drops gradients below an epsilon, is off. Both gradients are summed in the 16-bit
dtype, in the order in which tiles take a lock: they differ from call to call.

A softcap is refused: 25.1.1 fills columns after the vocabulary's end with -inf, and then caps them.
"""

from typing import Any

import torch
from torch import Tensor

from megacpp_mcore.kernels.linear_cross_entropy import reference
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
    """The losses of `Head.per_token`, on one GPU.

    Raises LinearCrossEntropyInputError also for what Cut Cross Entropy lacks: a split vocabulary,
    label_smoothing, a z_loss, a logit_scale, a correct softcap.
    """
    ranks = rank_of(tp_group)[1]
    if ranks > 1 or options != Options(options.ignore_index):
        raise LinearCrossEntropyInputError(
            f"a vocabulary over {ranks} ranks, label_smoothing {options.label_smoothing}, z_loss "
            f"{options.z_loss}, softcap {options.softcap or None}, logit_scale "
            f"{options.logit_scale}: Cut Cross Entropy takes one rank and none of these; use the "
            "backend 'chunked'"
        )
    if not labels.numel():
        return reference.per_token(hidden, weight, labels, options)
    check_labels(labels, weight.shape[0], options.ignore_index)
    from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy

    losses = cut_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]).contiguous(),
        weight.contiguous(),
        labels.reshape(-1),
        ignore_index=options.ignore_index,
        reduction="none",
        filter_eps=None,
        impl="cce",
    )
    return _ContiguousGradient.apply(losses).view(labels.shape)


class _ContiguousGradient(torch.autograd.Function):
    """The identity. Cut Cross Entropy's backward pass ignores the strides of the losses' gradient,
    and that of a sum is one number, expanded."""

    @staticmethod
    def forward(ctx, losses: Tensor) -> Tensor:
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


CCE = head_of(per_token)
