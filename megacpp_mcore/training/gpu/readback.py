"""What a step leaves on the GPU, read a step later, so that neither waits for the other.

At the end of a step its losses, gradient norm and what the ranks must agree on are copied to pinned
memory, behind the step in the order of the GPU's work. The host reads them when it has started the
next step: the GPU then has work while the host waits for the copy, if it has to wait at all.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class OnGpu:
    """Times and copies in the order of the current CUDA stream."""

    device = "cuda"

    def mark(self) -> torch.cuda.Event:
        """A point in the GPU's work. Waiting for it leaves the processor to others."""
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def milliseconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """Milliseconds between two marks that have passed."""
        return first.elapsed_time(last)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy that is complete once a mark set after this call has passed."""
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return copy.copy_(tensor, non_blocking=True)


class OnHost:
    """The same where the work is the processor's own: it is done when a mark is set."""

    device = "cpu"

    def mark(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        return True

    def wait(self, mark: float) -> None: ...

    def milliseconds(self, first: float, last: float) -> float:
        return (last - first) * 1000

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


def this_device() -> OnGpu | OnHost:
    """Where this process trains."""
    return OnGpu() if torch.cuda.is_available() else OnHost()


@dataclass(frozen=True)
class Results:
    """The results of one step. milliseconds: from `started` to the step's last kernel, as the
    device measured. The others are true where they are so on any rank. compiled: all waited for
    that one. wrong: a loss or gradient norm is not finite. signalled: the rank got a signal to
    end."""

    losses: dict[str, float]
    norm: float | None
    milliseconds: float
    compiled: bool
    wrong: bool
    signalled: bool

    def not_finite(self) -> list[str]:
        """What of this rank's is not finite, each in words."""
        found = self.losses | ({} if self.norm is None else {"gradient norm": self.norm})
        return [f"{name} is {value}" for name, value in found.items() if not math.isfinite(value)]


class Sent:
    """The results of a step on their way to the host."""

    def __init__(
        self, device: OnGpu | OnHost, started: Any, losses: Mapping[str, Tensor],
        norm: Tensor | float | None, *, compiled: bool, signalled: bool,
    ) -> None:  # fmt: skip
        """A collective of all ranks, enqueued and not waited for. started: a mark, such as that of
        the step before's end. losses: reduced over the ranks that have them. The step ends here.
        """
        self._device, self._started, self.ended = device, started, device.mark()
        self._names, self._has_norm = list(losses), norm is not None
        values = _values([*losses.values(), *([] if norm is None else [norm])], device.device)
        flags = torch.stack(
            [
                _scalar(compiled, device.device),
                (~torch.isfinite(values).all()).double(),
                _scalar(signalled, device.device),
            ]
        )
        self._values, self._flags = device.to_host(values), device.to_host(on_any_rank(flags))
        self._copied = device.mark()

    def is_there(self) -> bool:
        """Whether `read` would not wait."""
        return self._device.passed(self._copied)

    def read(self) -> Results:
        """Waits until the step is done."""
        self._device.wait(self._copied)
        values = self._values.tolist()
        norm = values.pop() if self._has_norm else None
        return Results(
            dict(zip(self._names, values, strict=True)),
            norm,
            self._device.milliseconds(self._started, self.ended),
            *map(bool, self._flags.tolist()),
        )


def _scalar(value: float, device: str) -> Tensor:
    """On the device without a copy: its value is an argument of a kernel."""
    return torch.full((), float(value), dtype=torch.float64, device=device)


def _values(found: list[Tensor | float], device: str) -> Tensor:
    """One row of float64, which holds every float32."""
    scalars = [
        value.detach().double().reshape(()) if isinstance(value, Tensor) else _scalar(value, device)
        for value in found
    ]
    return torch.stack(scalars) if scalars else torch.empty(0, dtype=torch.float64, device=device)


def on_any_rank(flags: Tensor) -> Tensor:
    """The largest of every rank's, in place. On a GPU, no rank waits for another here."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    return flags
