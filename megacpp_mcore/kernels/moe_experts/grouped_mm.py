"""The experts through torch's grouped matrix product: one launch for all of them."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from megacpp_mcore.kernels.moe_experts.reference import weighted_swiglu


def experts_grouped_mm(
    x: Tensor,
    counts: Tensor,
    w1: Tensor,
    w2: Tensor,
    probs: Tensor,
    *,
    activation: Callable[[Tensor, Tensor], Tensor] = weighted_swiglu,
) -> Tensor:
    """Shapes as in the package. The host never waits for the device if counts are on it.

    activation: (fc1's output (t, 2f), probs (t,)) -> (t, f); by default SwiGLU times probs.
    torch serves bfloat16 (outside torch.compile also float16 and float32) where h and f are
    multiples of 16 bytes; anything else raises RuntimeError.
    """
    ends = counts.to(x.device).cumsum(0).to(torch.int32)
    h = functional.grouped_mm(x.contiguous(), w1.transpose(-1, -2), offs=ends)
    h = activation(h, probs).contiguous()
    return _DenseGradient.apply(functional.grouped_mm(h, w2.transpose(-1, -2), offs=ends))


class _DenseGradient(torch.autograd.Function):
    """The identity. grouped_mm's backward pass refuses a strided gradient, as of a sum."""

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.contiguous()
