"""What a recipe key is made of: its type, and where it goes.

A key is a dataclass field of a section (`megacpp_mcore.recipe.schema`). Its name is the name of the
value in Megatron's argument namespace; its metadata says where it lowers to and which numbers it
takes. That makes lowering, checking and the list of known keys one table.
"""

import contextlib
import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.hybrid.block_settings import M2RNNSettings, Mamba3Settings, RecomputeSettings


class Target(enum.Enum):
    """Where a key goes that is no Megatron argument of its own."""

    PLAN = "layer plan"  # --hybrid-layer-pattern, and what Megatron derives from it
    PLUGIN = "plugin"  # handed on with the recipe, in stock Megatron by MEGACPP_RECIPE
    RECOMPUTE = "--recompute-modules, or plugin"  # settings.MEGATRON_RECOMPUTES says which
    ENVIRONMENT = "environment"


@dataclass(frozen=True)
class Flag:
    """A Megatron argument.

    name: the flag, or None for the key's own name with dashes.
    given_when: None when the flag takes the value; else the flag stands alone and is given when
    the key has this value (False for flags such as --disable-bias-linear).
    """

    name: str | None = None
    given_when: bool | None = None


_MOST_INTEGER = 2**63 - 1  # of torch and Megatron


@dataclass(frozen=True)
class Bounds:
    """The numbers that a key takes, and each entry of a list.

    They are greater than 0. zero: 0 is allowed, too. below: exclusive limit. most: inclusive limit.
    """

    zero: bool = False
    below: float | None = None
    most: float | None = None

    def reasons(self, value: float) -> Iterator[str]:
        """The bounds that `value` is outside of, such as "greater than 0"."""
        if value < 0 or (value == 0 and not self.zero):
            yield "at least 0" if self.zero else "greater than 0"
        if self.below is not None and value >= self.below:
            yield f"less than {self.below}"
        if isinstance(value, int) and value > _MOST_INTEGER:
            yield f"at most {_MOST_INTEGER}"
        elif self.most is not None and value > self.most:
            yield f"at most {self.most}"


POSITIVE = Bounds()
FROM_ZERO = Bounds(zero=True)
BELOW_ONE = Bounds(zero=True, below=1)
UP_TO_ONE = Bounds(most=1)
SEED = Bounds(zero=True, most=2**32 - 1)  # numpy's


@dataclass(frozen=True)
class Key:
    """One key of the schema, resolved. bounds: of numbers, not used for other types.

    default: dataclasses.MISSING for a key that must be given.
    """

    section: str
    name: str
    hint: Any
    lowers_to: Flag | Target | None
    bounds: Bounds
    default: Any = dataclasses.field(compare=False)

    @functools.cached_property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}"

    def of(self, recipe: Any) -> Any:
        """The key's value in a recipe."""
        return getattr(getattr(recipe, self.section), self.name)

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @functools.cached_property
    def flag(self) -> str | None:
        """The Megatron flag that carries the key, or None."""
        if not isinstance(self.lowers_to, Flag):
            return None
        return self.lowers_to.name or "--" + self.name.replace("_", "-")


_LOWERS_TO, _BOUNDS = "lowers_to", "bounds"


def _key(default: Any, lowers_to: Flag | Target, bounds: Bounds) -> Any:
    metadata = {_LOWERS_TO: lowers_to, _BOUNDS: bounds}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def to_flag(
    default: Any = dataclasses.MISSING, bounds: Bounds = POSITIVE, *, flag: str | None = None
) -> Any:
    """A key that becomes `FLAG VALUE`, or for a bool `FLAG` when it is true. None: not given."""
    return _key(default, Flag(flag), bounds)


def to_off_flag(default: bool | None, flag: str) -> Any:
    """A key that becomes `FLAG` when it is false. None: not given."""
    return _key(default, Flag(flag, given_when=False), POSITIVE)


def to(target: Target, default: Any = dataclasses.MISSING, bounds: Bounds = POSITIVE) -> Any:
    """A key that goes to `target`."""
    return _key(default, target, bounds)


_SETTINGS = {
    Mamba3Settings: Target.PLUGIN,
    M2RNNSettings: Target.PLUGIN,
    RecomputeSettings: Target.RECOMPUTE,
}


@functools.cache
def keys_of(section: str, cls: type) -> dict[str, Key]:
    """The keys of one section, by name. Fields of the layers' settings have no metadata."""
    settings = {
        field.name: target
        for base, target in _SETTINGS.items()
        if issubclass(cls, base)
        for field in dataclasses.fields(base)
    }
    hints = typing.get_type_hints(cls)
    keys = {}
    for field in dataclasses.fields(cls):
        lowers_to = field.metadata.get(_LOWERS_TO)
        if lowers_to is None:
            lowers_to = settings.get(field.name)
        if isinstance(lowers_to, Flag) and lowers_to.given_when is None:
            is_bool = bool in _members(hints[field.name])
            lowers_to = Flag(lowers_to.name, given_when=True if is_bool else None)
        bounds = field.metadata.get(_BOUNDS, POSITIVE)
        has_factory = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if has_factory else field.default
        keys[field.name] = Key(section, field.name, hints[field.name], lowers_to, bounds, default)
    return keys


class TypeMismatch(Exception):
    """A value of the wrong type; the message says what is expected."""


@functools.cache
def _members(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return tuple(one for member in typing.get_args(hint) for one in _members(member))
    return (hint,)


def optional(hint: Any) -> bool:
    """Whether the key can be left unset (None)."""
    return type(None) in _members(hint)


def expected(hint: Any) -> str:
    """A type as text, for messages."""
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    words = []
    for member in _members(hint):
        origin, arguments = typing.get_origin(member), typing.get_args(member)
        if origin is typing.Literal:
            words.append("one of " + ", ".join(repr(choice) for choice in arguments))
        elif origin is tuple:
            words.append(f"a list, each {expected(arguments[0])}")
        elif origin is dict:
            words.append("a table of strings")
        elif member is not type(None):
            words.append(names[member])
    return " or ".join(words)


def coerce(value: Any, hint: Any) -> Any:
    """`value` as the type `hint`. Integers become floats, lists become tuples, and where a list of
    choices is expected one choice is a list of one; nothing else is converted.

    Raises TypeMismatch.
    """
    for member in _members(hint):
        try:
            return _coerce(value, member)
        except TypeMismatch:
            continue
    raise TypeMismatch(f"expected {expected(hint)}")


def _coerce(value: Any, hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if isinstance(value, str) and value in arguments:
            return value
    elif origin is tuple:
        is_word = isinstance(value, str) and typing.get_origin(arguments[0]) is typing.Literal
        if is_word or isinstance(value, list | tuple):
            return tuple(_coerce(item, arguments[0]) for item in ([value] if is_word else value))
    elif origin is dict:
        if isinstance(value, dict):
            return {name: _coerce(item, arguments[1]) for name, item in value.items()}
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # an integer beyond every float
                if math.isfinite(number := float(value)):
                    return number
    elif type(value) is hint:
        return value
    raise TypeMismatch
