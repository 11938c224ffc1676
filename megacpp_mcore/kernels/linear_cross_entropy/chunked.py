"""linear_cross_entropy in chunks of tokens: cuBLAS's matrix products, and one kernel between them.

All chunks share one buffer for their logits. For each chunk: the logits, their softmax statistics,
their gradient in place, and from it the chunk's rows of hidden's gradient and its part of the
weight's gradient, which is summed over the chunks in float32.

For T tokens the weighted sum does all of that in the forward pass, with 6 T h V operations. The
losses of single tokens need 8 T h V: their gradients wait for the backward pass, which recomputes
the logits. Over a split vocabulary the ranks exchange four numbers a token.

The gradient of a weight that has a main_grad stays a float32 sum, and is added to that in the
backward pass, multiplied on the way, by the contract of `kernels.main_grad`. That is so in both
functions, as data parallelism ignores what autograd gets for a weight once one of them has added to
its main_grad. Equations, cost and memory: docs/linear-cross-entropy.md.
"""

from typing import Any

import torch
from torch import Tensor

from megacpp_mcore.kernels.backward_pass import frees_the_graph
from megacpp_mcore.kernels.linear_cross_entropy.chunk_loop import ChunkLoop
from megacpp_mcore.kernels.linear_cross_entropy.head import head_of
from megacpp_mcore.kernels.linear_cross_entropy.inputs import (
    LinearCrossEntropyInputError,
    Options,
    rank_of,
)
from megacpp_mcore.kernels.linear_cross_entropy.triton import add_scaled_, scale_, scaled
from megacpp_mcore.kernels.main_grad import handed_on, takes_gradients

DTYPES = (torch.bfloat16, torch.float32)


def per_token(
    hidden: Tensor, weight: Tensor, labels: Tensor, options: Options, tp_group: Any
) -> Tensor:
    """The losses of `Head.per_token`, in bf16 or float32."""
    _check_dtype(hidden)
    losses, _ = _losses(_rows(hidden), weight, labels.reshape(-1), *options, _name(tp_group))
    return losses.view(labels.shape)


def weighted(
    hidden: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor, options: Options,
    tp_group: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sum and the losses of `Head.weighted`, in bf16 or float32."""
    _check_dtype(hidden)
    wants = torch.is_grad_enabled()
    total, losses, _, _ = _weighted(
        _rows(hidden), weight, labels.reshape(-1), loss_weights.reshape(-1), *options,
        _name(tp_group), wants and hidden.requires_grad, wants and weight.requires_grad,
        takes_gradients(weight),
    )  # fmt: skip
    return total, losses.view(labels.shape)


CHUNKED = head_of(per_token, weighted)


def _check_dtype(hidden: Tensor) -> None:
    if hidden.dtype not in DTYPES:
        raise LinearCrossEntropyInputError(
            f"hidden is {hidden.dtype}; the chunked linear_cross_entropy takes "
            f"{', '.join(map(str, DTYPES))}"
        )


def _rows(hidden: Tensor) -> Tensor:
    return hidden.reshape(-1, hidden.shape[-1])


def _name(tp_group: Any) -> str:
    """The group's name, which an operator can take; empty for no group or one rank."""
    return "" if rank_of(tp_group)[1] == 1 else tp_group.group_name


@torch.library.custom_op("megacpp::linear_cross_entropy", mutates_args=())
def _losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float,
    z_loss: float, softcap: float, logit_scale: float, group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The losses and lse, (T,) each."""
    options = Options(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    loop = ChunkLoop(hidden, weight, labels, options, group)
    loop.make_statistics()
    return loop.losses()


@_losses.register_fake
def _(hidden, weight, labels, *options):
    tokens = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    return tokens, torch.empty_like(tokens)


@torch.library.custom_op("megacpp::linear_cross_entropy_backward", mutates_args=())
def _losses_backward(
    d_losses: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor, lse: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float,
    group: str, wants_hidden: bool, wants_weight: bool, wide: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of hidden and weight, empty where not wanted; wide: the weight's in float32."""
    options = Options(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    loop = ChunkLoop(hidden, weight, labels, options, group)
    return loop.gradients(d_losses.contiguous(), lse, wants_hidden, wants_weight, wide)


def _gradient_outputs(
    hidden: Tensor, weight: Tensor, wants_hidden: bool, wants_weight: bool, wide: bool
) -> tuple[Tensor, Tensor]:
    dtype = torch.float32 if wide and wants_weight else weight.dtype
    d_hidden = hidden.new_empty(hidden.shape if wants_hidden else 0)
    return d_hidden, weight.new_empty(weight.shape if wants_weight else 0, dtype=dtype)


@_losses_backward.register_fake
def _(d_losses, hidden, weight, labels, lse, *options_group_wants):
    return _gradient_outputs(hidden, weight, *options_group_wants[-3:])


def _save_losses(ctx, inputs, output) -> None:
    hidden, weight, labels, *ctx.options = inputs
    lse = output[1]
    ctx.weight = weight if takes_gradients(weight) else None
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(hidden, weight, labels, lse)


def _losses_gradients(ctx, d_losses, _):
    wants = ctx.needs_input_grad[:2]
    wide = ctx.weight is not None
    found = _losses_backward(d_losses, *ctx.saved_tensors, *ctx.options, *wants, wide)
    d_hidden, d_weight = (g if wanted else None for g, wanted in zip(found, wants, strict=True))
    if wide and d_weight is not None:
        ctx.weight.main_grad.add_(d_weight)
        d_weight = handed_on(ctx.weight)
    return d_hidden, d_weight, *[None] * 7


_losses.register_autograd(_losses_gradients, setup_context=_save_losses)


@torch.library.custom_op("megacpp::weighted_linear_cross_entropy", mutates_args=())
def _weighted(
    hidden: Tensor, weight: Tensor, labels: Tensor, loss_weights: Tensor, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float, logit_scale: float, group: str,
    wants_hidden: bool, wants_weight: bool, wide: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The weighted sum, the losses (T,), and the gradients, empty where not wanted; wide: the
    weight's in float32."""
    options = Options(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    loop = ChunkLoop(hidden, weight, labels, options, group)
    if wants_hidden or wants_weight:
        gradients = loop.gradients(
            loss_weights.contiguous(), None, wants_hidden, wants_weight, wide
        )
    else:
        loop.make_statistics()
        gradients = hidden.new_empty(0), hidden.new_empty(0)
    losses, _ = loop.losses()
    return (losses * loss_weights).sum(), losses, *gradients


@_weighted.register_fake
def _(hidden, weight, labels, loss_weights, *options_group_wants):
    losses = torch.empty_like(loss_weights)
    gradients = _gradient_outputs(hidden, weight, *options_group_wants[-3:])
    return loss_weights.new_empty(()), losses, *gradients


@torch.library.custom_op("megacpp::linear_cross_entropy_scaled", mutates_args=())
def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x times the number factor."""
    return scaled(x, factor)


@_scaled.register_fake
def _(x, factor):
    return torch.empty_like(x)


@torch.library.custom_op("megacpp::linear_cross_entropy_scale_", mutates_args=("x",))
def _scale_(x: Tensor, factor: Tensor) -> None:
    """x times the number factor, in its place."""
    scale_(x, factor)


@_scale_.register_fake
def _(x, factor):
    pass


@torch.library.custom_op("megacpp::linear_cross_entropy_add_scaled_", mutates_args=("total",))
def _add_scaled_(total: Tensor, x: Tensor, factor: Tensor) -> None:
    """total += x times the number factor."""
    add_scaled_(total, x, factor)


@_add_scaled_.register_fake
def _(total, x, factor):
    pass


def _save_weighted(ctx, inputs, output) -> None:
    _, losses, *gradients = output
    *_, ctx.wants_hidden, ctx.wants_weight, wide = inputs
    ctx.weight = inputs[1] if wide else None
    ctx.mark_non_differentiable(losses, *gradients)
    ctx.set_materialize_grads(False)  # they would be zeros as large as the gradients
    ctx.save_for_backward(*gradients)


def _weighted_gradients(ctx, d_total, *_):
    d_hidden, d_weight = ctx.saved_tensors
    d_hidden = _times(d_hidden, d_total) if ctx.wants_hidden else None
    if not ctx.wants_weight:
        d_weight = None
    elif ctx.weight is None:
        d_weight = _times(d_weight, d_total)
    else:  # the sum stays as it is, for a second backward pass
        _add_scaled_(ctx.weight.main_grad, d_weight, d_total)
        d_weight = handed_on(ctx.weight)
    return d_hidden, d_weight, *[None] * 11


def _times(gradient: Tensor, factor: Tensor) -> Tensor:
    """The saved gradient times factor: in place where this backward pass frees the graph, and so is
    the last that can ask for it, else in new memory."""
    # Never under a tracing compiler: its tensors have other types, and its graph may run again.
    if type(gradient) is Tensor and frees_the_graph():
        _scale_(gradient, factor)
        return gradient
    return _scaled(gradient, factor)


_weighted.register_autograd(_weighted_gradients, setup_context=_save_weighted)
