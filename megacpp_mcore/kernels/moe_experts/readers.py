"""The gradients of a MoE layer's tokens, summed in one kernel instead of one after another.

Router, shared expert and routed experts read the same tokens. Autograd would add their gradients in
two kernels, after the experts' rows have been summed in another. Here the experts' part arrives as
rows (R, h), and all are summed where the rows are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megacpp_mcore.kernels.moe_experts.routing import Routing, to_tokens


@dataclass
class Sorted:
    """What the experts' forward pass leaves for the sum. It must not refer to `Readers`: autograd's
    node keeps it, and a cycle would keep all activations where garbage collection is off."""

    routing: Routing | None = None


@dataclass
class Readers:
    """The tokens (..., h) as each reader takes them.

    rows: stands for the experts' rows (R, h) in autograd and has no memory of its own.
    """

    router: Tensor
    shared: Tensor
    rows: Tensor
    sorted: Sorted


def readers(x: Tensor, size: int) -> Readers:
    """size: R, as of the routing that will be set."""
    rows, left = x.new_empty(()).expand(size, x.shape[-1]), Sorted()
    if torch.is_grad_enabled() and x.requires_grad:
        return Readers(*_Readers.apply(x, rows, left), left)
    return Readers(x, x, rows, left)


class _Readers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, left):
        ctx.left, ctx.shape = left, x.shape
        ctx.set_materialize_grads(False)  # a reader that is not there has no gradient
        return x.view_as(x), x.view_as(x), rows.view_as(rows)

    @staticmethod
    def backward(ctx, d_router, d_shared, d_rows):
        others = [x.reshape(-1, x.shape[-1]) for x in (d_router, d_shared) if x is not None]
        if d_rows is None:
            total = sum(others[1:], others[0])
        else:
            total = to_tokens(d_rows, ctx.left.routing, *others)
        return total.view(ctx.shape), None, None
