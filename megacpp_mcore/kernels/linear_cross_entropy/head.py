"""The two functions of linear_cross_entropy; a backend has both."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megacpp_mcore.kernels.linear_cross_entropy.inputs import (
    IGNORE_INDEX,
    Options,
    check_inputs,
    options_of,
)


@dataclass(frozen=True)
class Head:
    """A backend: its `linear_cross_entropy` and its `weighted_linear_cross_entropy`."""

    per_token: Callable[..., Tensor]
    weighted: Callable[..., tuple[Tensor, Tensor]]


def head_of(
    per_token: Callable[[Tensor, Tensor, Tensor, Options, Any], Tensor],
    weighted: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> Head:
    """A backend whose arguments are checked before it is called.

    per_token(hidden, weight, labels, options, tp_group) -> losses. weighted(hidden, weight, labels,
    loss_weights, options, tp_group) -> (total, losses); without it the total is computed from the
    losses of per_token.
    """

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
    ) -> Tensor:
        """The cross entropy of every token, in nats; differentiable in hidden and weight.

        hidden: (..., h), Megatron's [s, b, h] or any other leading dimensions. weight: (V_local,
        h), of hidden's dtype. labels: (...) int64 in [0, V), or ignore_index: such a token has loss
        0 and no gradient. label_smoothing: in [0, 1), the probability shared out among the wrong
        classes, as in Megatron. z_loss: coefficient of the square of log(sum(exp(logits))).
        softcap: c, for logits c tanh(logits / c); None is none. logit_scale: factor of the logits,
        before the softcap.

        tp_group: a process group over which the vocabulary is split in order of rank; weight is
        this rank's part, rows [rank * V_local, (rank + 1) * V_local) of the whole, and hidden and
        labels are the same on all ranks. Largest logit, sums and the label's logit are reduced over
        the group; the logits stay where they are. The losses are the same on all ranks. The
        gradient of hidden is this rank's part of it, to be summed over the ranks by the caller, as
        Megatron's copy_to_tensor_model_parallel_region and gather_from_sequence_parallel_region do.
        Label smoothing is over the whole vocabulary (Megatron's own is over a rank's part).

        Returns losses (...) in float32, or float64 for float64; nothing is averaged. They take any
        gradient; the backends with kernels of their own then compute the logits twice. That is 8 T
        h V operations forward and backward for T tokens, and 6 T h V with
        `weighted_linear_cross_entropy`.

        Raises LinearCrossEntropyInputError (a MegacppError) for arguments that do not fit together
        and, on a CPU, for labels out of range; on a GPU those stop the process by a device
        assertion.
        """
        options = options_of(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
        check_inputs(hidden, weight, labels, options, tp_group)
        return per_token(hidden, weight, labels, options, tp_group)

    def weighted_linear_cross_entropy(
        hidden: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor, *,
        tp_group: Any = None, ignore_index: int = IGNORE_INDEX, label_smoothing: float = 0.0,
        z_loss: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """sum(loss_weights * losses), differentiable in hidden and weight, and the detached losses.

        loss_weights: (...) float32 (float64 for float64), a loss mask among other things; a
        constant, without a gradient of its own. The rest is as in `linear_cross_entropy`. The
        losses do not depend on the weights.

        As the weights are known in the forward pass, the backends with kernels of their own compute
        the gradients there and keep no logits; the backward pass multiplies them by the gradient of
        the total, one number. Where neither hidden nor weight requires a gradient, or under
        torch.no_grad, none are computed. Tokens with small weights do not change the precision of
        the others.

        Returns (total, losses): () and (...), in float32, or float64 for float64. Raises as
        `linear_cross_entropy`, and for loss_weights that want a gradient.
        """
        options = options_of(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
        check_inputs(hidden, weight, labels, options, tp_group, loss_weights)
        if weighted is not None:
            return weighted(hidden, weight, labels, loss_weights, options, tp_group)
        losses = per_token(hidden, weight, labels, options, tp_group)
        return (losses * loss_weights).sum(), losses.detach()

    return Head(linear_cross_entropy, weighted_linear_cross_entropy)
