"""Weight gradients that go straight into `main_grad`, Megatron's buffer of float32 gradients.

The contract is that of Megatron's own linears: whoever has added a weight's gradient to its
main_grad sets `grad_added_to_main_grad`, and returns a gradient that nobody reads.
"""

import torch
from torch import Tensor


def takes_gradients(weight: Tensor) -> bool:
    """Whether the weight has a main_grad to add to: data parallelism has wrapped its module."""
    return getattr(weight, "main_grad", None) is not None


def handed_on(weight: Tensor) -> Tensor:
    """What autograd gets for a weight whose gradient is in main_grad: as Megatron's linears.

    zero_out_wgrad: somebody adds it up all the same, as with weights that two layers share.
    """
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


def fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices of one dtype, 16-bit or float32, summed and written in float32.

    16-bit values are exact in float32, and so are their products.
    """
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
