"""Bias-dropout-add with the interface of Megatron's layers."""

from collections.abc import Callable

from torch import Tensor

from megacpp_mcore.kernels.residual import bias_dropout_add


def get_bias_dropout_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """(x_with_bias, residual, dropout) -> Tensor, as Megatron's function of that name returns.

    fused: the config's bias_dropout_fusion, ignored here: nothing is compiled.
    """

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        x, bias = x_with_bias
        return bias_dropout_add(x, bias, residual, dropout=dropout, training=training)

    return add
