"""A live run in the terminal: its receipt, which is written at every save, and between two of them
what each rank's heartbeat says that it is doing."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megacpp_mcore.files import read_regular
from megacpp_mcore.receipts.checks import ReceiptError
from megacpp_mcore.receipts.reader import Receipt, read
from megacpp_mcore.receipts.text import gib, number, percent

_ENDED = ("complete", "interrupted", "failed")
_ALIVE_S = 60  # a rank at work writes its heartbeat every 5 s; one that was killed leaves it


def follow(run: Path, interval_s: float) -> Iterator[str]:
    """A line whenever the receipt or a rank's doing has changed; ends with the run.

    Raises ReceiptError where there is neither a receipt nor a heartbeat in `run`.
    """
    said_of_run = said_of_ranks = ""
    known = os.path.isdir(run) and (os.path.exists(run / "receipt.json") or _ranks(run))
    if not known:
        raise ReceiptError(f"{run} has neither a receipt nor a rank at work: name a run's folder")
    while True:
        receipt = _receipt(run)
        if receipt is not None and (line := _line(receipt)) != said_of_run:
            said_of_run = line
            yield line
        ranks = _ranks(run)
        if ranks and (line := _doing(ranks)) != said_of_ranks:
            said_of_ranks = line
            yield line
        if receipt is not None and receipt["result"]["status"] in _ENDED and not ranks:
            return
        time.sleep(interval_s)


def _receipt(run: Path) -> Receipt | None:
    try:
        return read(run / "receipt.json")
    except ReceiptError:
        return None  # not written yet


def _line(receipt: Receipt) -> str:
    result, series = receipt["result"], receipt["series"]
    recipe = receipt["recipe"]["content"] if receipt["recipe"] else {}
    total = recipe.get("schedule", {}).get("train_iters")
    loss = series["loss"][-1] if series["loss"] else None
    of = "" if total is None else f" of {total:,}"
    parts = [f"{result['status']}, step {result['steps']:,}{of}"]
    if loss is not None:
        parts.append(f"loss {loss:.4f}")
    if result["final_eval_loss"] is not None:
        parts.append(f"held-out {result['final_eval_loss']:.4f}")
    if result["tokens_per_s_median"] is not None:
        parts.append(f"{number(result['tokens_per_s_median'])} tokens/s")
    parts.append(f"{percent(receipt['goodput']['useful'])} useful")
    if memory := gib(result["peak_memory_bytes"]):
        parts.append(f"{memory} GiB")
    reason = f": {result['reason']}" if result["reason"] else ""
    return " | ".join(parts) + reason


def _ranks(run: Path) -> dict[int, dict[str, Any]]:
    """rank -> its last heartbeat, of those at work."""
    found = {}
    for path in sorted((run / "heartbeat").glob("rank-*.json")):
        try:
            if time.time() - os.stat(path).st_mtime > _ALIVE_S:
                continue
            found[int(path.stem.removeprefix("rank-"))] = json.loads(read_regular(path))
        except (OSError, ValueError):
            continue
    return found


def _doing(ranks: dict[int, dict[str, Any]]) -> str:
    """What the ranks do; where they differ, each is named."""
    doing: dict[str, list[int]] = {}
    for rank, beat in ranks.items():
        doing.setdefault(str(beat.get("doing")), []).append(rank)
    if len(doing) == 1:
        return f"  {f'{len(ranks)} ranks: ' if len(ranks) > 1 else ''}{next(iter(doing))}"
    return "  " + "; ".join(f"rank {', '.join(map(str, r))}: {what}" for what, r in doing.items())
