"""Normalisation in plain torch, with what Megatron's WrappedTorchNorm leaves out."""

import torch


class TorchNorm:
    """Builds torch's RMSNorm or LayerNorm, as the config's `normalization` says.

    Megatron's own wrapper refuses sequence parallelism; all it takes is to mark the weights, whose
    gradients each rank sees for its part of the sequence only. Raises ValueError for another
    normalization, and for zero-centered gamma, which torch's modules do not have.
    """

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
        kinds = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
        if config.normalization not in kinds:
            raise ValueError(
                f"normalization {config.normalization!r} is not one of {', '.join(kinds)}"
            )
        if config.layernorm_zero_centered_gamma:
            raise ValueError("layernorm_zero_centered_gamma needs the norm backend 'te'")
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
