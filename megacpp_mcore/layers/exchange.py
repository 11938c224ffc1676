"""Exchanges between ranks: begun at one place and waited for at another, in both directions.

What a layer computes between `begun` and `ended` overlaps the exchange. So does, in the backward
pass, the backward of what it computed there: the engine runs nodes in the reverse order of their
creation, `ended`'s before and `begun`'s after.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megacpp_mcore.kernels.backward_pass import no_second_derivative

# What is there once `wait` is called.
Begun = tuple[Tensor, Callable[[], object]]


class Exchange(Protocol):
    """One exchange of one forward pass: what begins it, and what begins its backward."""

    def forward(self, x: Tensor) -> Begun: ...

    def backward(self, gradient: Tensor) -> Begun: ...


class Pending:
    """What the two nodes of an exchange share."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._begun: Begun | None = None
        self._early = False

    def begin(self, start: Callable[[Tensor], Begun], x: Tensor) -> Tensor:
        self._begun = start(x)
        return self._begun[0]

    def begin_backward(self, gradient: Tensor) -> None:
        """For what computes the gradient of `ended`'s result: before autograd hands it on."""
        self.begin(self.exchange.backward, gradient)
        self._early = True

    def receive(self, gradient: Tensor) -> None:
        """The gradient, from autograd."""
        if not self._early:
            self.begin(self.exchange.backward, gradient)
        self._early = False

    def end(self) -> Tensor:
        (result, wait), self._begun = self._begun, None
        wait()
        return result


def begun(x: Tensor, exchange: Exchange) -> tuple[Tensor, Pending]:
    """Nothing but `ended` may be done with the tensor, whose values are not there yet."""
    pending = Pending(exchange)
    return _Begin.apply(x, pending), pending


def ended(result: Tensor, pending: Pending) -> Tensor:
    """The result of `begun`, once it is there."""
    return _End.apply(result, pending)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, pending):
        ctx.pending = pending
        return pending.begin(pending.exchange.forward, x)

    @staticmethod
    @no_second_derivative
    def backward(ctx, _):
        return ctx.pending.end(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx, result, pending):
        ctx.pending = pending
        pending.end()
        return result.view_as(result)

    @staticmethod
    @no_second_derivative
    def backward(ctx, gradient):
        ctx.pending.receive(gradient)
        return gradient, None  # stands for the result that `_Begin` waits for


class AllGather:
    """(t, ...) -> (ranks t, ...); backward the sum over the ranks of each rank's part.

    The sum is rounded to the tensor's dtype at each step of NCCL's ring: once with two ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def forward(self, x: Tensor) -> Begun:
        out = x.new_empty(x.shape[0] * self.group.size(), *x.shape[1:])
        work = dist.all_gather_into_tensor(out, x.contiguous(), group=self.group, async_op=True)
        return out, work.wait

    def backward(self, gradient: Tensor) -> Begun:
        rows = gradient.shape[0] // self.group.size()
        out = gradient.new_empty(rows, *gradient.shape[1:])
        gradient = gradient.contiguous()
        return out, dist.reduce_scatter_tensor(out, gradient, group=self.group, async_op=True).wait


class ReduceScatter(AllGather):
    """(ranks t, ...) -> (t, ...): AllGather's backward, and its forward as the backward."""

    def forward(self, x: Tensor) -> Begun:
        return super().backward(x)

    def backward(self, gradient: Tensor) -> Begun:
        return super().forward(gradient)
