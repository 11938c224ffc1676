"""Building and writing receipts. Every write is validated and atomic: a reader sees the old receipt
or the new one, never half of one."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megacpp_mcore.files import content_sha256, write_atomically
from megacpp_mcore.hybrid.plan import HybridPlan
from megacpp_mcore.receipts.checks import (
    SCHEMA_VERSION,
    ReceiptError,
    summary,
    validate,
)
from megacpp_mcore.receipts.goodput import utc_now
from megacpp_mcore.receipts.lane import code, patches


class ReceiptWriteError(ReceiptError):
    """The receipt is right, but the disk is full, or the folder cannot be written to."""

    exit_status = 1


def write(path: str | Path, document: dict[str, Any]) -> None:
    """Validate a receipt and write it atomically: temporary file, fsync, rename.

    Raises ReceiptError when it is not valid, and ReceiptWriteError when the file cannot be written;
    the former file at `path` is then unchanged. The folder is created.
    """
    path = Path(path)
    validate(document, f"the receipt for {path}")
    text = _layout(document)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
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


def plan_entry(plan: HybridPlan) -> dict[str, Any]:
    """The `plan` of a run's receipt."""
    return {
        "source_pattern": plan.source_pattern,
        "megatron_pattern": plan.megatron_pattern,
        "counts": plan.counts["source"],
    }


def bench_row(
    backend: str,
    phase: str,
    samples_ms: Sequence[float],
    *,
    rounds: Sequence[int] | None = None,
    cold_ms: float | None = None,
    peak_memory_bytes: int | None = None,
    kept_memory_bytes: int | None = None,
    error: float | None = None,
    tolerance: float | None = None,
    flops: float | None = None,
    bytes_floor: float | None = None,
    sustained_ms: float | None = None,
    joules: float | None = None,
) -> dict[str, Any]:
    """One backend's row of a bench; median, quartiles, minimum and n come from the samples.

    phase: forward, forward_backward or step. samples_ms: warm calls in the order taken. rounds: of
    each of them, where the backends of a phase took turns, once a round at most. cold_ms: the first
    call. kept_memory_bytes: what a forward pass leaves in memory for its backward pass, with its
    result. error: the worst error against the reference, in the unit that `tolerance`
    bounds; null for the reference itself. flops, bytes_floor: what one call needs at least.
    sustained_ms, joules: of one of many calls without a pause between them, on a GPU.
    """
    if not samples_ms:
        raise ReceiptError(f"backend {backend!r}, {phase}: no samples")
    samples = [float(sample) for sample in samples_ms]
    row = {
        "backend": backend, "phase": phase, **summary(samples), "cold_ms": cold_ms,
        "peak_memory_bytes": peak_memory_bytes, "error": error, "tolerance": tolerance,
        "flops": flops, "bytes_floor": bytes_floor, "samples_ms": samples,
    }  # fmt: skip
    if kept_memory_bytes is not None:
        row["kept_memory_bytes"] = kept_memory_bytes
    if sustained_ms is not None:
        row |= {"sustained_ms": sustained_ms, "joules": joules}
    return row if rounds is None else row | {"rounds": list(rounds)}


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
        "patches": patches(),
        "lane": lane,
        "recipe": recipe,
        "topology": topology,
        "backends": list(backends),
        "environment": _without_home(environment),
        "notes": list(notes),
    }


def _without_home(environment: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The values with ~ for the user's home: a receipt is shown to others."""
    home = str(Path.home()).rstrip("/")
    if not home:
        return environment
    return {
        part: {name: value.replace(f"{home}/", "~/") for name, value in values.items()}
        for part, values in environment.items()
    }
