"""Megatron's shared expert with a SwiGLU of ours."""

from collections.abc import Callable

import torch
from torch.nn import functional

from megacpp_mcore.kernels.moe_experts.activation import swiglu


class SharedExpert:
    """Builds what `upstream`, Megatron's builder of shared experts, builds.

    Its fused SwiGLU becomes `kernels.moe_experts.activation.swiglu`, which computes the same.
    Megatron's is compiled by torch.compile, forward and backward, in a run's first step. Other
    activations stay Megatron's, and so does an input that is kept in FP8 or on the CPU.
    """

    def __new__(cls, upstream: Callable[..., torch.nn.Module], *, config, **kwargs):
        expert = upstream(config=config, **kwargs)
        own = expert.config  # a copy of its own
        if not _fuses_swiglu(own):
            return expert
        # What Megatron does with a module of Transformer Engine's: it gets fc1's output, whole.
        own.bias_activation_fusion, own.use_te_activation_func = False, True
        expert.activation_func = swiglu
        return expert


def _fuses_swiglu(config) -> bool:
    return (
        config.bias_activation_fusion
        and config.gated_linear_unit
        and config.activation_func is functional.silu
        and not config.add_bias_linear
        and not config.activation_func_fp8_input_store
        and not config.cpu_offloading
    )
