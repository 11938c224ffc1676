"""The embedding as it is defined: y[s, b] = weight[ids[b, s]], by Megatron's own operations.

Its gradient: dweight[v] is the sum of dy[s, b] over the tokens with ids[b, s] = v.
"""

import torch
from torch import Tensor
from torch.nn import functional


def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """weight (V, h), ids (b, s) integers in [0, V) -> (s, b, h), contiguous, in weight's dtype.

    Raises IndexError for an id out of range; on a GPU that stops the process by a device assertion.
    """
    table = weight
    if not weight.is_cuda:  # there torch adds 16-bit gradients up in 16 bits
        table = weight.to(torch.promote_types(weight.dtype, torch.float32))
    rows = functional.embedding(ids, table)  # [b, s, h]
    return rows.transpose(0, 1).contiguous().to(weight.dtype)
