"""Apple's Cut Cross Entropy: no logits in memory at all, made tile by tile in both passes.

Without its filter, which leaves out gradients below an epsilon. Both gradients are summed in the
16-bit dtype, tile after tile in whatever order the locks are taken: they differ from call to call.

No softcap: 25.1.1 puts -inf where a tile goes past the vocabulary's end, and then caps it too.
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
    """As the surface's, on one GPU.

    Raises LinearCrossEntropyInputError also for what Cut Cross Entropy has not: a split vocabulary,
    label_smoothing, a z_loss, a logit_scale, a right softcap.
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
    return _GradientInARow.apply(losses).view(labels.shape)


class _GradientInARow(torch.autograd.Function):
    """Cut Cross Entropy's backward pass reads the losses' gradient one element after another from
    where it starts, whatever its strides: that of a sum is one number, expanded."""

    @staticmethod
    def forward(ctx, losses: Tensor) -> Tensor:
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


CCE = head_of(per_token)
