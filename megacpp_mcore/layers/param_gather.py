"""Reading a weight without calling the module that owns it."""

from functools import partial

import torch

from megacpp_mcore.errors import MegacppError


class HookError(MegacppError):
    """A hook or forward pass that a module which is not called would not run, or whose result
    nobody would read."""


_INSTEAD = 'remove it, or name a backend that calls the module, such as "reference"'
_BUILT = ("megacpp_mcore.", "megatron.", "transformer_engine.", "torch.")


def wait_for_param_gather(module: torch.nn.Module, is_called: bool = False) -> torch.nn.Module:
    """Run the forward pre-hooks of `module`, so that its parameters can be read, and return it.

    With overlap_param_gather, Megatron's data parallelism gathers the updated parameters in the
    background and waits for them in a forward pre-hook of the module that owns them. Code that
    reads a weight without calling its module must wait here, or it may read stale values.

    is_called: the module is called as well, for something else, and its other hooks run then.

    Raises HookError where a hook returns an input, which nobody would read, for a hook that only a
    call would run, and for a forward pass that is not Megatron's, Transformer Engine's, torch's or
    ours, as an adapter's or a quantizer's.
    """
    if not is_called:
        kind = type(module).__name__
        for what, there in (
            (f"a forward or backward hook of a {kind}", hooks_of_a_call(module)),
            (f"the forward pass of a {kind}, which is somebody else's,", not _is_as_built(module)),
        ):
            if there:
                raise HookError(
                    f"{what} would not run, as a fused operation reads the weight and does not "
                    f"call the module: {_INSTEAD}"
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
                f"operation reads the weight and does not call the module: {_INSTEAD}"
            )
    return module


def hooks_of_a_call(module: torch.nn.Module) -> bool:
    """Whether `module` has hooks that only a call runs: all but forward pre-hooks."""
    return bool(module._forward_hooks or module._backward_hooks or module._backward_pre_hooks)


def _is_as_built(module: torch.nn.Module) -> bool:
    """Whether its forward pass is of one of the packages that build layers."""
    own = vars(module).get("forward")
    if own is not None:  # others' may bear the name and module of the one that they call
        return isinstance(own, partial) and own.func.__module__.startswith(_BUILT[0])
    return (getattr(type(module).forward, "__module__", None) or "").startswith(_BUILT)


def only_multiplies(linear: torch.nn.Module) -> bool:
    """Whether its call is the product with its weight: neither bias nor norm, a parameter of its
    own, and a forward pass as built."""
    weight, bias = (getattr(linear, name, None) for name in ("weight", "bias"))
    if type(weight) is not torch.nn.Parameter or hasattr(linear, "layer_norm_weight"):
        return False
    return not (bias is not None and bias.numel()) and _is_as_built(linear)


def needs_no_call(module: torch.nn.Module) -> bool:
    """Whether nobody would miss a call of `module`: its forward pass is as built, and it has no
    hooks but those that wait for its parameters. Somebody else's pre-hook may replace the input, so
    that what is computed of it before the call would be wrong, and the gradient of what a hook does
    with the input would be lost."""
    return _is_as_built(module) and _only_gathers(module) and not hooks_of_a_call(module)


def refuse_what_needs_a_call(module: torch.nn.Module) -> None:
    """Raises HookError where somebody would miss a call of `module`."""
    if not needs_no_call(module):
        raise HookError(
            f"a hook of a {type(module).__name__} would not run, or a forward pass of somebody "
            f"else's, as its layer calls an operation of it instead: {_INSTEAD}"
        )


_OF_PARAMETERS = ("megatron.core.distributed.", "megacpp_mcore.")


def _only_gathers(module: torch.nn.Module) -> bool:
    """Whether nobody but data parallelism has a forward pre-hook on `module`."""
    hooks = module._forward_pre_hooks.values()
    return all((getattr(h, "__module__", None) or "").startswith(_OF_PARAMETERS) for h in hooks)
