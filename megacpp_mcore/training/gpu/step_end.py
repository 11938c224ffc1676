"""Megatron's own reads of the GPU at the end of every step, done without.

Behind the optimizer its loop reads, in every step, whether the update was done, the gradient norm,
the learning rate and the loss scale, each of which it has itself put on the GPU. It makes a zero on
the host for each loss and copies that to the GPU, gathers who has had a signal, and with packed
documents reads what attention's work was. Every one of them waits for all of the GPU's work.

What it reads every `log_interval` steps, and every `tensorboard_log_interval` where it writes such
a log, stays: a log is of values. So does what pipeline-parallel ranks wait for within a step.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.training import global_vars

from megacpp_mcore.surfaces.workload import current_device


class Reductions:
    """What Megatron reduces over tensor- and pipeline-parallel ranks, and reads: reduced, not read.

    always_updated: no rank's optimizer skips an update, as only a loss scaler lets it.
    """

    def __init__(self) -> None:
        self.always_updated = False

    def update_was_done(self, call: Callable, given: dict[str, Any]) -> bool:
        """Megatron's logical_and_across_model_parallel_group."""
        if self.always_updated or _alone(given["group"]):
            return given["input"] is True
        return call()

    def largest(self, call: Callable, given: dict[str, Any]) -> Any:
        """Megatron's reduce_max_stat_across_model_parallel_group. A value on the GPU stays there.

        A number of the host's, the learning rate, is one of all ranks that have it; those without
        parameters have None, and take it from the reduction.
        """
        stat, group = given["stat"], given["group"]
        if _alone(group):
            return stat.reshape(()) if isinstance(stat, torch.Tensor) else stat
        if stat is None or group is None:
            return call()
        # One float32, as in Megatron's reduction, which a rank without a value is in.
        on_gpu = isinstance(stat, torch.Tensor)
        if on_gpu:
            reduced = stat.detach().reshape(1).to(torch.float32, copy=True)
        else:
            reduced = torch.full((1,), stat, dtype=torch.float32, device=current_device())
        torch.distributed.all_reduce(reduced, op=torch.distributed.ReduceOp.MAX, group=group)
        return reduced.reshape(()) if on_gpu else stat


def _alone(group: Any) -> bool:
    return group is not None and group.size() == 1


def logged(call: Callable, given: dict[str, Any]) -> Any:
    """Megatron's training_log."""
    with zeros_made_on_the_device():
        return call()


@contextlib.contextmanager
def zeros_made_on_the_device() -> Iterator[None]:
    """Let torch.tensor([number], device=...) fill a tensor there: it makes one on the host, and its
    copy waits for the device."""
    made = torch.tensor

    def make(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        there = device is not None and torch.device(device).type != "cpu"
        if there and options.keys() <= {"dtype"} and _is_one_number(data):
            return torch.full((1,), data[0], device=device, **options)
        return made(data, device=device, **options)

    torch.tensor = make
    try:
        yield
    finally:
        torch.tensor = made


def _is_one_number(data: Any) -> bool:
    return isinstance(data, list) and len(data) == 1 and isinstance(data[0], (bool, int, float))


def keep_loss_scale_on_the_host(optimizer: Any) -> bool:
    """Megatron logs the scale, which is 1 unless a scaler changes it (fp16). Returns whether it
    stays 1."""
    own = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    if any(getattr(one, "grad_scaler", None) is not None for one in own):
        return False
    scale = optimizer.get_loss_scale()
    known = scale.cpu()
    optimizer.scale_loss = lambda loss: scale * loss  # as it was: on the device
    optimizer.get_loss_scale = lambda: known
    return True


class Signals:
    """Megatron's signal handler, whose ranks agree by what each step's end has told them all.

    A rank notes SIGTERM; the end of a step tells the others, and it is read a step later. So the
    run ends, on every rank after the same step, up to two steps after the signal.
    """

    def __init__(self) -> None:
        self.agreed = False

    @staticmethod
    def here() -> bool:
        """Whether this rank has had the signal."""
        handler = global_vars._GLOBAL_SIGNAL_HANDLER
        return handler is not None and bool(handler._signal_received)

    def signals_received(self) -> list[bool]:
        """As Megatron's loop asks for them; alone, a rank needs nobody's agreement."""
        alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
        return [self.agreed or (alone and self.here())]

    def handler(self, call: Callable, given: dict[str, Any]) -> "Signals":
        """Megatron's get_signal_handler."""
        return self
