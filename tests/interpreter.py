"""Triton's interpreter without what it does again at every call of a function.

It puts its own versions in the place of triton.language's functions for each launch, and again for
each function that a kernel calls; each time it searches the modules for those to replace. Here the
search is done once, and a kernel's functions find what its launch has put there. Every operation
makes types of blocks, each with its shape as a tuple of typed constants, and asks them how its two
operands go together; what follows from the types alone is worked out once here.

One thing is added: an integer of less than 64 bits that overflows is an error. The interpreter
computes each integer operation again in 64 bits for that, and then, without its debug option, does
not look at the result.
"""

import inspect
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
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


_patch_tensor_as_it_is = interpreter._patch_lang_tensor


def _patch_tensor(tensor: Any, scope: Any) -> None:
    """As the interpreter's, with an index that numpy has no warning for."""
    _patch_tensor_as_it_is(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


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


# Names of two types -> the types of operands that go together, None where it is the operand's own.
_shapes: dict[tuple[str, str], tuple[Any, Any]] = {}
# The same for the operands of an operation; for a number, its tensor.
_operands: dict[tuple, tuple[Any, Any]] = {}
_broadcast = TritonSemantic.broadcast_impl_value
_check_operands = TritonSemantic.binary_op_type_checking_impl
_NUMBERS = (int, float, bool)


def _broadcast_once(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    key = lhs.type.name, rhs.type.name
    if key not in _shapes:
        found = _broadcast(self, lhs, rhs)
        _shapes[key] = _changed(found, (lhs, rhs))
        return found
    left, right = _shapes[key]
    return (
        lhs if left is None else _broadcast_to(lhs, left),
        rhs if right is None else _broadcast_to(rhs, right),
    )


def _changed(new: Any, old: Any) -> tuple[Any, Any]:
    return tuple(None if n is o else n.type for n, o in zip(new, old, strict=True))


def _broadcast_to(x: Any, kind: Any) -> Any:
    """x in the shape of a block type. A pointer's name does not tell all of it: its type stays."""
    data, element = np.broadcast_to(x.handle.data, kind.shape.values), x.type.scalar
    if element.is_ptr():
        kind = tl.block_type(element, kind.shape)
    return tl.tensor(interpreter.TensorHandle(data, element), kind)


def _check_operands_once(
    self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True, div_or_mod: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    flags = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
    left = (type(lhs), lhs) if type(lhs) in _NUMBERS else lhs.type.name
    right = (type(rhs), rhs) if type(rhs) in _NUMBERS else rhs.type.name
    key = left, right, flags
    if key not in _operands:
        found = _check_operands(self, lhs, rhs, *flags)
        if not all(x.type.scalar.is_ptr() for x in found):
            _operands[key] = tuple(
                _constant(new) if type(old) in _NUMBERS else None if new is old else new.type
                for new, old in zip(found, (lhs, rhs), strict=True)
            )
        return found
    left, right = _operands[key]
    return (
        lhs if left is None else left() if type(lhs) in _NUMBERS else _as(self, lhs, left),
        rhs if right is None else right() if type(rhs) in _NUMBERS else _as(self, rhs, right),
    )


def _constant(x: Any) -> Any:
    """Makes a tensor of the same values, which nobody can change."""
    data, element, kind = x.handle.data, x.handle.dtype, x.type
    data.flags.writeable = False
    return lambda: tl.tensor(interpreter.TensorHandle(data, element), kind)


def _as(self: Any, x: Any, kind: Any) -> Any:
    if x.type.scalar.name != kind.scalar.name:
        x = self.cast(x, kind.scalar)
    return x if x.type.name == kind.name else _broadcast_to(x, kind)


_EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _assert_no_overflow(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
    kind = lhs.type.scalar
    if kind.int_bitwidth >= 64:
        return
    exact = _EXACT[binary_op.__name__](
        lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64)
    )
    if exact.max() > kind.get_int_max_value() or exact.min() < kind.get_int_min_value():
        raise OverflowError(f"{kind} overflows in {binary_op.__name__}: {exact}")


def search_once() -> None:
    """From here on, in this process."""
    TritonSemantic.broadcast_impl_value = _broadcast_once
    TritonSemantic.binary_op_type_checking_impl = _check_operands_once
    TritonSemantic.binary_op_sanitize_overflow_impl = _assert_no_overflow
    tl.block_type.__init__, tl.tensor.__init__ = _init_block_once, _init_tensor_once
    tl.dtype.__eq__, interpreter._get_np_dtype = _equal_at_once, _numpy_dtype_once
    interpreter._patch_lang, interpreter._patch_lang_tensor = _patch_once, _patch_tensor
    interpreter._patch_builtin = _patch_builtin
