"""Weight gradients that go straight into `main_grad`, Megatron's buffer of float32 gradients.

The contract is that of Megatron's own linears: whoever has added a weight's gradient to its
main_grad sets `grad_added_to_main_grad`, and returns a gradient that nobody reads.
"""

import torch
from torch import Tensor


def takes_gradients(weight: Tensor) -> bool:
    """Whether the weight has a main_grad to add to: data parallelism has wrapped its module."""
    return getattr(weight, "main_grad", None) is not None


def handed_on(weight: Tensor) -> Tensor | None:
    """What autograd gets for a weight whose gradient is in main_grad: as Megatron's linears, but
    None from the second use of the weight in one backward pass on.

    Of two such gradients autograd would make the sum, which nobody reads either. One there must be:
    with overlap_grad_reduce Megatron's data parallelism refuses a weight whose grad is None.

    zero_out_wgrad: somebody adds it up all the same, as with weights that two layers share.
    """
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True
    if not _is_first_use(weight):
        return None
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


_HANDED_ON_IN = "megacpp_handed_on_in"  # the number of the backward pass that had one last


def _is_first_use(weight: Tensor) -> bool:
    """Whether nothing has been handed on for the weight in this backward pass.

    A backward pass inside another, as activation checkpoints make, has a number of its own and
    hands its gradients on when it ends; the outer one's next use then hands on once more.
    """
    number = torch._C._current_graph_task_id()  # never that of an earlier one; -1 outside of any
    if number >= 0 and getattr(weight, _HANDED_ON_IN, None) == number:
        return False
    setattr(weight, _HANDED_ON_IN, number)
    return True


# A step's first gradient of a weight may be written where the others are added: then nobody has to
# fill its main_grad with zeros, nor to read them. Who zeroes the buffers (`training.gpu.zeroing`)
# asks which weights those are, and says before each step that their first gradient is due.
_OVERWRITTEN, _DUE = "megacpp_main_grad_is_overwritten", "megacpp_first_gradient_is_due"


def overwrites(weight: Tensor) -> None:
    """Mark a weight of which every gradient is stored by a function that asks `is_due`."""
    setattr(weight, _OVERWRITTEN, True)


def is_overwritten(weight: Tensor) -> bool:
    """Whether the weight has that mark."""
    return getattr(weight, _OVERWRITTEN, False)


def expect_first(weight: Tensor) -> None:
    """Say that main_grad holds nothing: the next gradient is to be written."""
    setattr(weight, _DUE, True)


def is_due(weight: Tensor) -> bool:
    """Whether this gradient is the step's first, to be written; the next one then is not."""
    due = getattr(weight, _DUE, False)
    setattr(weight, _DUE, False)
    return due


def fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices of one dtype, 16-bit or float32, summed and written in float32.

    16-bit values are exact in float32, and so are their products.
    """
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
