"""Activation recomputation in our own layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.utils.checkpoint import checkpoint


def recomputed(config, tp_group, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """`function(*args, **more)`, whose intermediate results the backward pass recomputes.

    function: must draw no random numbers, because no random state is saved. more: arguments
    without gradients. Under FP8 this uses Transformer Engine's checkpoint, so that the second call
    computes in FP8 as the first did.
    """
    function = partial(function, **more)
    if not torch.is_grad_enabled():
        return function(*args)
    if config.fp8:
        from megatron.core.extensions.transformer_engine import te_checkpoint

        return te_checkpoint(function, False, get_cuda_rng_tracker, tp_group, *args)
    # Reentrant, as Megatron's: mamba-ssm reads saved tensors twice, which non-reentrant refuses
    return checkpoint(function, *args, use_reentrant=True, preserve_rng_state=False)
