"""What the tables of docs/performance.md and README.md share: words of a block, cells, rows.

Receipts are named by their path from the folder of H200 receipts, without `.json` (`../h100/run-x`
is another card's); a row of a table links to its receipt.
"""

import posixpath
from collections.abc import Iterator, Sequence
from typing import Any

RECEIPTS = "examples/receipts/h200"
GIB = 2**30


def parts_of(words: str, count: int) -> Iterator[list[str]]:
    """Of each line of a block's words, one a row, the `count` parts between bars. Raises ValueError
    for another number of them."""
    for line in filter(None, map(str.strip, words.splitlines())):
        parts = [part.strip() for part in line.split("|")]
        if len(parts) != count:
            raise ValueError(f"{line!r} has {len(parts)} parts between bars, {count} are needed")
        yield parts


def link(label: str, name: str) -> str:
    """A link to the receipt `name`, from the root of the checkout."""
    return f"[{label}]({posixpath.normpath(f'{RECEIPTS}/{name}.json')})"


def interval(effect: Any, places: int) -> str:
    """A ratio's 99 % interval, with `places` behind the point."""
    if effect.low is None:
        return "too few samples"
    return f"{effect.low:.{places}f} to {effect.high:.{places}f}"


def digits(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown. Raises ValueError without rows."""
    if not rows:
        raise ValueError("no row")
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
