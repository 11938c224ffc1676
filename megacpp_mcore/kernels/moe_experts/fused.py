"""The experts from tokens to tokens: routing, copies, products, SwiGLU and sum in one operator.

Only x, fc1's output H and the routing are kept for the backward pass; the sorted tokens, A (the
input of fc2) and fc2's output are not. As in SonicMoE (arXiv 2512.14080), the router's gradient is
dA' . A' with A' = silu(gate) up and dA' = dY W2, so that fc2's output is not needed.

Weight gradients are added to a weight's main_grad, where Megatron asks for it, by the contract of
its own linears: grad_added_to_main_grad is set, and the gradient that autograd gets is not used.
"""

from types import ModuleType
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from megacpp_mcore.kernels.moe_experts import torch_products, triton_kernels
from megacpp_mcore.kernels.moe_experts.readers import Readers
from megacpp_mcore.kernels.moe_experts.routing import (
    Gathered,
    Routing,
    probs_gradient,
    route,
    to_tokens,
)

# Warps of a row's program: the fastest of twelve on an H200 at f = 896, with one row a program.
_WARPS, _BACKWARD_WARPS = 2, 4


class Experts(NamedTuple):
    """w1 (E, 2f, h), w2 (E, h, f). into_main_grad: add the gradients to the weights' main_grad.
    products: torch_products, or a module with its functions."""

    w1: Tensor
    w2: Tensor
    into_main_grad: bool = False
    products: ModuleType = torch_products


@torch.compiler.disable
def experts_routed(
    x: Tensor, routing_map: Tensor, probs: Tensor, weights: Experts, topk: int,
    addend: Tensor | None = None, rows: Tensor | None = None, readers: Readers | None = None,
) -> Tensor:  # fmt: skip
    """The experts of every token, with the router's weights, and the sum: (tokens, h).

    x (tokens, h). routing_map (tokens, E), bool, at most topk a token. probs (tokens, E). addend
    (tokens, h): added to the sum before it is rounded, such as the shared expert's output. readers:
    of x, whose gradient goes there by way of rows, readers.rows; x itself then gets none. Runs on
    CUDA, and on a CPU in Triton's interpreter. The host never waits for the device.
    """
    if readers is not None:
        x = x.detach()
    w1, w2 = weights.w1, weights.w2
    return _Routed.apply(x, rows, probs, w1, w2, addend, routing_map, topk, weights, readers)


@torch.compiler.disable
def experts_sorted(x: Tensor, counts: Tensor, probs: Tensor, weights: Experts) -> Tensor:
    """The package's function: x (t, h) sorted by expert, counts (E,), probs (t,) -> (t, h).

    By torch's products: rows that a dispatcher delivers are not padded.
    """
    weights = weights._replace(products=torch_products)
    return _Sorted.apply(x, counts, probs, weights.w1, weights.w2, weights)


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, probs, w1, w2, addend, routing_map, topk, weights, readers):
        products = weights.products
        routing = route(routing_map, probs, topk, products.ALIGN)
        h = products.forward(Gathered(x, routing), w1, routing.ends)
        a = swiglu(h, routing.row_probs, routing.ends)
        out = to_tokens(products.forward(a, w2, routing.ends), routing, addend)
        ctx.save_for_backward(
            x, h, w1, w2, routing.routing_map, routing.rows, routing.token, routing.row_probs,
            routing.ends,
        )  # fmt: skip
        ctx.dtype, ctx.weights = probs.dtype, weights
        if readers is not None:
            readers.sorted.routing = routing
        return out

    @staticmethod
    def backward(ctx, d_out):
        x, h, w1, w2, *sorting = ctx.saved_tensors
        products = ctx.weights.products
        routing = Routing(*sorting, align=products.ALIGN)
        dh, dw2, row_grads = _down_backward(ctx, Gathered(d_out, routing), h, w2, routing)
        dw1 = _weight_gradient(ctx, 3, dh, Gathered(x, routing), routing.ends)
        d_probs = probs_gradient(routing, row_grads, ctx.dtype)
        d_rows = products.input_gradient(dh, w1, routing.ends)
        dx = to_tokens(d_rows, routing) if ctx.needs_input_grad[0] else None
        found = dx, d_rows, d_probs, dw1, dw2, d_out, None, None, None, None
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
        ctx.save_for_backward(x, h, w1, w2, row_probs, ends)
        ctx.dtype, ctx.weights = probs.dtype, weights
        return products.forward(swiglu(h, row_probs, ends), w2, ends)

    @staticmethod
    def backward(ctx, dy):
        x, h, w1, w2, row_probs, ends = ctx.saved_tensors
        rows = _SortedRows(row_probs, ends)
        dh, dw2, row_grads = _down_backward(ctx, dy.contiguous(), h, w2, rows)
        dw1 = _weight_gradient(ctx, 3, dh, x, ends)
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
    da = ctx.weights.products.input_gradient(dy, w2, rows.ends)
    dh, a, row_grads = swiglu_backward(da, h, rows.row_probs, rows.ends)
    del da
    return dh, _weight_gradient(ctx, 4, dy, a, rows.ends), row_grads


def _weight_gradient(
    ctx, place: int, dy: Tensor | Gathered, x: Tensor | Gathered, ends: Tensor
) -> Tensor | None:
    """What autograd gets for the weight that is argument `place` of both functions: w1 or w2.

    dy, x: the gradient of its product's output and the product's input.
    """
    if not ctx.needs_input_grad[place]:
        return None
    experts = ctx.weights
    weight = experts.w1 if place == 3 else experts.w2
    if not experts.into_main_grad or getattr(weight, "main_grad", None) is None:
        return experts.products.weight_gradient(dy, x, ends)
    experts.products.add_weight_gradient(weight.main_grad, dy, x, ends)
    return handed_on(weight)


def handed_on(weight: Tensor) -> Tensor:
    """What autograd gets for a weight whose gradient is in main_grad: as Megatron's linears.

    zero_out_wgrad: somebody adds it up all the same, as with weights that two layers share.
    """
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


def swiglu(h: Tensor, probs: Tensor, ends: Tensor) -> Tensor:
    """h (R, 2f), probs (R,) -> (R, f) in h's dtype: probs silu(gate) up, of [gate, up] = h."""
    size, width = h.shape[0], h.shape[1] // 2
    a, rows = h.new_empty(size, width), _rows_of_a_program(h)
    if size:
        triton_kernels.swiglu[(triton.cdiv(size, rows),)](
            h, probs, a, ends, ends.shape[0], width, ROWS=rows, BLOCK=_columns(width),
            num_warps=_WARPS,
        )  # fmt: skip
    return a


def swiglu_backward(
    da: Tensor, h: Tensor, probs: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of h and probs, float32, from that of swiglu's output; and that output."""
    size, width = da.shape
    dh, a, row_grads = torch.empty_like(h), torch.empty_like(da), torch.empty_like(probs)
    rows = _rows_of_a_program(h)
    if size:
        triton_kernels.swiglu_backward[(triton.cdiv(size, rows),)](
            da, h, probs, dh, a, row_grads, ends, ends.shape[0], width, ROWS=rows,
            BLOCK=_columns(width), num_warps=_BACKWARD_WARPS,
        )  # fmt: skip
    return dh, a, row_grads


def _rows_of_a_program(h: Tensor) -> int:
    return 1 if h.is_cuda else 32  # Triton's interpreter takes as long for one as for 32


def _columns(width: int) -> int:
    return min(triton.next_power_of_2(width), 1024)
