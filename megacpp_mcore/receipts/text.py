"""Figures and tables as text."""

import textwrap
from collections.abc import Sequence
from typing import Any

from megacpp_mcore.receipts.intervals import Effect

WIDTH = 96


def table(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(align))]
    return [
        "  ".join(
            cell.ljust(width) if side == "l" else cell.rjust(width)
            for cell, width, side in zip(row, widths, align, strict=True)
        ).rstrip()
        for row in rows
    ]


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def rule(text: str, margin: float) -> list[str]:
    """The rule that a verdict is by, below the table."""
    return wrapped(f"rule: margin {percent(margin)}. {text}.")


def interval(effect: Effect, signed: bool = False) -> str:
    if effect.low is None or effect.high is None:
        return "too few"
    form = "+.4f" if signed else ".4f"
    return f"{effect.low:{form}} .. {effect.high:{form}}"


def rate(amount: float | None, ms: float, unit: float) -> str:
    return "" if amount is None else number(amount / (ms / 1000) / unit)


def number(value: Any) -> str:
    """Four significant digits; whole numbers and large ones with thousands separators."""
    if value is None:
        return ""
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def gib(value: int | None) -> str:
    return "" if value is None else f"{value / 2**30:.2f}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
