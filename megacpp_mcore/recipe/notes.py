"""The keys of the schema with the notes of its comments, for `recipe keys` and docs/recipes.md.

A key's note is the comment on its field's line, or else the comment lines right above it.
"""

import ast
import inspect
import io
import json
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

from megacpp_mcore.recipe.fields import Bounds, Flag, Key, expected, optional
from megacpp_mcore.recipe.schema import SECTIONS
from megacpp_mcore.recipe.source import KEYS


@dataclass(frozen=True)
class KeyFacts:
    """One key as text. default: in TOML, "" if it is None or required. required: the key must be
    given. goes_to: the Megatron flag, or another target. note: ours; what a Megatron flag means is
    in Megatron's --help."""

    key: str
    takes: str
    default: str
    required: bool
    goes_to: str
    note: str


def facts() -> list[KeyFacts]:
    """Every key of the schema, in its order."""
    notes = {section: _notes(cls) for section, cls in SECTIONS.items()}
    return [
        KeyFacts(
            dotted, _takes(key), _default(key), key.required, _goes_to(key),
            notes[key.section].get(key.name, ""),
        )
        for dotted, key in KEYS.items()
    ]  # fmt: skip


def described(cls: type) -> str:
    """The first paragraph of a section's docstring."""
    return " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())


def _takes(key: Key) -> str:
    words = expected(key.hint)
    if "number" in words or "integer" in words:
        words += _bounds(key.bounds)
    return words + (", or unset" if optional(key.hint) else "")


def _bounds(bounds: Bounds) -> str:
    low = "from 0" if bounds.zero else "above 0"
    if bounds.below is not None:
        return f" {low}, below {bounds.below:g}"
    return f" {low}" if bounds.most is None else f" {low}, at most {bounds.most:,.0f}"


def _default(key: Key) -> str:
    """JSON writes numbers, strings, booleans and lists as TOML does."""
    return "" if key.required or key.default is None else json.dumps(key.default)


def _goes_to(key: Key) -> str:
    if not isinstance(key.lowers_to, Flag):
        return key.lowers_to.value if key.lowers_to else ""
    given_when = key.lowers_to.given_when
    return f"{key.flag}{' where false' if given_when is False else ''}"


def _notes(cls: type) -> dict[str, str]:
    """Field -> note, of a section and the settings that it is built on."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        source = inspect.getsource(base)
        comments = {
            token.start[0]: (token.string.lstrip("# "), token.line.strip().startswith("#"))
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        (tree,) = ast.parse(source).body
        for field in (node for node in tree.body if isinstance(node, ast.AnnAssign)):
            behind = [comments[line][0] for line in _span(field) if line in comments]
            note = behind or [*_above(field.lineno, comments)][::-1]
            if note:
                found[field.target.id] = " ".join(note)
    return found


def _span(field: ast.AnnAssign) -> range:
    return range(field.lineno, (field.end_lineno or field.lineno) + 1)


def _above(line: int, comments: dict[int, tuple[str, bool]]) -> Iterator[str]:
    """The comment lines right above `line`, the nearest first."""
    while (line := line - 1) in comments and comments[line][1]:
        yield comments[line][0]
