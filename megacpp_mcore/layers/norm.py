"""Normalisation modules for Megatron's norm slots, beside Transformer Engine's.

What each can serve is in `megacpp_mcore.surfaces`.
"""

import torch

_KINDS = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}


class TorchNorm:
    """Builds torch's RMSNorm or LayerNorm, as the config's `normalization` says.

    Megatron's own wrapper refuses sequence parallelism; all it takes is to mark the weights, whose
    gradients each rank sees for its part of the sequence only.
    """

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
        return _marked(_KINDS[config.normalization](hidden_size, eps=eps), config)


class LigerNorm:
    """Builds Liger's RMSNorm.

    casting_mode "gemma" computes in float32 up to the last rounding, as torch and TE do. Liger's
    default, in_place, overwrites the gradient that comes in, which other branches may still read.
    """

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
        from liger_kernel.transformers.rms_norm import LigerRMSNorm

        norm = LigerRMSNorm(hidden_size, eps=eps, casting_mode="gemma", in_place=False)
        return _marked(norm, config)


def _marked(norm: torch.nn.Module, config) -> torch.nn.Module:
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm
