"""Normalisation modules for Megatron's norm slots, beside Transformer Engine's."""

import torch

from megacpp_mcore.errors import MegacppError

_KINDS = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}


class NormError(MegacppError):
    """A normalization that the chosen backend does not have."""


class TorchNorm:
    """Builds torch's RMSNorm or LayerNorm, as the config's `normalization` says.

    Megatron's own wrapper refuses sequence parallelism; all it takes is to mark the weights, whose
    gradients each rank sees for its part of the sequence only. Raises NormError for another
    normalization, and for zero-centered gamma, which torch's modules do not have.
    """

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
        if config.normalization not in _KINDS:
            raise NormError(
                f"normalization {config.normalization!r} is not one of {', '.join(_KINDS)}"
            )
        _refuse_zero_centered_gamma(config)
        return _marked(_KINDS[config.normalization](hidden_size, eps=eps), config)


class LigerNorm:
    """Builds Liger's RMSNorm. Raises NormError for another normalization and zero-centered gamma.

    casting_mode "gemma" computes in float32 up to the last rounding, as torch and TE do. Liger's
    default, in_place, overwrites the gradient that comes in, which other branches may still read.
    """

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
        from liger_kernel.transformers.rms_norm import LigerRMSNorm

        if config.normalization != "RMSNorm":
            raise NormError(
                f"normalization {config.normalization!r} is not served by the norm backend "
                "'liger', which has RMSNorm only; name 'te' or 'reference'"
            )
        _refuse_zero_centered_gamma(config)
        norm = LigerRMSNorm(hidden_size, eps=eps, casting_mode="gemma", in_place=False)
        return _marked(norm, config)


def _refuse_zero_centered_gamma(config) -> None:
    if config.layernorm_zero_centered_gamma:
        raise NormError("layernorm_zero_centered_gamma needs the norm backend 'te'")


def _marked(norm: torch.nn.Module, config) -> torch.nn.Module:
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm
