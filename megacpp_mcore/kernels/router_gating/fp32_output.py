"""The router's logits and gradients as bf16 products that are summed, and written, in float32.

Products of bf16 values are exact in float32, so that casting tokens and weight to float32 first
gains nothing; it writes and reads all tokens in float32 three times. In the backward pass the
logits' gradient is float32: it is the sum of three bf16 parts of eight bits each, and all three
are multiplied in one product.
"""

import torch
import triton
from torch import Tensor

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.backward_pass import no_second_derivative
from megacpp_mcore.kernels.main_grad import fp32_product
from megacpp_mcore.kernels.router_gating import triton_kernels

_PARTS = 3  # of 8 bits: a float32 has 24


class RouterGatingError(MegacppError):
    """Tokens or a weight that are not bf16."""


def router_gating(x: Tensor, weight: Tensor) -> Tensor:
    """As `megacpp_mcore.kernels.router_gating.router_gating`, for bf16.

    x (..., h), weight (E, h) -> logits (..., E) in float32. Raises RouterGatingError for another
    dtype.
    """
    _check(x, weight)
    return _RouterGating.apply(x, weight, None)


def router_gating_computed(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
    """The same, where `logits` (t, E) are the product already: x gets no gradient of it, they get
    theirs, for somebody who multiplies it by the weight on the way into a sum.

    Raises RouterGatingError for another dtype.
    """
    _check(x, weight)
    return _RouterGating.apply(x.detach(), weight, logits)


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise RouterGatingError(
            f"x is {x.dtype} and the weight {weight.dtype}; both must be torch.bfloat16"
        )


class _RouterGating(torch.autograd.Function):
    """logits: None, or the product, which then gets its gradient as it is."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, logits: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        logits = fp32_product(_rows(x), weight.t()) if logits is None else logits
        return logits.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @no_second_derivative
    def backward(ctx, dlogits: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_logits = ctx.needs_input_grad
        dlogits, dx, dweight = dlogits.reshape(-1, weight.shape[0]), None, None
        if for_x or for_weight:
            dx, dweight = _backward(dlogits, _rows(x), weight, for_x)
        return dx.view(x.shape) if for_x else None, dweight, dlogits if for_logits else None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


@torch.library.custom_op("megacpp::router_gating_backward", mutates_args=())
def _backward(dlogits: Tensor, x: Tensor, weight: Tensor, for_x: bool) -> tuple[Tensor, Tensor]:
    """dlogits (t, E), x (t, h) -> dx (t, h), or nothing unless for_x, and dweight (E, h)."""
    parts = _bf16_parts(dlogits)
    dx = parts @ weight.repeat(_PARTS, 1) if for_x else x.new_empty(0)
    high, middle, low = fp32_product(parts.t(), x).view(_PARTS, *weight.shape)
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    torch.add(high, middle + low, out=dweight)  # rounded as it is written
    return dx, dweight


@_backward.register_fake
def _(dlogits, x, weight, for_x):
    dx = torch.empty_like(x) if for_x else x.new_empty(0)
    return dx, torch.empty_like(weight, memory_format=torch.contiguous_format)


def _bf16_parts(x: Tensor) -> Tensor:
    """x (t, E) in float32 -> (t, 3 E) in bf16, three blocks of columns whose sum is x."""
    parts = x.new_empty(x.shape[0], _PARTS * x.shape[1], dtype=torch.bfloat16)
    if x.numel():
        block = 1024
        triton_kernels.split_bf16[(triton.cdiv(x.numel(), block),)](
            x.contiguous(), parts, x.numel(), x.shape[1], PARTS=_PARTS, BLOCK=block
        )
    return parts
