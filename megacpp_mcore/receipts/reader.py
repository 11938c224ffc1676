"""The one reading of a receipt: parsed, validated, and its figures by name."""

import json
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megacpp_mcore.files import read_regular
from megacpp_mcore.receipts.checks import ReceiptError, validate

Receipt = Mapping[str, Any]  # a valid one: the fields are the schema's
Row = Mapping[str, Any]  # one backend and phase of a bench


def receipt_of(run: Path) -> Path:
    """The receipt of a run's folder, or the file itself."""
    return run / "receipt.json" if os.path.isdir(run) else run


def read(path: str | Path) -> dict[str, Any]:
    """Read and validate a receipt.

    Raises ReceiptError: no such file, not JSON (or truncated), another schema version, not valid.
    """
    path = Path(path)
    try:
        text = read_regular(path, most=1 << 28).decode()
        document = json.loads(text) if text.strip() else None
    except IsADirectoryError:
        raise ReceiptError(f"{path} is a folder; name the receipt file in it") from None
    except OSError as error:
        raise ReceiptError(f"cannot read the receipt {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        place = f"no UTF-8 text at byte {error.start}"
        raise ReceiptError(f"{path} is not JSON: {place}, or it is truncated there") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise ReceiptError(f"{path} is not JSON: {place}, or it is truncated there") from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits; 10,000 brackets
        raise ReceiptError(f"{path} is not a receipt: {error}") from None
    if not text.strip():
        raise ReceiptError(f"{path} is empty, not a receipt")
    validate(document, str(path))
    return document


def warm_rows(run: Receipt) -> list[int]:
    """The rows of a run's series that are evidence of speed: every one not marked cold."""
    cold = set(run["series_info"]["cold_steps"])
    return [row for row, step in enumerate(run["series"]["step"]) if step not in cold]


def warm(run: Receipt, column: str) -> list[float]:
    """A column of the series over the warm rows."""
    return [run["series"][column][row] for row in warm_rows(run)]


def warm_median(run: Receipt, column: str) -> float:
    """Raises StatisticsError without a warm step."""
    return statistics.median(warm(run, column))


def warm_power(run: Receipt, column: str) -> float | None:
    """Median of `power_w` or `power_limited` over the warm steps that have it; None: none has."""
    found = warm(run, column) if column in run["series"] else []
    counted = [value for value in found if value is not None]
    return statistics.median(counted) if counted else None


def points(columns: Mapping[str, list], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a column of `series` or `evaluations`, where there is a value."""
    rows = [row for row, value in enumerate(columns[name]) if value is not None]
    return [columns["step"][row] for row in rows], [columns[name][row] for row in rows]


def rows_by_key(bench: Receipt) -> dict[tuple[str, str], Row]:
    """(backend, phase) -> row."""
    return {(row["backend"], row["phase"]): row for row in bench["rows"]}


def by_round(row: Row) -> dict[int, float] | None:
    """Round -> ms of a row's samples; None where the rounds are not known."""
    if "rounds" not in row:
        return None
    return dict(zip(row["rounds"], row["samples_ms"], strict=True))


def observed(receipt: Receipt) -> dict[str, str]:
    """Surface -> what served it, joined by + where several did."""
    found: dict[str, dict[str, None]] = {}
    for entry in receipt["backends"]:
        found.setdefault(entry["surface"], {})[entry["observed"] or "none"] = None
    return {surface: "+".join(names) for surface, names in found.items()}


def problem_text(bench: Receipt) -> str:
    """Surface, dtype and sizes of a bench."""
    problem = bench["problem"]
    sizes = (f"{name} {value}" for name, value in problem["sizes"].items())
    return ", ".join([problem["surface"], problem["dtype"], *sizes])
