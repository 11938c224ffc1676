"""Receipts: one JSON file per training run or bench, evidence that others can check.

Every write is validated and atomic: a reader sees the old receipt or the new one, never half of
one. A run's receipt is gathered by `receipts.run`, a bench's is built by `bench_receipt`.
"""

import json
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megacpp_mcore.receipts.checks import (
    SCHEMA_VERSION,
    ReceiptError,
    content_sha256,
    schema,
    summary,
    validate,
)
from megacpp_mcore.receipts.goodput import utc_now
from megacpp_mcore.receipts.lane import code

__all__ = [
    "ReceiptError",
    "ReceiptWriteError",
    "bench_receipt",
    "bench_row",
    "read",
    "receipt_head",
    "recipe_entry",
    "schema",
    "validate",
    "write",
]


class ReceiptWriteError(ReceiptError):
    """The receipt is right, but the disk is full, or the folder cannot be written to."""

    exit_status = 1


def read(path: str | Path) -> dict[str, Any]:
    """Read and validate a receipt.

    Raises ReceiptError: no such file, not JSON, cut off, another schema version, not valid.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError:
        raise ReceiptError(f"{path} is a folder; name the receipt file in it") from None
    except OSError as error:
        raise ReceiptError(f"cannot read the receipt {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            raise ReceiptError(f"{path} is truncated: it ends inside a character") from None
        raise ReceiptError(f"{path} is not JSON: no UTF-8 text at byte {error.start}") from None
    if not text.strip():
        raise ReceiptError(f"{path} is empty, not a receipt")
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}: {error.msg}"
        if _cut_off(text, error):
            raise ReceiptError(
                f"{path} is truncated: it ends in the middle of the JSON, {place}"
            ) from None
        raise ReceiptError(f"{path} is not JSON: {place}") from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits; 10,000 brackets
        raise ReceiptError(f"{path} is not a receipt: {error}") from None
    validate(document, str(path))
    return document


def _cut_off(text: str, error: json.JSONDecodeError) -> bool:
    """True when more text could have made it JSON: the fault is that the text ends."""
    if not text.lstrip().startswith("{"):
        return False
    rest = text[error.pos :].strip()  # what the parser could make nothing of
    literal = any(whole.startswith(rest) for whole in ("true", "false", "null", "-"))
    number = re.fullmatch(r"\.|[eE][+-]?", rest)
    escape = error.msg.startswith("Invalid \\u") and len(rest) < 6
    return bool(literal or number or escape) or error.msg.startswith("Unterminated string")


def write(path: str | Path, document: dict[str, Any]) -> None:
    """Validate a receipt and write it atomically: temporary file, fsync, rename.

    Raises ReceiptError when it is not valid, and ReceiptWriteError when the file cannot be written;
    whatever stood at `path` before is then still there, whole. The folder is created.
    """
    path = Path(path)
    validate(document, f"the receipt for {path}")
    text = _layout(document)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself
        finally:
            os.close(folder)
    except OSError as error:
        raise ReceiptWriteError(f"cannot write the receipt {path}: {error.strerror}") from error


def _layout(document: dict[str, Any]) -> str:
    """JSON with one line per field and per column: fast to write, and a diff can be read."""

    def fields(value: dict[str, Any], indent: str, depth: int) -> str:
        lines = []
        for key, inner in value.items():
            if depth and isinstance(inner, dict) and inner:
                text = fields(inner, indent + "  ", depth - 1)
            else:
                text = json.dumps(inner, allow_nan=False)
            lines.append(f"{indent}{json.dumps(key)}: {text}")
        return "{\n" + ",\n".join(lines) + "\n" + indent[2:] + "}"

    return fields(document, "  ", 1) + "\n"


def recipe_entry(name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """The `recipe` of a receipt. content: the resolved recipe, plain TOML values only.

    Raises ReceiptError when the content is not JSON (NaN included).
    """
    try:
        plain = json.loads(json.dumps(content, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ReceiptError(f"recipe {name!r} does not fit in a receipt: {error}") from None
    return {"name": name, "sha256": content_sha256(plain), "content": plain}


def bench_row(
    backend: str,
    phase: str,
    samples_ms: Sequence[float],
    *,
    rounds: Sequence[int] | None = None,
    cold_ms: float | None = None,
    peak_memory_bytes: int | None = None,
    error: float | None = None,
    tolerance: float | None = None,
    flops: float | None = None,
    bytes_floor: float | None = None,
) -> dict[str, Any]:
    """One backend's row of a bench; median, quartiles, minimum and n come from the samples.

    phase: forward, forward_backward or step. samples_ms: warm calls in the order taken. rounds: of
    each of them, where the backends of a phase took turns, once a round at most. cold_ms: the first
    call. error: the worst error against the reference, in the unit that `tolerance`
    bounds; null for the reference itself. flops, bytes_floor: what one call needs at least.
    """
    if not samples_ms:
        raise ReceiptError(f"backend {backend!r}, {phase}: no samples")
    samples = [float(sample) for sample in samples_ms]
    turns = {} if rounds is None else {"rounds": list(rounds)}
    return {
        "backend": backend,
        "phase": phase,
        **summary(samples),
        "cold_ms": cold_ms,
        "peak_memory_bytes": peak_memory_bytes,
        "error": error,
        "tolerance": tolerance,
        "flops": flops,
        "bytes_floor": bytes_floor,
        "samples_ms": samples,
        **turns,
    }


def bench_receipt(
    *,
    problem: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    baseline: str,
    backends: Sequence[dict[str, Any]],
    lane: dict[str, Any],
    topology: dict[str, int],
    environment: dict[str, dict[str, str]],
    recipe: dict[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The receipt of a bench; hand it to `write`.

    problem: {surface, dtype, sizes}. rows: from `bench_row`. baseline: the backend that the others
    are judged against. backends: also those that could not run, with observed null and the reason.
    Raises ReceiptError when something in it is not as the schema says.
    """
    document = receipt_head("bench", recipe, topology, backends, environment, lane, notes) | {
        "problem": problem,
        "baseline": baseline,
        "rows": list(rows),
    }
    validate(document, f"the bench of {problem.get('surface')}")
    return document


def receipt_head(
    kind: str,
    recipe: dict[str, Any] | None,
    topology: dict[str, int],
    backends: Sequence[dict[str, Any]],
    environment: dict[str, dict[str, str]],
    lane: dict[str, Any],
    notes: Sequence[str],
) -> dict[str, Any]:
    """The fields that a run and a bench have in common."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "created": utc_now(),
        "code": code(),
        "lane": lane,
        "recipe": recipe,
        "topology": topology,
        "backends": list(backends),
        "environment": environment,
        "notes": list(notes),
    }
