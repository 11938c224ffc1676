"""The activation between fc1 and fc2 with the router's weights, one kernel in each direction."""

import torch
import triton
from torch import Tensor

from megacpp_mcore.kernels.moe_experts import triton_kernels

SWIGLU, SQUARED_RELU = "swiglu", "squared_relu"
ACTIVATIONS = SWIGLU, SQUARED_RELU
# Warps of a row's program: the fastest of twelve on an H200 at f = 896, with one row a program.
_WARPS, _BACKWARD_WARPS = 2, 4


def inner_width(h: Tensor, activation: str) -> int:
    """f, of fc1's output (R, 2f) or, where the activation is not gated, (R, f)."""
    return h.shape[1] // 2 if activation == SWIGLU else h.shape[1]


def activate(h: Tensor, probs: Tensor, ends: Tensor, activation: str) -> Tensor:
    """h (R, 2f) or (R, f), probs (R,) -> (R, f) in h's dtype.

    probs silu(gate) up of [gate, up] = h, or probs relu(h)^2. Rows after the last end are left.
    """
    size, width = h.shape[0], inner_width(h, activation)
    a, rows = h.new_empty(size, width), _rows_of_a_program(h)
    if size:
        triton_kernels.activate[(triton.cdiv(size, rows),)](
            h, probs, a, ends, ends.shape[0], width, GATED=activation == SWIGLU, ROWS=rows,
            BLOCK=_columns(width), num_warps=_WARPS,
        )  # fmt: skip
    return a


def activate_backward(
    da: Tensor, h: Tensor, probs: Tensor, ends: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of h and probs, float32, from that of activate's output; and that output.

    They are returned as (dh, output, dprobs).
    """
    size, width = da.shape
    dh, a, row_grads = torch.empty_like(h), torch.empty_like(da), torch.empty_like(probs)
    rows = _rows_of_a_program(h)
    if size:
        triton_kernels.activate_backward[(triton.cdiv(size, rows),)](
            da, h, probs, dh, a, row_grads, ends, ends.shape[0], width,
            GATED=activation == SWIGLU, ROWS=rows, BLOCK=_columns(width),
            num_warps=_BACKWARD_WARPS,
        )  # fmt: skip
    return dh, a, row_grads


def _rows_of_a_program(h: Tensor) -> int:
    return 1 if h.is_cuda else 32  # Triton's interpreter takes as long for one as for 32


def _columns(width: int) -> int:
    return min(triton.next_power_of_2(width), 1024)
