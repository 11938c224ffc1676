"""Functions of Megatron's training loop, wrapped during a run without a change of what they do.

megatron-core 0.19.2 has no callbacks. Its loop looks its functions up in the module
`megatron.training.training`.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron.training import training

from megacpp_mcore.errors import MegacppError

# Called as wrapper(call, given). call: does what Megatron's function does. given: its arguments.
Wrapper = Callable[[Callable[[], Any], dict[str, Any]], Any]


class WatchError(MegacppError):
    """Megatron's training loop is not the one that this package supports."""


@contextlib.contextmanager
def wrapped(wrappers: Mapping[str, tuple[Wrapper, tuple[str, ...]]]) -> Iterator[None]:
    """Wrap Megatron's functions inside the block.

    wrappers: a function's name -> what wraps it, and the arguments that this reads. Raises
    WatchError when a function or an argument is missing.
    """
    saved = {name: _known_function(name, needed) for name, (_, needed) in wrappers.items()}
    for name, (wrapper, _) in wrappers.items():
        setattr(training, name, _bound(wrapper, saved[name]))
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(training, name, function)


def _bound(wrapper: Wrapper, function: Callable) -> Callable:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return wrapper(lambda: function(*args, **kwargs), given.arguments)

    return call


def _known_function(name: str, parameters: tuple[str, ...]) -> Callable:
    function = getattr(training, name, None)
    if function is None or not set(parameters) <= set(inspect.signature(function).parameters):
        raise WatchError(
            f"megatron.training.training.{name}({', '.join(parameters)}) does not exist: this "
            "package supports the loop of megatron-core 0.19.2"
        )
    return function
