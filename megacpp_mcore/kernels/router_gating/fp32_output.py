"""The router's logits and gradients as bf16 products that are summed, and written, in float32.

Products of bf16 values are exact in float32, so that casting tokens and weight to float32 first
gains nothing; it writes and reads all tokens in float32 three times. In the backward pass the
logits' gradient is float32: it is the sum of three bf16 parts of eight bits each, and all three
are multiplied in one product.
"""

import torch
from torch import Tensor

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.main_grad import fp32_product

_PARTS = 3  # of 8 bits: a float32 has 24


class RouterGatingError(MegacppError):
    """Tokens or a weight that are not bf16."""


def router_gating(x: Tensor, weight: Tensor) -> Tensor:
    """As `megacpp_mcore.kernels.router_gating.router_gating`, for bf16.

    x (..., h), weight (E, h) -> logits (..., E) in float32. Raises RouterGatingError for another
    dtype.
    """
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise RouterGatingError(
            f"x is {x.dtype} and the weight {weight.dtype}; both must be torch.bfloat16"
        )
    return _RouterGating.apply(x, weight)


class _RouterGating(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        return fp32_product(rows, weight.t()).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, dlogits: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        experts, hidden = weight.shape
        parts = _bf16_parts(dlogits.reshape(-1, experts))
        dx = parts @ weight.repeat(_PARTS, 1)
        dweight = fp32_product(parts.t(), x.reshape(-1, hidden))
        return dx.view(x.shape), dweight.view(_PARTS, experts, hidden).sum(0).to(weight.dtype)


def _bf16_parts(x: Tensor) -> Tensor:
    """x (t, E) in float32 -> (t, 3 E) in bf16, three blocks of columns whose sum is x."""
    parts = []
    for _ in range(_PARTS):
        parts.append(x.bfloat16())
        x = x - parts[-1].float()
    return torch.cat(parts, dim=1)
