"""The two norms as they are defined, in float32 or wider.

Math: Zhang and Sennrich, Root Mean Square Layer Normalization, eq. 4, and Ba et al., Layer
Normalization, eq. 4; eps is under the root, as in torch:

    RMSNorm    y = x / sqrt(mean(x^2) + eps) * weight
    LayerNorm  y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., h), weight (h,) -> (..., h) in x's dtype."""
    wide = _widened(x)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (y * weight.to(wide.dtype)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x (..., h), weight and bias (h,) -> (..., h) in x's dtype."""
    wide = _widened(x)
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (y * weight.to(wide.dtype) + bias.to(wide.dtype)).to(x.dtype)


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
