"""The gradients of a MoE layer's tokens, summed in one kernel instead of one after another.

Router, shared expert and routed experts read the same tokens. Autograd would add their gradients in
two kernels, after the experts' rows have been summed in another. Here the experts' part arrives as
rows (R, h), and all are summed where the rows are. The router's part may arrive as the gradient of
its logits (tokens, E), which is multiplied by the router's weight on the way into the sum; the
logits are computed here then. Where the tokens are a norm's output, the norm is part of both.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megacpp_mcore.kernels.backward_pass import no_second_derivative
from megacpp_mcore.kernels.main_grad import fp32_product
from megacpp_mcore.kernels.moe_experts import late_gradient
from megacpp_mcore.kernels.moe_experts.routing import Routing, Sorted, sum_gradients, to_tokens
from megacpp_mcore.kernels.moe_experts.weights import Experts
from megacpp_mcore.kernels.norm import triton as norm

# Experts of a router whose weight the sum multiplies. On an H200 the sum of 16,384 tokens'
# gradients with 16 experts took four fifths of a sum and a product of its own; with 128, tried by
# matrix products in the sum, twice as long as those.
MOST_GATES = 16


@dataclass
class Readers:
    """The tokens (..., h) as each reader takes them.

    rows: stands for the experts' rows (R, h) in autograd and has no memory of its own. hidden: of
    `late_gradient`; None where the experts are not those of `fused`. logits: the router's
    (tokens, E), or None; where they are here, `router` takes no gradient.
    """

    router: Tensor
    shared: Tensor
    rows: Tensor
    sorted: Sorted
    hidden: Tensor | None = None
    logits: Tensor | None = None


def readers(x: Tensor, size: int, experts: Experts, gate: Tensor | None = None) -> Readers:
    """size: R, as of the routing that will be set.

    gate (E, h): the weight of a router that hands on the gradient of its logits, or None.
    """
    rows, left = x.new_empty(()).expand(size, x.shape[-1]), Sorted()
    hidden = late_gradient.hidden(experts, size, left)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return Readers(x, x, rows, left, hidden)
    gate = None if gate is None else gate.detach()
    router, shared, rows, logits = _Readers.apply(x, rows, gate, left)
    router = router if gate is None else x.detach()
    return Readers(router, shared, rows, left, hidden, logits)


def readers_of_norm(
    x: Tensor, weight: Tensor, eps: float, size: int, experts: Experts, gate: Tensor
) -> tuple[Readers, Tensor]:
    """The readers of rms_norm(x, weight, eps), and x (..., h) as the layer's residual: all their
    gradients are one function's.

    size, gate: as of `readers`. Raises RMSNormInputError as rms_norm does.
    """
    norm.check(x, weight)
    rows, left = x.new_empty(()).expand(size, x.shape[-1]), Sorted()
    hidden = late_gradient.hidden(experts, size, left)
    shared, residual, rows, logits = _ReadersOfNorm.apply(
        x, weight, rows, gate.detach(), eps, left, experts.products
    )
    return Readers(shared.detach(), shared, rows, left, hidden, logits), residual


class _Readers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, gate, left):
        ctx.left, ctx.shape = left, x.shape
        ctx.save_for_backward(gate)
        ctx.set_materialize_grads(False)  # a reader that is not there has no gradient
        logits = None if gate is None else fp32_product(_flat(x), gate.t())
        return x.view_as(x), x.view_as(x), rows.view_as(rows), logits

    @staticmethod
    @no_second_derivative
    def backward(ctx, d_router, d_shared, d_rows, d_logits):
        (gate,) = ctx.saved_tensors
        total = _sum(ctx.left.routing, d_rows, d_logits, gate, d_router, d_shared)
        return total.view(ctx.shape), None, None, None


class _ReadersOfNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, rows, gate, eps, left, products):
        normed, rstd, logits = products.norm_and_logits(x, weight, eps, gate)
        ctx.left, ctx.products = left, products
        ctx.save_for_backward(x, weight, rstd, gate)
        ctx.set_materialize_grads(False)
        return normed, x.view_as(x), rows.view_as(rows), logits

    @staticmethod
    @no_second_derivative
    def backward(ctx, d_shared, d_residual, d_rows, d_logits):
        x, weight, rstd, gate = ctx.saved_tensors
        routing, tokens = ctx.left.routing, x.reshape(-1, x.shape[-1])
        if all(x is None for x in (d_shared, d_rows, d_logits)):
            dx, d_weight = d_residual, None
        elif d_residual is None or d_rows is None or d_logits is None:
            dy = _sum(routing, d_rows, d_logits, gate, d_shared)
            dx, d_weight = norm.rms_norm_backward(x, dy, d_residual, weight, rstd)
        else:
            d_shared, d_residual = map(_flat, (d_shared, d_residual))
            dx, d_weight = ctx.products.tokens_gradient(
                d_rows, routing, d_shared, d_logits, gate, tokens, d_residual, weight, rstd
            )
        return dx.view(x.shape), d_weight, None, None, None, None, None


def _sum(
    routing: Routing | None, d_rows: Tensor | None, d_logits: Tensor | None, gate: Tensor | None,
    *others: Tensor | None,
) -> Tensor:  # fmt: skip
    """(tokens, h), of those that there are. others: (..., h), at most one with d_logits."""
    others = [_flat(x) for x in others if x is not None]
    if d_logits is not None:
        return sum_gradients(d_rows, routing, *(others or [None]), d_logits, gate)
    if d_rows is None:
        return sum(others[1:], others[0])
    return to_tokens(d_rows, routing, *others)


def _flat(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.reshape(-1, x.shape[-1])
