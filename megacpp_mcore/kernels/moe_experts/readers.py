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
class Readers:
    """The tokens (..., h) as each reader takes them.

    rows: stands for the experts' rows (R, h) in autograd and has no memory of its own. routing: set
    by the experts in the forward pass.
    """

    router: Tensor
    shared: Tensor
    rows: Tensor
    routing: Routing | None = None


def readers(x: Tensor, size: int) -> Readers:
    """size: R, as of the routing that will be set."""
    found = Readers(x, x, x.new_empty(()).expand(size, x.shape[-1]))
    if torch.is_grad_enabled() and x.requires_grad:
        found.router, found.shared, found.rows = _Readers.apply(x, found.rows, found)
    return found


class _Readers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, found):
        ctx.found, ctx.shape = found, x.shape
        ctx.set_materialize_grads(False)  # a reader that is not there has no gradient
        return x.view_as(x), x.view_as(x), rows.view_as(rows)

    @staticmethod
    def backward(ctx, d_router, d_shared, d_rows):
        others = [x.reshape(-1, x.shape[-1]) for x in (d_router, d_shared) if x is not None]
        if d_rows is None:
            total = sum(others[1:], others[0])
        else:
            total = to_tokens(d_rows, ctx.found.routing, *others)
        return total.view(ctx.shape), None, None
