"""The router's gating product as it is defined, in float32 or wider.

Math (Shazeer et al., Outrageously Large Neural Networks, eq. 2 without noise): logits = x W^T.
"""

import torch
from torch import Tensor


def router_gating(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., h), weight (E, h) -> logits (..., E) in float32, or float64 for float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide) @ weight.to(wide).t()
