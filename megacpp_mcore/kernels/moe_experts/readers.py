"""The gradients of a MoE layer's tokens, summed in one kernel instead of one after another.

Router, shared expert and routed experts read the same tokens. Autograd would add their gradients in
two kernels, after the experts' rows have been summed in another. Here the experts' part arrives as
rows (R, h), and all are summed where the rows are. The router's part may arrive as the gradient of
its logits (tokens, E), which is multiplied by the router's weight on the way into the sum.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megacpp_mcore.kernels.moe_experts.routing import Routing, sum_gradients, to_tokens

# Experts of a router whose weight the sum multiplies. On an H200 the sum of 16,384 tokens'
# gradients with 16 experts took four fifths of a sum and a product of its own; with 128, tried by
# matrix products in the sum, twice as long as those.
MOST_GATES = 16


@dataclass
class Sorted:
    """What the experts' forward pass leaves for the sum. It must not refer to `Readers`: autograd's
    node keeps it, and a cycle would keep all activations where garbage collection is off."""

    routing: Routing | None = None


@dataclass
class Readers:
    """The tokens (..., h) as each reader takes them.

    rows: stands for the experts' rows (R, h) in autograd and has no memory of its own. logits: the
    same for the router's logits (tokens, E); where it is not None, `router` takes no gradient.
    """

    router: Tensor
    shared: Tensor
    rows: Tensor
    sorted: Sorted
    logits: Tensor | None = None


def readers(x: Tensor, size: int, gate: Tensor | None = None) -> Readers:
    """size: R, as of the routing that will be set.

    gate (E, h): the weight of a router that hands on the gradient of its logits, or None.
    """
    rows, left = x.new_empty(()).expand(size, x.shape[-1]), Sorted()
    if not (torch.is_grad_enabled() and x.requires_grad):
        return Readers(x, x, rows, left)
    logits = None
    if gate is not None:
        tokens, gate = x.shape[:-1].numel(), gate.detach()
        logits = gate.new_empty((), dtype=torch.float32).expand(tokens, gate.shape[0])
    router, shared, rows, logits = _Readers.apply(x, rows, logits, gate, left)
    return Readers(router if gate is None else x.detach(), shared, rows, left, logits)


class _Readers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, logits, gate, left):
        ctx.left, ctx.shape = left, x.shape
        ctx.save_for_backward(gate)
        ctx.set_materialize_grads(False)  # a reader that is not there has no gradient
        logits = None if logits is None else logits.view_as(logits)
        return x.view_as(x), x.view_as(x), rows.view_as(rows), logits

    @staticmethod
    def backward(ctx, d_router, d_shared, d_rows, d_logits):
        (gate,), routing = ctx.saved_tensors, ctx.left.routing
        others = [x.reshape(-1, x.shape[-1]) for x in (d_router, d_shared) if x is not None]
        if d_logits is not None:
            total = sum_gradients(d_rows, routing, *(others or [None]), d_logits, gate)
        elif d_rows is None:
            total = sum(others[1:], others[0])
        else:
            total = to_tokens(d_rows, routing, *others)
        return total.view(ctx.shape), None, None, None, None
