"""Intermediate results made again in the backward pass instead of kept, in layers of our own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.utils.checkpoint import checkpoint


def recomputed(config, tp_group, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """What `function(*args, **more)` returns; the backward pass calls it again for what it needs.

    function: draws no random numbers, so that no random state is kept for the second call. more:
    nothing that has a gradient. Under FP8 it is Transformer Engine's checkpoint, whose second call
    computes in FP8 as the first did.
    """
    function = partial(function, **more)
    if not torch.is_grad_enabled():
        return function(*args)
    if config.fp8:
        from megatron.core.extensions.transformer_engine import te_checkpoint

        return te_checkpoint(function, False, get_cuda_rng_tracker, tp_group, *args)
    # Reentrant, as Megatron's own: mamba-ssm reads its saved tensors twice, which the other refuses
    return checkpoint(function, *args, use_reentrant=True, preserve_rng_state=False)
