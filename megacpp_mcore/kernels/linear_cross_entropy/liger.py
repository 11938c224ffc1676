"""Liger's own mean of the losses, which a bench times, too; no model calls it."""

from typing import Any

from torch import Tensor

from megacpp_mcore.kernels.linear_cross_entropy import reference
from megacpp_mcore.kernels.linear_cross_entropy.head import head_of
from megacpp_mcore.kernels.linear_cross_entropy.inputs import Options


def mean(
    hidden: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor, options: Options,
    tp_group: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """With Liger's defaults. Every loss weight must be 1 / tokens, and every token must count; a
    second backward pass gives wrong gradients. Returns no losses."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    rows = hidden.reshape(-1, hidden.shape[-1])
    total, *_ = LigerFusedLinearCrossEntropyFunction.apply(rows, weight, labels.reshape(-1))
    return total, total.new_empty(0)


MEAN = head_of(reference.per_token, mean)
