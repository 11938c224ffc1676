"""Bias, dropout and addition, one after another.

Math: y = residual + dropout(x + bias), in the residual's dtype (float32 in a bf16 model whose
residual stream is kept in float32).
"""

from torch import Tensor
from torch.nn import functional


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, *, dropout: float, training: bool
) -> Tensor:
    """x and residual (..., h), bias (h,) or None -> (..., h) in the residual's dtype."""
    x = x.to(residual.dtype)
    if bias is not None:
        x = x + bias.to(residual.dtype)
    return residual + functional.dropout(x, dropout, training)
