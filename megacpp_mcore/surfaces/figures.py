"""Measured times and memory for the catalog, read from the receipts that the repository carries."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "examples/receipts/h200"
_CHECKOUT = Path(__file__).resolve().parents[2]
_FORWARD_AND_BOTH = ("forward", "forward_backward")


@dataclass(frozen=True)
class Figure:
    """The median times of one row of a bench receipt, and its peak memory.

    receipt: file name in FOLDER. row: the row's `backend`. label: what was timed; "" for the
    backend itself. phases: those shown, in order; the memory is the last one's.
    """

    receipt: str
    row: str
    label: str = ""
    phases: tuple[str, ...] = _FORWARD_AND_BOTH

    def text(self) -> str | None:
        """ "label: forward 1.32 ms, with backward 5.92 ms, 1.10 GiB (receipt)"; None where the
        receipt is not at hand.

        Raises KeyError where the receipt has no such row.
        """
        rows = _rows(self.receipt)
        if not rows:
            return None
        found = [rows[self.row, phase] for phase in self.phases]
        times = [f"{_digits(row['median_ms'])} ms" for row in found]
        if self.phases == _FORWARD_AND_BOTH:
            times = [f"forward {times[0]}", f"with backward {times[1]}"]
        memory = _digits(found[-1]["peak_memory_bytes"] / 2**30)
        label = self.label or self.row
        return f"{label}: {', '.join(times)}, {memory} GiB ({self.receipt})"

    def is_known(self) -> bool:
        """Whether the receipt is here and has the row."""
        return all((self.row, phase) in _rows(self.receipt) for phase in self.phases)


def step(receipt: str, row: str, label: str) -> Figure:
    """A training step of a whole model."""
    return Figure(receipt, row, label, ("step",))


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


def surfaces_by_receipt() -> dict[str, list[str]]:
    """A receipt's file name -> the surfaces whose catalog entries take figures from it."""
    from megacpp_mcore.surfaces.registry import REGISTRY

    found: dict[str, list[str]] = {}
    for surface in REGISTRY.values():
        entries = (*surface.backends, *surface.not_carried)
        named = [figure.receipt for entry in entries for figure in entry.figures]
        named += [backend.receipt for backend in surface.backends if backend.receipt]
        for receipt in dict.fromkeys(named):
            found.setdefault(receipt, []).append(surface.name)
    return found
