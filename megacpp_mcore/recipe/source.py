"""Recipe files and `--set` overrides, read into typed values that remember where they came from."""

import difflib
import functools
import importlib.resources
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacpp_mcore import dispatch
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.files import read_regular
from megacpp_mcore.recipe.fields import Key, TypeMismatch, coerce, keys_of
from megacpp_mcore.recipe.schema import SECTIONS

SUFFIX = ".toml"
BACKENDS = "backends"
_SET = "--set "
_TOP_LEVEL = ("description", "extends", "unset")
_MAX_CHAIN = 100  # of recipes that extend one another
# ValueError: not TOML, not UTF-8, an integer of 5,000 digits. RecursionError: 1,000 brackets.
_NOT_TOML = (ValueError, RecursionError)

KEYS: dict[str, Key] = {
    key.dotted: key for name, cls in SECTIONS.items() for key in keys_of(name, cls).values()
}


class RecipeError(MegacppError):
    """A recipe that cannot be read, or that asks for something impossible."""


@dataclass
class Settings:
    """What files and overrides say. values and origins: by dotted key.

    A key of a table (`launch.environment.NAME`, `backends.SURFACE`) is a dotted key of its own, so
    that a variant can change one entry.
    """

    description: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def put(self, dotted: str, value: Any, origin: str) -> None:
        self.values[dotted] = value
        self.origins[dotted] = origin

    def is_override(self, dotted: str) -> bool:
        """Whether the value of a key that has one is from `--set`."""
        return self.origins[dotted].startswith(_SET)

    def drop(self, dotted: str) -> None:
        """Unset a key, or a table with its entries, so that the default holds."""
        for name in [n for n in self.values if n == dotted or n.startswith(dotted + ".")]:
            del self.values[name], self.origins[name]


def shipped() -> list[str]:
    """Names of the recipes in the package."""
    folder = importlib.resources.files("megacpp_mcore.recipes")
    names = [entry.name for entry in folder.iterdir() if entry.name.endswith(SUFFIX)]
    return sorted(name.removesuffix(SUFFIX) for name in names)


def locate(name_or_path: str, folder: Path | None = None) -> tuple[str, str]:
    """(shipped name or absolute path, path of the file) of a recipe.

    A path has a separator or ends with .toml; it is relative to `folder`, by default the current.
    Raises RecipeError for a name that is not shipped.
    """
    if name_or_path.endswith(SUFFIX) or "/" in name_or_path:
        try:
            path = ((folder or Path()) / name_or_path).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # too long, a circle of links, a NUL
            raise RecipeError(f"cannot read the recipe {name_or_path!r}: {error}") from error
        return str(path), str(path)
    if name_or_path not in shipped():
        raise RecipeError(
            f"unknown recipe {name_or_path!r}{_near(name_or_path, shipped())}; shipped are "
            f"{', '.join(shipped())}; a file of your own is named by its path, ending in {SUFFIX}"
        )
    file = importlib.resources.files("megacpp_mcore.recipes") / (name_or_path + SUFFIX)
    return name_or_path, str(file)


def read(name_or_path: str, overrides: Sequence[str] = ()) -> Settings:
    """A recipe with what it extends and with `overrides` ("a.b=value") on top.

    Raises RecipeError naming the file or override, the key, the value and what is allowed.
    """
    settings = _read_file(locate(name_or_path)[1], ())
    for override in overrides:
        _override(settings, override)
    return settings


def _read_file(path: str, seen: tuple[str, ...]) -> Settings:
    if path in seen:
        raise RecipeError(f"extends in a circle: {' -> '.join([*seen, path])}")
    if len(seen) >= _MAX_CHAIN:
        raise RecipeError(f"{path}: extends a chain of more than {_MAX_CHAIN} recipes")
    try:
        tables = _tables(read_regular(path))
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {path}: {error.strerror}") from error
    except _NOT_TOML as error:
        raise RecipeError(f"{path}: not TOML: {error}") from error

    parent = _top_level(tables, "extends", str, path)
    settings = Settings()
    if parent is not None:
        settings = _read_file(locate(parent, Path(path).parent)[1], (*seen, path))
    for dotted in _top_level(tables, "unset", tuple[str, ...], path) or ():
        _known(dotted, f"{path}: unset")
        settings.drop(dotted)
    settings.description = _top_level(tables, "description", str, path) or settings.description
    for section, table in tables.items():
        if section not in _TOP_LEVEL:
            _read_section(settings, section, table, path)
    return settings


@functools.lru_cache(maxsize=32)
def _tables(content: bytes) -> dict[str, Any]:
    """A file's tables; do not modify them. Cached: `recipe plan` loads a recipe a hundred times."""
    return _parsed(content.decode())


def _parsed(text: str) -> dict[str, Any]:
    tables = tomllib.loads(text)
    repr(tables)  # as an error would: hexadecimal integers may have any number of digits
    return tables


def _top_level(tables: dict[str, Any], name: str, hint: Any, path: str) -> Any:
    if name not in tables:
        return None
    try:
        return coerce(tables[name], hint)
    except TypeMismatch as error:
        raise RecipeError(f"{path}: {name} = {tables[name]!r}: {error}") from error


def _read_section(settings: Settings, section: str, table: Any, path: str) -> None:
    if section not in SECTIONS and section != BACKENDS:
        known = [*_TOP_LEVEL, *SECTIONS, BACKENDS]
        raise RecipeError(
            f"{path}: unknown section [{section}]{_near(section, known)}; the sections are "
            f"{', '.join([*SECTIONS, BACKENDS])}"
        )
    if not isinstance(table, dict):
        raise RecipeError(f"{path}: {section} = {table!r}: expected a section, [{section}]")
    for name, value in table.items():
        _put(settings, f"{section}.{name}", value, path)


def _put(settings: Settings, dotted: str, value: Any, origin: str) -> None:
    hint = _known(dotted, origin)
    if hint == dict[str, str] and isinstance(value, dict):
        for entry, text in value.items():
            _put(settings, f"{dotted}.{entry}", text, origin)
        return
    try:
        value = coerce(value, hint)
    except TypeMismatch as error:
        raise RecipeError(f"{origin}: {dotted} = {value!r}: {error}") from error
    if dotted.startswith(BACKENDS + "."):
        try:
            dispatch.check_requests({dotted.removeprefix(BACKENDS + "."): value}, origin)
        except dispatch.DispatchError as error:
            raise RecipeError(str(error)) from error
    settings.put(dotted, value, origin)


def _known(dotted: str, where: str) -> Any:
    """The type of a key. Raises RecipeError when there is no such key."""
    if dotted in KEYS:
        return KEYS[dotted].hint
    section, _, name = dotted.partition(".")
    if section == BACKENDS and name:
        return str
    table, _, entry = dotted.rpartition(".")
    if table in KEYS and entry and KEYS[table].hint == dict[str, str]:
        return str
    elsewhere = [key.dotted for key in KEYS.values() if key.name == name]
    hint = f"; did you mean {' or '.join(elsewhere)}?" if elsewhere else _near(dotted, KEYS)
    if section in SECTIONS:
        hint += f"; [{section}] knows {', '.join(keys_of(section, SECTIONS[section]))}"
    else:
        hint += f"; a key is SECTION.NAME, the sections are {', '.join([*SECTIONS, BACKENDS])}"
    raise RecipeError(f"{where}: unknown key {dotted!r}{hint}")


def split_override(override: str) -> tuple[str, str | None]:
    """(key, text of its value) of one `a.b=value`; None for the text without an `=`."""
    dotted, equals, text = override.partition("=")
    return dotted.strip(), text.strip() if equals else None


def _override(settings: Settings, override: str) -> None:
    """Apply one `a.b=value`. The value is TOML, or bare text for a string; `null` unsets."""
    origin = _SET + override
    dotted, text = split_override(override)
    if text is None:
        raise RecipeError(f"{origin}: expected SECTION.KEY=VALUE")
    hint = _known(dotted, origin)
    if text == "null":
        settings.drop(dotted)
        return
    for value in _readings(text, origin):
        try:
            coerce(value, hint)
        except TypeMismatch:
            continue
        _put(settings, dotted, value, origin)
        return
    _put(settings, dotted, text, origin)


def _readings(text: str, origin: str) -> list[Any]:
    """What a command-line value may mean: TOML, else the bare text; either as a list of one."""
    try:
        tables = _parsed(f"value = {text}")
        parsed = [tables["value"]] if list(tables) == ["value"] else []
    except _NOT_TOML as error:
        if text.startswith(("[", "{", '"', "'")):
            raise RecipeError(f"{origin}: {text!r} is not TOML: {error}") from error
        parsed = []
    # What is written as a list, table or string is meant as one; 2024 may be a folder's name.
    bare = [] if parsed and isinstance(parsed[0], list | dict | str) else [text]
    return [*parsed, *bare, *([value] for value in [*parsed, *bare])]


def _near(name: str, known: Sequence[str] | dict[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""
