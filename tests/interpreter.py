"""Triton's interpreter without what it does again at every call of a function.

It puts its own versions in the place of triton.language's functions for each launch, and again for
each function that a kernel calls; each time it searches the modules for those to replace. Here the
search is done once, and a kernel's functions find what its launch has put there. Every operation
makes types of blocks, each with its shape as a tuple of typed constants, and asks them how its two
operands go together; what follows from the types alone is worked out once here. Operands keep their
shapes where numpy, which computes the operation, broadcasts them itself; a reduction or scan by a
kernel's own function takes all columns in one step, in the interpreter's order; and between
bfloat16 and float32 there are two bytes more or less, which the interpreter finds bit by bit (and
not at all where the exponent is zero).

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
_found: dict[int, list[tuple[str, Any]]] = {}  # id of a module or class -> its new functions
_seen: dict[Any, set[str]] = {}  # function -> the modules that it sees
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
    if not (seen := _seen.get(fn)):
        values = fn.__globals__.values()
        seen = _seen[fn] = {value.__name__ for value in values if value is tl or value is tl.core}
    if not seen <= _launch.modules:
        _launch.modules |= seen
        _launch.scopes.append(_patch(fn))
    return _launch


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """As the interpreter's."""
    if id(package) not in _found:
        semantic = TritonSemantic(builder)
        _found[id(package)] = [
            (name, _interpreted(member, semantic))
            for name, member in _search(package)
            if tl.core.is_builtin(member)
        ]
    for name, member in _found[id(package)]:
        scope.set_attr(package, name, member)


def _interpreted(member: Any, semantic: TritonSemantic) -> Any:
    """A function of triton.language that computes; around most is one that asks who computes."""
    if member.__code__ is tl.core.add.__code__:
        member = member.__wrapped__

    def call(*args: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return member(*args, **options)

    return call


_patch_tensor_as_it_is = interpreter._patch_lang_tensor


def _patch_tensor(tensor: Any, scope: Any) -> None:
    """As the interpreter's, with an index that numpy has no warning for."""
    _patch_tensor_as_it_is(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


_blocks: dict[tuple, dict[str, Any]] = {}  # (name of the elements' type, shape) -> a block type's
_of: dict[tuple[str, str], Any] = {}  # (name of a block type, of a type) -> a block of that type
_tensors: dict[str, tuple[Any, Any]] = {}  # name of a type -> (numel, shape) of its tensors
_dtypes: dict[str, Any] = {}  # name of a type -> numpy's
_init_block, _init_tensor = tl.block_type.__init__, tl.tensor.__init__
_equal, _numpy_dtype = tl.dtype.__eq__, interpreter._get_np_dtype


def _init_block_once(self: Any, element_ty: Any, shape: Any) -> None:
    values = shape.values if type(shape) is tl.tuple else shape
    key = (element_ty.name, *[v.value if type(v) is tl.constexpr else v for v in values])
    if key not in _blocks:
        _init_block(self, element_ty, shape)
        _blocks[key] = dict(self.__dict__)
    else:
        self.__dict__.update(_blocks[key])
        self.element_ty = element_ty  # a pointer's name does not tell all of it


def _with_element_ty_once(self: Any, scalar_ty: Any) -> Any:
    if type(scalar_ty) is not tl.dtype:
        return tl.block_type(scalar_ty, self.shape)
    key = self.name, scalar_ty.name
    if key not in _of:
        _of[key] = tl.block_type(scalar_ty, self.shape)
    return _of[key]


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
    """x in the shape of a block type."""
    return _typed(x, np.broadcast_to(x.handle.data, kind.shape.values), kind)


def _typed(x: Any, data: Any, kind: Any) -> Any:
    """data with x's elements. A pointer's name does not tell all of it: its type stays."""
    element = x.type.scalar
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
    return x if x.type.name == kind.name else _typed(x, x.handle.data, kind)  # numpy broadcasts


_unwrap, _to_tensor = tl.core._unwrap_if_constexpr, TritonSemantic.to_tensor


def _unwrap_at_once(o: Any) -> Any:
    return o if type(o) is tl.tensor else _unwrap(o)


def _to_tensor_at_once(self: Any, x: Any, check_type: bool = True) -> Any:
    return x if type(x) is tl.tensor else _to_tensor(self, x, check_type)


_widths: dict[str, int] = {}  # name of a type -> bits of its elements in numpy
_convert = interpreter._convert_float


def _width(kind: Any) -> int:
    if kind.name not in _widths:
        pointer = isinstance(kind, tl.pointer_type)
        _widths[kind.name] = 64 if pointer else max(8, kind.primitive_bitwidth)
    return _widths[kind.name]


def _init_handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if data.itemsize * 8 > _width(dtype):
        self.__post_init__()  # says what is wrong


def _binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    output, kind = op(lhs.data, rhs.data), lhs.dtype.scalar
    if output.itemsize * 8 > _width(kind):
        output = output.astype(_numpy_dtype_once(kind))
    return interpreter.TensorHandle(output, kind)


def _convert_float(x: Any, old: Any, new: Any, rounding_mode: Any) -> Any:
    """What bfloat16 has no room for is cut off, as the interpreter does it."""
    if rounding_mode is None and old == tl.float32 and new == tl.bfloat16:
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    if old == tl.bfloat16 and new == tl.float32:
        return x.astype(np.uint32) << 16
    return _convert(x, old, new, rounding_mode)


_reduce, _scan = interpreter.ReduceOps.generic_reduce, interpreter.ScanOps.generic_scan


def _steps(self: Any, given: Any) -> list[tuple[Any, ...]] | None:
    """What a function of two has made of the first one, two, three... places along the axis, for
    all other places at once; None where it returns other types than it is given."""
    data, kinds = [x.handle.data for x in given], [x.dtype for x in given]
    places = [
        tuple(self.to_tensor(d.take(i, self.axis), k) for d, k in zip(data, kinds, strict=True))
        for i in range(data[0].shape[self.axis])
    ]
    found = places[:1]
    for place in places[1:]:
        made = self.combine_fn.fn(*found[-1], *place)
        made = made if isinstance(made, tuple) else (made,)
        if [getattr(x, "dtype", None) for x in made] != kinds:
            return None
        found.append(made)
    return found


def _shaped(x: Any, like: Any, axis: int) -> Any:
    """The data of one step, which is one number where there is no other axis."""
    return x.handle.data.reshape(like.shape[:axis] + like.shape[axis + 1 :])


def _generic_reduce(self: Any, given: Any) -> Any:
    if self.axis is None or not (steps := _steps(self, given)):
        return _reduce(self, given)
    found = []
    for x, made in zip(given, steps[-1], strict=True):
        data = _shaped(made, x.handle.data, self.axis)
        data = np.expand_dims(data, self.axis) if self.keep_dims else data
        found.append(self.to_tensor(data, x.dtype))
    return found


def _generic_scan(self: Any, given: Any) -> Any:
    if not (steps := _steps(self, given)):
        return _scan(self, given)
    return [
        self.to_tensor(
            np.stack([_shaped(y, x.handle.data, self.axis) for y in made], self.axis), x.dtype
        )
        for x, made in zip(given, zip(*steps, strict=True), strict=True)
    ]


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
    TritonSemantic.to_tensor = _to_tensor_at_once
    tl.core._unwrap_if_constexpr = tl._unwrap_if_constexpr = _unwrap_at_once
    tl.block_type.with_element_ty = _with_element_ty_once
    tl.dtype.__eq__, interpreter._get_np_dtype = _equal_at_once, _numpy_dtype_once
    interpreter.TensorHandle.__init__ = _init_handle
    interpreter.InterpreterBuilder.binary_op = _binary_op
    interpreter._convert_float = _convert_float
    interpreter.ReduceOps.generic_reduce = _generic_reduce
    interpreter.ScanOps.generic_scan = _generic_scan
    interpreter._patch_lang, interpreter._patch_lang_tensor = _patch_once, _patch_tensor
    interpreter._patch_builtin = _patch_builtin
