"""Weights that are read without a call of the module that holds them."""

import torch


def gathered(module: torch.nn.Module) -> torch.nn.Module:
    """`module`, its own parameters ready to be read, as at a call of it.

    With overlap_param_gather Megatron's data parallelism gathers the parameters of the next step in
    the background and waits for them in a forward pre-hook of the module that has them. Without
    the hook a part of them would be the last step's, and nothing would say so.
    """
    takes_kwargs = module._forward_pre_hooks_with_kwargs
    for number, hook in list(module._forward_pre_hooks.items()):
        hook(module, (), {}) if number in takes_kwargs else hook(module, ())
    return module
