"""What a surface, a backend and a problem are, and how a backend asks for an optional package.

Imports neither torch nor any optional package.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe

REFERENCE = "reference"


@dataclass(frozen=True)
class Problem:
    """What a backend is asked to serve; build one with `Problem.of`.

    device: "cpu" or "cuda". dtype: torch's name without the prefix ("bfloat16"), or "any" where the
    choice is made before the dtype is known. sizes: what the surface's backends need to know (head
    dims, heads, layout) as sorted (name, value) pairs, so that a problem can be a cache key.
    """

    device: str
    dtype: str
    sizes: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, device: str, dtype: str, **sizes: Any) -> "Problem":
        return cls(device, dtype, tuple(sorted(sizes.items())))

    def size(self, name: str, default: Any = None) -> Any:
        return dict(self.sizes).get(name, default)


@dataclass(frozen=True)
class Backend:
    """One implementation of a surface.

    implementation: "module:attribute", imported when a layer takes the backend. supports: None when
    the backend can serve the problem, else a sentence saying why not. by_name: it serves whoever
    names it, and `auto` goes past it.
    """

    name: str
    implementation: str
    supports: Callable[[Problem], str | None]
    by_name: bool = False


@dataclass(frozen=True)
class Surface:
    """A place in the model where more than one implementation fits.

    backends: in order of preference; the last is `reference`, plain torch. problem: what a recipe
    asks of the surface on a device, or None when the recipe's model does not have the surface.
    """

    name: str
    backends: tuple[Backend, ...]
    problem: Callable[["Recipe", str], Problem | None]


@functools.cache
def import_reason(module: str) -> str | None:
    """None when `module` imports here, else a sentence with the failure; tried once per process.

    Any failure counts: an optional CUDA package may fail with ImportError (absent), OSError (no
    driver), AssertionError (a version check), AttributeError (another version beside it), or leave.
    """
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        return f"cannot import {module}: {type(error).__name__}: {error}"
    return None


def always(problem: Problem) -> str | None:
    """The `supports` of plain torch that serves everything."""
    return None
