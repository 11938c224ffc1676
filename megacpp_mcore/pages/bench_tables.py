"""Tables of benches: layers, operators and dispatchers."""

import json
from pathlib import Path
from typing import Any

from megacpp_mcore.pages.tables import (
    GIB,
    digits,
    interval,
    link,
    parts_of,
    table,
)
from megacpp_mcore.receipts.judge import MARGIN, is_wrong, judge_rows
from megacpp_mcore.receipts.reader import read, rows_by_key


def benches(words: str, folder: Path) -> str:
    """Rows of benches. words: lines `RECEIPT | what | BACKEND[@PHASE] | BACKEND: what, ...`, the
    backends compared with being in the same receipt; none after the last bar."""
    head = [
        "layer or operator",
        "ms",
        "sustained ms",
        "J",
        "GiB",
        "compared with",
        "time, 99 % interval",
    ]
    rows = []
    for name, label, ours, others in parts_of(words, 4):
        rows.append(_bench(folder, name, label, ours, others))
    return table(head, rows)


def _bench(folder: Path, name: str, label: str, ours: str, others: str) -> list[str]:
    receipt = read(folder / f"{name}.json")
    backend, _, phase = ours.partition("@")
    phase = phase or "forward_backward"
    timed = rows_by_key(receipt)
    row, compared, ratios = timed[backend, phase], [], []
    for other in filter(None, (part.strip() for part in others.split(";"))):
        theirs, _, what = other.partition(": ")
        their_row = timed[theirs, phase]
        ratio = judge_rows(their_row, row, MARGIN, in_turns=True).time
        without_pause, energy = _sustained(their_row)
        loaded = f" ({without_pause} sustained, {energy} J)" if without_pause else ""
        memory = _memory(their_row, timed.get((theirs, "forward")))
        measured = f"{_ms(their_row)} ms{loaded}, {memory} GiB: {what}"
        compared.append(measured + _beyond_tolerance(their_row))
        ratios.append(interval(ratio, 3))
    return [
        link(label, name), _ms(row),
        *_sustained(row), _memory(row, timed.get((backend, "forward"))) + _beyond_tolerance(row),
        "; ".join(compared) or "timed alone", "; ".join(ratios),
    ]  # fmt: skip


def dispatch(words: str, folder: Path) -> str:
    """A row a dispatcher, from the JSON of `tests/gpu/dispatch_over_ranks.py time`. words: the
    file, next to `folder`."""
    path = folder.parent / words.strip()
    times = json.loads(path.read_text())
    head = ["dispatcher, experts", "ms", "forward", "peak MiB beyond what it began with"]
    rows = []
    for name, milliseconds in sorted(times["forward_backward"].items(), key=lambda item: item[1]):
        way, _, experts = name.partition("+")
        forward, peak = times["forward"][name], times["peak MiB"][name]
        label = f"`{way}`, `{experts}`" if experts else f"`{way}`"
        rows.append([label, f"{milliseconds:.2f}", f"{forward:.2f}", f"{peak:,.0f}"])
    return f"[Its file](examples/receipts/{words.strip()}):\n\n{table(head, rows)}"


def _beyond_tolerance(row: Any) -> str:
    """What is said of a backend that was timed though the bench refuses its results."""
    if not is_wrong(row):
        return ""
    error, tolerance = digits(row["error"]), digits(row["tolerance"])
    return f" (its results are refused: error {error}, allowed {tolerance})"


def _ms(row: Any) -> str:
    return digits(row["median_ms"])


def _sustained(row: Any) -> tuple[str, str]:
    """Milliseconds and joules of calls without a pause; "" where they were not measured."""
    ms, joules = row.get("sustained_ms"), row.get("joules")
    return tuple("" if value is None else digits(value) for value in (ms, joules))


def _memory(row: Any, forward: Any) -> str:
    """At the peak; and after the forward pass, where its row says so."""
    kept = (forward or {}).get("kept_memory_bytes")
    peak = f"{row['peak_memory_bytes'] / GIB:.2f}"
    return peak if kept is None else f"{peak} ({kept / GIB:.2f} kept)"
