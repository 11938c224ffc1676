"""Triton's interpreter without what it does again at every call of a function.

It puts its own versions in the place of triton.language's functions for each launch, and again for
each function that a kernel calls; each time it searches the modules for those to replace, which was
a third of the kernel tests' time. Here the search is done once, and a kernel's functions find what
its launch has put there.
"""

import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_search = inspect.getmembers
_found: dict[int, list[tuple[str, Any]]] = {}
_patch = interpreter._patch_lang
_launch: "_Launch | None" = None


class _Launch:
    """What a launch, and the functions that its kernel calls, have put in place until its end."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.scopes: list[Any] = []

    def restore(self) -> None:
        global _launch
        while self.scopes:
            self.scopes.pop().restore()
        _launch = None


def _patch_once(fn: Any) -> _Launch:
    """The scope of a launch. Triton restores none for a function that a kernel calls: its launch's
    has what that function's module sees and the kernel's does not."""
    global _launch
    _launch = _launch or _Launch()
    seen = {value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core}
    if not seen <= _launch.modules:
        _launch.modules |= seen
        _launch.scopes.append(_patch(fn))
    return _launch


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """As the interpreter's."""
    if id(package) not in _found:
        members = _search(package)
        _found[id(package)] = [(n, member) for n, member in members if tl.core.is_builtin(member)]
    for name, member in _found[id(package)]:
        interpreter._patch_attr(package, name, member, builder, scope)


def search_once() -> None:
    """From here on, in this process."""
    interpreter._patch_lang = _patch_once
    interpreter._patch_builtin = _patch_builtin
