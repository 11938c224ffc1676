"""The sum of a block's output and its residual."""

from collections.abc import Callable

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from torch import Tensor

BiasDropoutAdd = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def get_residual_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """Megatron's `get_bias_dropout_add`, but one plain addition where there is neither bias nor
    dropout.

    The returned function takes ((x, bias or None), residual, dropout probability), tensors
    [s, b, h], and returns [s, b, h] in the residual's dtype, rounded once.

    fused: Megatron's function is compiled by torch.compile, which makes the same kernel of a lone
    addition, after seconds in a run's first step; unfused, Megatron's copies x for a dropout of 0.
    """

    def add(output: tuple[Tensor, Tensor | None], residual: Tensor, probability: float) -> Tensor:
        x, bias = output
        if bias is not None or (training and probability):
            return get_bias_dropout_add(training, fused)(output, residual, probability)
        return residual + x.to(residual.dtype)

    return add
