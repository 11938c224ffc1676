"""Reading a weight without calling the module that owns it."""

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.modules.module import _has_any_global_hook

from megacpp_mcore.errors import MegacppError


class HookError(MegacppError):
    """A hook or forward pass that a module which is not called would not run."""


class HookWarning(UserWarning):
    """Hooks of all modules that a module which is not called does not run."""


# Of the packages that build layers, and of those whose hooks wait for a module's parameters.
_BUILT = ("megacpp_mcore.", "megatron.", "transformer_engine.", "torch.")
_OF_PARAMETERS = ("megacpp_mcore.", "megatron.core.distributed.", "torch.distributed.")


def wait_for_param_gather(module: torch.nn.Module, is_called: bool = False) -> torch.nn.Module:
    """Run the forward pre-hooks that wait for parameters of `module`, so that these can be read,
    and return it.

    With overlap_param_gather, Megatron's data parallelism gathers the updated parameters in the
    background and waits for them in a forward pre-hook of the module that owns them. Code that
    reads a weight without calling its module must wait here, or it may read stale values.

    is_called: the module is called as well, for something else, and its other hooks run then.

    Raises HookError where somebody would miss a call, unless it is called: see `needs_no_call`.
    Hooks that torch registers for all modules are its tools', such as a FLOP counter's, and get a
    HookWarning.
    """
    if not is_called and not needs_no_call(module):
        kind = type(module).__name__
        instead = 'or name a backend that calls the module, such as "reference"'
        if not _is_left_alone(module):
            raise HookError(
                f"a hook of a {kind}, or the forward pass that somebody has put in its place, "
                "would not run, as a fused operation reads the weight and does not call the "
                f"module: remove it, {instead}"
            )
        warnings.warn(
            f"hooks that are registered for all modules do not run on a {kind}: a fused operation "
            f"reads its weight and does not call it: expect none there, {instead}",
            HookWarning,
            stacklevel=2,
        )
    takes_kwargs = module._forward_pre_hooks_with_kwargs
    for number, hook in list(module._forward_pre_hooks.items()):
        if _is_of_parameters(hook):
            hook(module, (), *([{}] if number in takes_kwargs else []))
    return module


def needs_no_call(module: torch.nn.Module) -> bool:
    """Whether nobody would miss a call of `module`: its forward pass is as built, and there are no
    hooks but those that wait for its parameters. Others' may replace what it takes or returns, and
    have gradients of their own of both."""
    return _is_left_alone(module) and not _has_any_global_hook()


def _is_left_alone(module: torch.nn.Module) -> bool:
    """The same of what is on the module itself."""
    others = any(not _is_of_parameters(hook) for hook in module._forward_pre_hooks.values())
    of_a_call = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    return _is_as_built(module) and not (others or of_a_call)


def _is_of_parameters(hook: Callable) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(_OF_PARAMETERS)


def _is_as_built(module: torch.nn.Module) -> bool:
    """Whether its forward pass is of one of the packages that build layers."""
    own = vars(module).get("forward")
    if own is not None:  # others' may bear the name and module of the one that they call
        return isinstance(own, partial) and own.func.__module__.startswith(_BUILT[0])
    return (getattr(type(module).forward, "__module__", None) or "").startswith(_BUILT)


def only_multiplies(linear: torch.nn.Module) -> bool:
    """Whether its call is the product with its weight, a parameter of its own: neither bias nor
    norm, and nothing of somebody else's."""
    weight, bias = (getattr(linear, name, None) for name in ("weight", "bias"))
    if type(weight) is not torch.nn.Parameter or hasattr(linear, "layer_norm_weight"):
        return False
    return not (bias is not None and bias.numel()) and _is_left_alone(linear)
