"""Measured times and memory for the catalog, read from the receipts that the repository carries."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "examples/receipts/h200"
_CHECKOUT = Path(__file__).resolve().parents[2]
_PHASES = ("forward", "forward_backward")


@dataclass(frozen=True)
class Figure:
    """The median times of one row of a bench receipt, and its peak memory, forward and backward.

    receipt: file name in FOLDER. row: the row's `backend`. label: what was timed; "" for the
    backend itself.
    """

    receipt: str
    row: str
    label: str = ""

    def text(self) -> str | None:
        """ "label: forward 1.32 ms, with backward 5.92 ms, 1.10 GiB (receipt)"; None where the
        receipt is not at hand.

        Raises KeyError where the receipt has no such row.
        """
        rows = _rows(self.receipt)
        if not rows:
            return None
        forward, both = (rows[self.row, phase] for phase in _PHASES)
        times = [f"{_digits(row['median_ms'])} ms" for row in (forward, both)]
        memory = _digits(both["peak_memory_bytes"] / 2**30)
        return (
            f"{self.label or self.row}: forward {times[0]}, with backward {times[1]}, {memory} GiB "
            f"({self.receipt})"
        )

    def is_known(self) -> bool:
        """Whether the receipt is here and has the row."""
        return all((self.row, phase) in _rows(self.receipt) for phase in _PHASES)


def _digits(value: float) -> str:
    """Three of them."""
    return f"{value:#.3g}".rstrip(".")


@functools.cache
def _rows(receipt: str) -> dict[tuple[str, str], dict[str, Any]]:
    """(backend, phase) -> row; empty in an installed package, which carries no receipts."""
    path = _CHECKOUT / FOLDER / receipt
    if not path.is_file():
        return {}
    from megacpp_mcore.receipts.reader import rows_by_key

    return rows_by_key(json.loads(path.read_text()))


def claims_by_receipt() -> dict[str, list[str]]:
    """A receipt's file name -> what takes figures from it: entries of the catalog, "catalog: norm",
    and the rates of the planner."""
    from megacpp_mcore.planner.rates import h200
    from megacpp_mcore.surfaces.registry import REGISTRY

    found: dict[str, list[str]] = {}
    for surface in REGISTRY.values():
        entries = surface.backends
        named = [figure.receipt for entry in entries for figure in entry.figures]
        named += [backend.receipt for backend in surface.backends if backend.receipt]
        for receipt in dict.fromkeys(named):
            found.setdefault(receipt, []).append(f"catalog: {surface.name}")
    for receipt in dict.fromkeys(rate["receipt"] for rate in h200().measured.values()):
        found.setdefault(receipt, []).append("planner")
    return found
