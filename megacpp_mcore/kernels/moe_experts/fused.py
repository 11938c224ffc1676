"""The experts from tokens to tokens: routing, copies, products, activation, sum in one operator.

Only x, fc1's output H and the routing are kept for the backward pass; the sorted tokens, A (the
input of fc2) and fc2's output are not. As in SonicMoE (arXiv 2512.14080), the router's gradient is
dA' . A' with A' = silu(gate) up or relu(h)^2 and dA' = dY W2, so that fc2's output is not needed.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megacpp_mcore.kernels.backward_pass import frees_the_graph, no_second_derivative
from megacpp_mcore.kernels.moe_experts import torch_products
from megacpp_mcore.kernels.moe_experts.activation import activate, activate_backward
from megacpp_mcore.kernels.moe_experts.readers import Readers
from megacpp_mcore.kernels.moe_experts.routing import (
    Gathered,
    Routing,
    probs_gradient,
    route,
    to_tokens,
)
from megacpp_mcore.kernels.moe_experts.weights import Experts


@torch.compiler.disable
def experts_routed(
    x: Tensor, routing_map: Tensor, probs: Tensor, weights: Experts, topk: int,
    addend: Tensor | None = None, residual: Tensor | None = None, rows: Tensor | None = None,
    hidden: Tensor | None = None,
    readers: Readers | None = None, on_gradient: Callable[[Tensor], None] | None = None,
) -> Tensor:  # fmt: skip
    """The experts of every token, with the router's weights, and the sum: (tokens, h).

    x (tokens, h). routing_map (tokens, E), bool, at most topk a token. probs (tokens, E). addend
    and residual (tokens, h): added to the sum before it is rounded, such as the shared expert's
    output and the layer's input; the gradient of each is the output's. readers: of x, whose
    gradient goes there by way of rows, readers.rows; x itself then gets none. hidden:
    readers.hidden; where it is given, w1's gradient is made of its own.
    on_gradient: called in the backward pass with x's gradient before that of w1 is computed: an
    exchange between ranks can begin. Runs on CUDA, and on a CPU in Triton's interpreter. The host
    never waits for the device.
    """
    if readers is not None:
        x = x.detach()
    w1 = weights.w1 if hidden is None else weights.w1.detach()
    settings = routing_map, topk, weights, readers, on_gradient
    return _Routed.apply(x, rows, probs, w1, weights.w2, addend, residual, hidden, *settings)


@torch.compiler.disable
def experts_sorted(x: Tensor, counts: Tensor, probs: Tensor, weights: Experts) -> Tensor:
    """The package's function: x (t, h) sorted by expert, counts (E,), probs (t,) -> (t, h).

    By torch's products: rows that a dispatcher delivers are not padded.
    """
    weights = weights._replace(products=torch_products)
    return _Sorted.apply(x, counts, probs, weights.w1, weights.w2, weights)


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, rows, probs, w1, w2, addend, residual, hidden, routing_map, topk, weights,
        readers, on_gradient,
    ):  # fmt: skip
        products = weights.products
        routing = route(routing_map, probs, topk, products.ALIGN)
        h = products.forward(Gathered(x, routing), w1, routing.ends)
        y = products.forward(
            activate(h, routing.row_probs, routing.ends, weights.activation), w2, routing.ends
        )  # A is freed here, where most memory is in use
        out = to_tokens(y, routing, addend, residual)
        ctx.save_for_backward(
            x, h, w1, w2, routing.routing_map, routing.rows, routing.token, routing.row_probs,
            routing.ends,
        )  # fmt: skip
        ctx.dtype, ctx.weights, ctx.on_gradient = probs.dtype, weights, on_gradient
        if readers is not None:
            ctx.left = readers.sorted
            ctx.left.routing = routing
        return out

    @staticmethod
    @no_second_derivative
    def backward(ctx, d_out):
        x, h, w1, w2, *sorting = ctx.saved_tensors
        products = ctx.weights.products
        routing = Routing(*sorting, align=products.ALIGN)
        dh, dw2, row_grads = _down_backward(ctx, Gathered(d_out, routing), h, w2, routing)
        d_probs = probs_gradient(routing, row_grads, ctx.dtype)
        d_rows = products.input_gradient(dh, w1, routing.ends)
        dx = to_tokens(d_rows, routing) if ctx.needs_input_grad[0] else None
        d_rows = d_rows if ctx.needs_input_grad[1] else None  # freed before w1's gradient
        exchanged = dx is not None and ctx.on_gradient is not None
        if exchanged:
            ctx.on_gradient(dx)
        dw1 = _of_w1(ctx, dh, Gathered(x, routing), routing.ends, exchanged)
        if ctx.needs_input_grad[7]:
            ctx.left.of_fc1 = x, routing
        found = dx, d_rows, d_probs, dw1, dw2, d_out, d_out, dh, None, None, None, None, None
        wanted = zip(found, ctx.needs_input_grad, strict=True)
        return tuple(gradient if needed else None for gradient, needed in wanted)


class _Sorted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, counts, probs, w1, w2, weights):
        x = x.contiguous()
        ends = counts.to(x.device).cumsum(0).to(torch.int32)
        row_probs = probs.to(torch.float32).contiguous()
        products = weights.products
        h = products.forward(x, w1, ends)
        a = activate(h, row_probs, ends, weights.activation)
        ctx.save_for_backward(x, h, w1, w2, row_probs, ends)
        ctx.dtype, ctx.weights = probs.dtype, weights
        return products.forward(a, w2, ends)

    @staticmethod
    @no_second_derivative
    def backward(ctx, dy):
        x, h, w1, w2, row_probs, ends = ctx.saved_tensors
        rows = _SortedRows(row_probs, ends)
        dh, dw2, row_grads = _down_backward(ctx, dy.contiguous(), h, w2, rows)
        dw1 = _of_w1(ctx, dh, x, ends)
        dx = ctx.weights.products.input_gradient(dh, w1, ends)
        return dx, None, row_grads.to(ctx.dtype), dw1, dw2, None


class _SortedRows(NamedTuple):
    """What the products need of a Routing."""

    row_probs: Tensor
    ends: Tensor


def _down_backward(
    ctx, dy: Tensor | Gathered, h: Tensor, w2: Tensor, rows: Routing | _SortedRows
) -> tuple[Tensor, Tensor | None, Tensor]:
    """dH, fc2's weight gradient and the gradient of the rows' probabilities."""
    experts = ctx.weights
    in_place = frees_the_graph()  # h is this function's own
    dh, a, row_grads = activate_backward(
        experts.products.input_gradient(dy, w2, rows.ends), h, rows.row_probs, rows.ends,
        experts.activation, in_place,
    )  # fmt: skip
    wanted = ctx.needs_input_grad[4]
    dw2 = experts.gradient(experts.w2, dy, a, rows.ends) if wanted else None
    return dh, dw2, row_grads


def _of_w1(
    ctx, dh: Tensor, x: Tensor | Gathered, ends: Tensor, during_exchange: bool = False
) -> Tensor | None:
    """What autograd gets for w1, argument 3 of both functions."""
    experts = ctx.weights
    wanted = ctx.needs_input_grad[3]
    return experts.gradient(experts.w1, dh, x, ends, during_exchange) if wanted else None
