"""Liger's fused linear cross entropy, as losses of single tokens.

Only its reduction "none" takes a gradient for every token; "mean" and "sum" are wrong for a second
backward pass, for a gradient other than 1, and for hidden states without a gradient. So the
weighted sum costs as much as the losses of single tokens: the logits are computed twice.

The weight's gradient is summed in float32 here. As in Liger itself, a token's incoming gradient is
rounded to the dtype before it is used, and the host waits for a count of the labels.
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
from megacpp_mcore.kernels.linear_cross_entropy.reference import smoothing_of

_CHUNK_MEM_CONST = 4  # at most 4 T h logits at a time; Liger's default 1 makes products small


def per_token(
    hidden: Tensor, weight: Tensor, labels: Tensor, options: Options, tp_group: Any
) -> Tensor:
    """The losses of `Head.per_token`, on one GPU.

    Raises LinearCrossEntropyInputError also for what Liger lacks: a split vocabulary, a
    logit_scale.
    """
    ranks = rank_of(tp_group)[1]
    if ranks > 1 or options.logit_scale != 1.0:
        raise LinearCrossEntropyInputError(
            f"a vocabulary over {ranks} ranks, logit_scale {options.logit_scale}: Liger's fused "
            "linear cross entropy takes one rank and no scale; use the backend 'chunked'"
        )
    if not labels.numel():
        return reference.per_token(hidden, weight, labels, options)
    check_labels(labels, weight.shape[0], options.ignore_index)
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    losses, *_ = LigerFusedLinearCrossEntropyFunction.apply(
        hidden.reshape(-1, hidden.shape[-1]).contiguous(),
        weight.contiguous(),
        labels.reshape(-1),
        None,  # bias
        None,  # weights of classes
        options.ignore_index,
        options.z_loss,
        smoothing_of(options, weight.shape[0]),  # torch's smoothing is over all classes
        "none",
        options.softcap or None,
        False,  # do not return the z-losses
        torch.float32,
        False,  # no scaling of tokens
        False,  # no accuracy
        False,  # no predicted tokens
        None,
        None,
        _CHUNK_MEM_CONST,
    )
    return losses.view(labels.shape)


def mean(
    hidden: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor, options: Options,
    tp_group: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Liger's own mean with its defaults, for a bench. Every loss weight must be 1 / tokens, and
    every token must count; a second backward pass gives wrong gradients. Returns no losses."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    rows = hidden.reshape(-1, hidden.shape[-1])
    total, *_ = LigerFusedLinearCrossEntropyFunction.apply(rows, weight, labels.reshape(-1))
    return total, total.new_empty(0)


LIGER = head_of(per_token)
MEAN = head_of(per_token, mean)  # not a backend: a bench compares the others with it
