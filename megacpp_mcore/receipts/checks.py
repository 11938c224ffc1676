"""What makes a receipt valid: the shipped JSON Schema, and what a schema cannot say.

The schema is `receipt.schema.json` next to this file (draft 2020-12); any validator can use it.
`validate` adds the checks between fields: columns of one length, parts that add up, a hash that
fits its content.
"""

import functools
import itertools
import json
import math
import statistics
from collections.abc import Iterator
from importlib import resources
from typing import Any

from megacpp_mcore import __version__
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.files import content_sha256
from megacpp_mcore.receipts.goodput import parse_utc

SCHEMA_VERSION = 1
_SHOWN = 5  # problems listed in one message


class ReceiptError(MegacppError):
    """A receipt that is not valid, cannot be read or written, or cannot be compared."""


def schema() -> dict[str, Any]:
    """The receipt's JSON Schema, as shipped with the package."""
    return json.loads(
        resources.files("megacpp_mcore.receipts").joinpath("receipt.schema.json").read_text()
    )


def summary(samples_ms: list[float]) -> dict[str, float]:
    """n, median, quartiles (linear between samples) and minimum of a bench row's samples."""
    quartiles = [samples_ms[0]] * 3
    if len(samples_ms) > 1:
        quartiles = statistics.quantiles(samples_ms, n=4, method="inclusive")
    return {
        "n": len(samples_ms),
        "median_ms": quartiles[1],
        "q1_ms": quartiles[0],
        "q3_ms": quartiles[2],
        "min_ms": min(samples_ms),
    }


def validate(document: Any, source: str = "this document") -> None:
    """Refuse what is no valid receipt; `source` names it in the message.

    Raises ReceiptError that names each place (`series.loss[3]`), what is there and what is
    allowed: another schema version, NaN or infinity, the schema, and the checks between fields.
    """
    if not isinstance(document, dict):
        raise ReceiptError(f"{source} is no receipt: {_type(document)}, not a JSON object")
    version = document.get("schema_version")
    if version is None:
        raise ReceiptError(f"{source} is no receipt: it has no schema_version")
    if version != SCHEMA_VERSION:
        raise ReceiptError(
            f"{source} has schema_version {_short(version)}; megacpp {__version__} knows "
            f"{SCHEMA_VERSION} only. Use the megacpp that wrote it"
        )
    try:
        problems = list(_not_finite(document, ""))
    except RecursionError:
        raise ReceiptError(f"{source} is no receipt: it is nested too deeply") from None
    if not problems:
        problems = [_sentence(error) for error in _validator().iter_errors(document)]
    if not problems:
        problems = list(_between_fields(document))
    if problems:
        more = len(problems) - _SHOWN
        listed = problems[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        raise ReceiptError("\n  ".join([f"{source} is not a valid receipt:", *listed]))


@functools.cache
def _validator() -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(schema())


def _not_finite(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{path}: {value} is not a JSON number; write null, and the reason"
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _not_finite(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            if isinstance(inner, float | dict | list):  # most of a receipt is integers
                yield from _not_finite(inner, f"{path}[{index}]")


def _sentence(error: Any) -> str:
    """One jsonschema error as: place, what is there, what is allowed."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.path)
    where = path.lstrip(".") or "the receipt"
    allowed, found = error.validator_value, _short(error.instance)
    match error.validator:
        case "required":
            return f"{where}: {error.message.split(' is a ')[0]} is missing"
        case "additionalProperties":
            known = error.schema.get("properties", {})
            unknown = [key for key in error.instance if key not in known]
            return f"{where}: unknown key {', '.join(unknown)}; allowed: {', '.join(known)}"
        case "type":
            types = allowed if isinstance(allowed, list) else [allowed]
            return f"{where}: {found} is {_type(error.instance)}; allowed: {', '.join(types)}"
        case "enum":
            return f"{where}: {found}; allowed: {', '.join(map(_short, allowed))}"
        case "not":
            return f"{where}: does not belong in a receipt of this kind"
    return f"{where}: {found} breaks {error.validator} {_short(allowed)}"


def _type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number" if isinstance(value, int | float) else "no JSON type")


def _short(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


def _between_fields(document: dict[str, Any]) -> Iterator[str]:
    topology, recipe = document["topology"], document["recipe"]
    ranks = math.prod(topology[name] for name in ("tp", "pp", "cp", "dp"))
    if ranks != topology["world_size"]:
        yield f"topology: tp * pp * cp * dp is {ranks}, world_size {topology['world_size']}"
    if recipe and recipe["sha256"] != (found := content_sha256(recipe["content"])):
        yield f"recipe.sha256: {recipe['sha256']}, but the content hashes to {found}"
    yield from _time_problems("created", document["created"])
    if document["kind"] == "run":
        yield from _goodput_problems(document["goodput"])
        yield from _column_problems("series", document["series"], "step", "tokens")
        yield from _column_problems("evaluations", document["evaluations"], "step")
    else:
        yield from _row_problems(document["rows"], document["baseline"])


def _time_problems(path: str, text: str) -> Iterator[str]:
    try:
        parse_utc(text)
    except ValueError:  # the schema's pattern lets a 31 February pass
        yield f"{path}: {text} is no date and time"


def _goodput_problems(goodput: dict[str, Any]) -> Iterator[str]:
    wall, segments = goodput["wall_s"], goodput["segments"]
    named = [(f"goodput.segments[{index}]", part) for index, part in enumerate(segments)]
    for path, part in [("goodput", goodput), *named]:
        total = math.fsum(part["seconds"].values())
        if _apart(total, part["wall_s"], part["wall_s"]):
            yield f"{path}: the parts add up to {total:.6f} s, wall_s is {part['wall_s']:.6f}"
    for path, part in named:
        yield from _time_problems(f"{path}.started", part["started"])
    step = goodput["seconds"]["step"]
    if _apart(goodput["useful"] * wall, step, wall):
        yield f"goodput.useful: {goodput['useful']}, but step is {step} s of {wall}"
    total = math.fsum(part["wall_s"] for part in segments)
    if _apart(total, wall, wall):
        yield f"goodput: the segments add up to {total:.6f} s, wall_s is {wall:.6f}"


def _apart(found: float, expected: float, wall_s: float) -> bool:
    """Whether they differ by more than 1 % of the wall time and 10 us: each of the seconds is
    rounded to one."""
    return abs(found - expected) > 0.01 * wall_s + 1e-5


def _column_problems(path: str, columns: dict[str, list], *growing: str) -> Iterator[str]:
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        yield f"{path}: columns of unequal length {lengths}"
    for name in growing:
        for index, (before, after) in enumerate(itertools.pairwise(columns[name]), start=1):
            if after <= before:
                yield f"{path}.{name}[{index}]: {after} comes after {before}; it must grow"
                break


def _row_problems(rows: list[dict[str, Any]], baseline: str) -> Iterator[str]:
    if baseline not in {row["backend"] for row in rows}:
        yield f"baseline: {baseline!r} is no backend of the rows"
    seen: set[tuple[str, str]] = set()
    for index, row in enumerate(rows):
        key = row["backend"], row["phase"]
        if key in seen:
            yield f"rows[{index}]: {key[0]} {key[1]} is there twice"
        seen.add(key)
        for name, value in summary(row["samples_ms"]).items():
            if not math.isclose(row[name], value, rel_tol=1e-6):
                yield f"rows[{index}].{name}: {row[name]}, but the samples give {value}"
        if "rounds" in row:
            columns = {name: row[name] for name in ("samples_ms", "rounds")}
            yield from _column_problems(f"rows[{index}]", columns, "rounds")
        if (row["error"] is None) != (row["tolerance"] is None):
            yield f"rows[{index}]: error and tolerance go together; one of them is null"
