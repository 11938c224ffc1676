"""Reading a weight without calling the module that owns it."""

import torch

from megacpp_mcore.errors import MegacppError


class HookError(MegacppError):
    """A hook that a module which is not called would not run, or whose result nobody would read."""


_INSTEAD = 'remove the hook, or name a backend that calls the module, such as "reference"'


def wait_for_param_gather(module: torch.nn.Module, is_called: bool = False) -> torch.nn.Module:
    """Run the forward pre-hooks of `module`, so that its parameters can be read, and return it.

    With overlap_param_gather, Megatron's data parallelism gathers the updated parameters in the
    background and waits for them in a forward pre-hook of the module that owns them. Code that
    reads a weight without calling its module must wait here, or it may read stale values.

    is_called: the module is called as well, for something else, and its other hooks run then.

    Raises HookError where a hook returns an input, which nobody would read, and for a hook that
    only a call would run.
    """
    if not is_called and hooks_of_a_call(module):
        raise HookError(
            f"a forward or backward hook of a {type(module).__name__} would not run, as a fused "
            f"operation reads its weight and does not call it: {_INSTEAD}"
        )
    takes_kwargs = module._forward_pre_hooks_with_kwargs
    for number, hook in list(module._forward_pre_hooks.items()):
        if number in takes_kwargs:
            found = hook(module, (), {})
        else:
            found = hook(module, ())
            found = None if found is None else (found if isinstance(found, tuple) else (found,), {})
        if found is not None and any(len(part) for part in found):
            raise HookError(
                f"a forward pre-hook of a {type(module).__name__} returns an input, but a fused "
                f"operation reads its weight and does not call it: {_INSTEAD}"
            )
    return module


def hooks_of_a_call(module: torch.nn.Module) -> bool:
    """Whether `module` has hooks that only a call runs: all but forward pre-hooks."""
    return bool(module._forward_hooks or module._backward_hooks or module._backward_pre_hooks)


_OF_PARAMETERS = ("megatron.core.distributed.", "megacpp_mcore.")


def only_gathers(module: torch.nn.Module) -> bool:
    """Whether nobody but data parallelism has a forward pre-hook on `module`. Somebody else's may
    replace the input, so that what is computed of it before the call would be wrong."""
    hooks = module._forward_pre_hooks.values()
    return all((getattr(h, "__module__", None) or "").startswith(_OF_PARAMETERS) for h in hooks)
