"""Normalisation modules for Megatron's norm slots, as alternatives to Transformer Engine's.

What each supports is declared in `megacpp_mcore.surfaces.norm`.
"""

import torch
from torch import Tensor
from torch.nn import functional

from megacpp_mcore.layers.param_gather import needs_no_call


class _RMSNorm(torch.nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        y = functional.rms_norm(x, self.normalized_shape, weight, self.eps)
        return y.to(self.weight.dtype)


class _LayerNorm(torch.nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        y = functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
        return y.to(self.weight.dtype)


_KINDS = {"RMSNorm": _RMSNorm, "LayerNorm": _LayerNorm}


class TorchNorm:
    """Builds torch's RMSNorm or LayerNorm, as the config's `normalization` says.

    With a float32 residual stream (fp32_residual_connection) the output has the weights' dtype, as
    with Transformer Engine's norms.

    Megatron's own wrapper refuses sequence parallelism. It only requires marking the weights, so
    that Megatron sums their gradients, each of a part of the sequence, over the ranks.
    """

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
        return _mark_sequence_parallel(_KINDS[config.normalization](hidden_size, eps=eps), config)


class FusedRMSNorm:
    """Builds the RMSNorm of `kernels.norm.triton`.

    has_residual: its input is also the layer's residual. It then returns (normalised, residual),
    which Megatron's transformer layers take from a norm, and both gradients are added in one
    kernel.
    """

    fuses_residual = True

    def __new__(
        cls, config, hidden_size: int, eps: float = 1e-5, has_residual: bool = False
    ) -> torch.nn.Module:
        return _mark_sequence_parallel(_FusedRMSNorm(hidden_size, eps, has_residual), config)


class _FusedRMSNorm(torch.nn.RMSNorm):
    def __init__(self, hidden_size: int, eps: float, has_residual: bool) -> None:
        from megacpp_mcore.kernels.norm.triton import rms_norm, rms_norm_with_residual

        super().__init__(hidden_size, eps=eps)
        self.has_residual = has_residual
        self.plain, self.with_residual = rms_norm, rms_norm_with_residual

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        # What a hook replaces, x or its gradient, is the norm's alone: the residual is the layer's.
        norm = self.with_residual if self.has_residual and needs_no_call(self) else self.plain
        return norm(x, self.weight, self.eps)


def is_fused_with_residual(norm: torch.nn.Module) -> bool:
    """Whether norm is FusedRMSNorm's module, whose input is the layer's residual, and nobody would
    miss its call."""
    return type(norm) is _FusedRMSNorm and norm.has_residual and needs_no_call(norm)


def build(
    norm: type, config, hidden_size: int, eps: float, has_residual: bool
) -> torch.nn.Module:  # fmt: skip
    """The norm of a backend's class. has_residual: its input is also the layer's residual, which a
    class with `fuses_residual` returns with the normalised input."""
    more = {"has_residual": has_residual} if getattr(norm, "fuses_residual", False) else {}
    return norm(config=config, hidden_size=hidden_size, eps=eps, **more)


def _mark_sequence_parallel(norm: torch.nn.Module, config) -> torch.nn.Module:
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm
