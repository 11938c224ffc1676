"""Apple's Cut Cross Entropy: no logits in memory at all, made tile by tile in both passes.

Without its filter, which leaves out gradients below an epsilon. Both gradients are summed in the
16-bit dtype, tile after tile in whatever order the locks are taken: they differ from call to call.
"""

from typing import Any

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

    Raises LinearCrossEntropyInputError also for what Cut Cross Entropy has not: a split vocabulary,
    label_smoothing, a z_loss, a logit_scale.
    """
    options = options_of(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    check_inputs(hidden, weight, labels, options, tp_group, loss_weights)
    ranks = rank_of(tp_group)[1]
    if ranks > 1 or label_smoothing or z_loss or logit_scale != 1.0:
        raise LinearCrossEntropyInputError(
            f"a vocabulary over {ranks} ranks, label_smoothing {label_smoothing}, z_loss {z_loss}, "
            f"logit_scale {logit_scale}: Cut Cross Entropy takes one rank and has only a softcap; "
            "use the backend 'chunked'"
        )
    if not labels.numel():
        return reference.per_token(hidden, weight, labels, options)
    check_labels(labels, weight.shape[0], ignore_index)
    from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy

    return cut_cross_entropy(
        hidden.contiguous(),
        weight.contiguous(),
        labels,
        ignore_index=ignore_index,
        softcap=softcap,
        reduction="none",
        filter_eps=None,
        impl="cce",
    )


def weighted_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """As the surface's; raises as `linear_cross_entropy`."""
    losses = linear_cross_entropy(hidden, weight, labels, loss_weights=loss_weights, **options)
    return (losses * loss_weights).sum(), losses.detach()


CCE = Head(linear_cross_entropy, weighted_linear_cross_entropy)
