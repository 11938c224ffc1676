"""The options of linear_cross_entropy, and the checks that every backend makes of its arguments."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megacpp_mcore.errors import MegacppError

IGNORE_INDEX = -100  # torch's own


class LinearCrossEntropyInputError(MegacppError):
    """Arguments that do not fit together, or that a backend does not serve."""


class Options(NamedTuple):
    """The keyword arguments that define the loss. softcap 0 is none."""

    ignore_index: int = IGNORE_INDEX
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    logit_scale: float = 1.0


def rank_of(tp_group: Any) -> tuple[int, int]:
    """This process's rank in the group and the group's size; (0, 1) without one."""
    return (0, 1) if tp_group is None else (tp_group.rank(), tp_group.size())


def check_inputs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: Options,
    tp_group: Any = None,
    loss_weights: Tensor | None = None,
) -> None:
    """Raise LinearCrossEntropyInputError unless the arguments fit together.

    `check_labels` checks the labels' values.
    """
    if weight.dim() != 2 or 0 in weight.shape or hidden.shape[-1:] != weight.shape[1:]:
        raise LinearCrossEntropyInputError(
            f"hidden is {_shape(hidden)} and weight is {_shape(weight)}; they must be (..., h) and "
            "(V, h), V and h at least 1"
        )
    given = {"labels": labels} | ({} if loss_weights is None else {"loss_weights": loss_weights})
    for name, x in given.items():
        if x.shape != hidden.shape[:-1]:
            raise LinearCrossEntropyInputError(
                f"{name} is {_shape(x)}; with hidden {_shape(hidden)} it must be "
                f"{tuple(hidden.shape[:-1])}"
            )
    if not hidden.is_floating_point() or hidden.dtype != weight.dtype:
        raise LinearCrossEntropyInputError(
            f"hidden is {hidden.dtype} and weight is {weight.dtype}; they must be of one floating "
            "dtype"
        )
    if labels.dtype != torch.int64:
        raise LinearCrossEntropyInputError(f"labels are {labels.dtype}; they must be torch.int64")
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if loss_weights is not None and loss_weights.dtype != wide:
        raise LinearCrossEntropyInputError(
            f"loss_weights are {loss_weights.dtype}; with hidden {hidden.dtype} they must be {wide}"
        )
    if loss_weights is not None and loss_weights.requires_grad:
        raise LinearCrossEntropyInputError(
            "loss_weights want a gradient, and have none: detach them, or weight the losses of "
            "linear_cross_entropy"
        )
    devices = {str(x.device) for x in (hidden, weight, *given.values())}
    if len(devices) > 1:
        raise LinearCrossEntropyInputError(
            f"the tensors are on {', '.join(sorted(devices))}; they must be on one device"
        )
    _check_options(options, weight.shape[0] * rank_of(tp_group)[1])


def _check_options(options: Options, vocab_size: int) -> None:
    if not 0 <= options.label_smoothing < 1:
        raise LinearCrossEntropyInputError(
            f"label_smoothing is {options.label_smoothing}; it must be in [0, 1)"
        )
    if options.label_smoothing and vocab_size < 2:
        raise LinearCrossEntropyInputError("label_smoothing needs a vocabulary of at least 2")
    for name in ("z_loss", "softcap"):
        value = getattr(options, name)
        if not (math.isfinite(value) and value >= 0):
            what = "positive, or None" if name == "softcap" else "at least 0"
            raise LinearCrossEntropyInputError(f"{name} is {value}; it must be {what}")
    if not math.isfinite(options.logit_scale):
        raise LinearCrossEntropyInputError(
            f"logit_scale is {options.logit_scale}; it must be a finite number"
        )


def options_of(
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
) -> Options:
    """The keyword arguments as `Options`. Raises LinearCrossEntropyInputError for softcap 0."""
    if softcap is not None and not softcap > 0:
        raise LinearCrossEntropyInputError(f"softcap is {softcap}; it must be positive, or None")
    cap = 0.0 if softcap is None else float(softcap)
    return Options(
        int(ignore_index), float(label_smoothing), float(z_loss), cap, float(logit_scale)
    )


def check_labels(labels: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Refuse a label outside [0, vocab_size) that is not ignore_index.

    On a CPU it raises LinearCrossEntropyInputError. On a GPU a check by the host would wait for the
    device, so the device stops the process at the next synchronisation (`torch._assert_async`). So
    does a compiled graph of the reference, which a check by the host would cut in two.
    """
    right = (labels >= 0) & (labels < vocab_size) | (labels == ignore_index)
    if labels.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(right.all(), "linear_cross_entropy: a label is out of range")
    elif not right.all():
        wrong = labels[~right].unique().tolist()
        raise LinearCrossEntropyInputError(
            f"labels {wrong[:5]} are out of range: they must be in [0, {vocab_size}), or "
            f"{ignore_index} for a token that does not count"
        )


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape))
