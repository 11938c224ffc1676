"""The activation between fc1 and fc2, one kernel in each direction: of routed experts with the
router's weights, of a shared one without."""

import torch
import triton
from torch import Tensor

from megacpp_mcore.kernels.backward_pass import no_second_derivative
from megacpp_mcore.kernels.moe_experts import triton_kernels

SWIGLU, SQUARED_RELU = "swiglu", "squared_relu"
ACTIVATIONS = SWIGLU, SQUARED_RELU
# Warps of a row's program: the fastest on an H200 at f = 896, with one row a program.
_WARPS = 2


def inner_width(h: Tensor, activation: str) -> int:
    """f, of fc1's output (R, 2f) or, where the activation is not gated, (R, f)."""
    return h.shape[1] // 2 if activation == SWIGLU else h.shape[1]


def activate(h: Tensor, probs: Tensor | None, ends: Tensor | None, activation: str) -> Tensor:
    """h (R, 2f) or (R, f), probs (R,) -> (R, f) in h's dtype.

    probs silu(gate) up of [gate, up] = h, or probs relu(h)^2. Rows after the last end are left.
    Without probs and ends every row counts, as it is.
    """
    size, width = h.shape[0], inner_width(h, activation)
    a, rows = h.new_empty(size, width), _rows_of_a_program(h)
    if size:
        triton_kernels.moe_activate[(triton.cdiv(size, rows),)](
            h, probs, a, ends, 0 if ends is None else ends.shape[0], size, width,
            GATED=activation == SWIGLU, HAS_PROBS=probs is not None, ROWS=rows,
            BLOCK=_columns(width), num_warps=_WARPS,
        )  # fmt: skip
    return a


def activate_backward(
    da: Tensor, h: Tensor, probs: Tensor | None, ends: Tensor | None, activation: str,
    in_place: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of h and probs, float32, from that of activate's output; and that output.

    They are returned as (dh, output, dprobs); without probs the last two are None.
    in_place: they take the place of h and da.
    """
    size, width = da.shape
    dh, rows = h if in_place else torch.empty_like(h), _rows_of_a_program(h)
    a = row_grads = None
    if probs is not None:
        a, row_grads = da if in_place else torch.empty_like(da), torch.empty_like(probs)
    if size:
        triton_kernels.moe_activate_backward[(triton.cdiv(size, rows),)](
            da, h, probs, dh, a, row_grads, ends, 0 if ends is None else ends.shape[0], size, width,
            GATED=activation == SWIGLU, HAS_PROBS=probs is not None, ROWS=rows,
            BLOCK=_columns(width), num_warps=_WARPS,
        )  # fmt: skip
    return dh, a, row_grads


@torch.compiler.disable
def swiglu(h: Tensor) -> Tensor:
    """[gate, up] = h (..., 2f) -> silu(gate) up (..., f), computed in float32 and rounded once.

    Of a shared expert; only h is kept for the backward pass. It takes bf16, fp16 and
    float32, on CUDA, and on a CPU in Triton's interpreter.
    """
    return _SwiGLU.apply(h)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h: Tensor) -> Tensor:
        rows = h.reshape(-1, h.shape[-1]).contiguous()
        ctx.save_for_backward(rows)
        return activate(rows, None, None, SWIGLU).view(*h.shape[:-1], h.shape[-1] // 2)

    @staticmethod
    @no_second_derivative
    def backward(ctx, da: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        width = da.shape[-1]
        dh, *_ = activate_backward(da.reshape(-1, width).contiguous(), h, None, None, SWIGLU)
        return dh.view(*da.shape[:-1], 2 * width)


def _rows_of_a_program(h: Tensor) -> int:
    return 1 if h.is_cuda else 32  # Triton's interpreter takes as long for one as for 32


def _columns(width: int) -> int:
    return min(triton.next_power_of_2(width), 1024)
