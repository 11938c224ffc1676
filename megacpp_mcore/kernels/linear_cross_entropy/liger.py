"""Liger's fused linear cross entropy, as losses of single tokens.

Only its reduction "none" takes a gradient for every token; "mean" and "sum" would be wrong for a
second backward pass, for a gradient that is not 1, and for hidden states without a gradient. So the
weighted sum costs what the losses of single tokens cost: the logits are made twice.

The weight's gradient is summed in float32. What is left of Liger's: a gradient that comes back for
a token is rounded to the dtype before it is used, and the host waits for a count of the labels.
"""

from typing import Any

import torch
from torch import Tensor

from megacpp_mcore.kernels.linear_cross_entropy import reference
from megacpp_mcore.kernels.linear_cross_entropy.inputs import (
    IGNORE_INDEX,
    Head,
    LinearCrossEntropyInputError,
    check_inputs,
    check_labels,
    options_of,
    rank_of,
)
from megacpp_mcore.kernels.linear_cross_entropy.reference import smoothing_of

_CHUNK_MEM_CONST = 4  # at most 4 T h logits at a time; Liger's own 1 makes for small products


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
    """As the surface's, on one GPU.

    Raises LinearCrossEntropyInputError also for what Liger has not: a split vocabulary, a
    logit_scale.
    """
    options = options_of(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    check_inputs(hidden, weight, labels, options, tp_group, loss_weights)
    ranks = rank_of(tp_group)[1]
    if ranks > 1 or logit_scale != 1.0:
        raise LinearCrossEntropyInputError(
            f"a vocabulary over {ranks} ranks, logit_scale {logit_scale}: Liger's fused linear "
            "cross entropy takes one rank and no scale; use the backend 'chunked'"
        )
    if not labels.numel():
        return reference.per_token(hidden, weight, labels, options)
    check_labels(labels, weight.shape[0], ignore_index)
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    losses, *_ = LigerFusedLinearCrossEntropyFunction.apply(
        hidden.reshape(-1, hidden.shape[-1]).contiguous(),
        weight.contiguous(),
        labels.reshape(-1),
        None,  # bias
        None,  # weights of classes
        ignore_index,
        z_loss,
        smoothing_of(options, weight.shape[0]),  # torch's: shared out among all classes
        "none",
        softcap,
        False,  # no z-loss beside the losses
        torch.float32,
        False,  # no scaling of tokens
        False,  # no accuracy
        False,  # no predicted tokens
        None,
        None,
        _CHUNK_MEM_CONST,
    )
    return losses.view(labels.shape)


def weighted_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """As the surface's; raises as `linear_cross_entropy`."""
    losses = linear_cross_entropy(hidden, weight, labels, loss_weights=loss_weights, **options)
    return (losses * loss_weights).sum(), losses.detach()


LIGER = Head(linear_cross_entropy, weighted_linear_cross_entropy)
