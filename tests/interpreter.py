"""Triton's interpreter without what it does again at every call of a function.

It puts its own versions in the place of triton.language's functions for each launch, and again for
each function that a kernel calls; each time it searches the modules for those to replace, which was
a third of the kernel tests' time. Here the search is done once, and a kernel's functions find what
its launch has put there. Every operation makes types of blocks, each with its shape as a tuple of
typed constants; what follows from a type alone is worked out once here, which was another third.
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


_blocks: dict[tuple, dict[str, Any]] = {}  # (name of the elements' type, shape) -> a block type's
_tensors: dict[str, tuple[Any, Any]] = {}  # name of a type -> (numel, shape) of its tensors
_dtypes: dict[str, Any] = {}  # name of a type -> numpy's
_init_block, _init_tensor = tl.block_type.__init__, tl.tensor.__init__
_equal, _numpy_dtype = tl.dtype.__eq__, interpreter._get_np_dtype


def _init_block_once(self: Any, element_ty: Any, shape: Any) -> None:
    values = shape.values if type(shape) is tl.tuple else shape
    key = (element_ty.name, *(v.value if type(v) is tl.constexpr else v for v in values))
    if type(element_ty) is not tl.dtype:  # a pointer's name does not tell all of it
        _init_block(self, element_ty, shape)
    elif key in _blocks:
        self.__dict__.update(_blocks[key])
    else:
        _init_block(self, element_ty, shape)
        _blocks[key] = dict(self.__dict__)


def _init_tensor_once(self: Any, handle: Any, type: Any) -> None:
    if type.name not in _tensors:
        _init_tensor(self, handle, type)
        _tensors[type.name] = self.numel, self.shape
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _tensors[type.name]


def _equal_at_once(self: Any, other: Any) -> bool:
    return self is other or _equal(self, other)


def _numpy_dtype_once(tt_dtype: Any) -> Any:
    if tt_dtype.name not in _dtypes:
        _dtypes[tt_dtype.name] = _numpy_dtype(tt_dtype)
    return _dtypes[tt_dtype.name]


def search_once() -> None:
    """From here on, in this process."""
    tl.block_type.__init__, tl.tensor.__init__ = _init_block_once, _init_tensor_once
    tl.dtype.__eq__, interpreter._get_np_dtype = _equal_at_once, _numpy_dtype_once
    interpreter._patch_lang = _patch_once
    interpreter._patch_builtin = _patch_builtin
