"""Where the wall time of a run goes: a stopwatch ledger.

Goodput is the share of the wall time spent in useful training steps. The ledger charges every
nanosecond to exactly one category: the innermost open span, or `idle` when none is open. So the
parts add up to the wall time by construction, and a span inside another is never counted twice.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from megacpp_mcore.errors import MegacppError

# What a span may be charged to. `compile` is compilation and autotuning: a cold first step.
SPANS = ("step", "compile", "data", "checkpoint", "evaluation", "idle")
# `lost` is no span: it is step time whose result a resume threw away.
CATEGORIES = (*SPANS[:-1], "lost", "idle")


class GoodputError(MegacppError):
    """An unknown category, or spans that do not nest."""


_UTC = "%Y-%m-%dT%H:%M:%SZ"


def utc_now() -> str:
    """The time as a receipt writes it: UTC, ISO 8601, whole seconds, `Z`."""
    return datetime.now(UTC).strftime(_UTC)


def parse_utc(text: str) -> datetime:
    """The time that `utc_now` wrote. Raises ValueError for another form, or no such day."""
    return datetime.strptime(text, _UTC).replace(tzinfo=UTC)


class Span:
    """An open span: what it is charged to, and how much it has been charged."""

    def __init__(self, category: str) -> None:
        self.category, self.ns = category, 0


class Goodput:
    """The ledger of one process; the wall time starts when it is made.

    It measures the thread that made it, which is the host's: work on a GPU is asynchronous, and a
    span covers what the host does and waits for. A run on GPUs waits for a step in a span of that
    step, and before a log of values, a save, an evaluation and the end for all steps, so that none
    is charged to them. A host that waits for data while the GPU still works is charged to `data`.

    clock: nanoseconds, never going back. started: the start as `utc_now` writes it.
    """

    def __init__(
        self, *, clock: Callable[[], int] = time.monotonic_ns, started: str | None = None
    ) -> None:
        self._clock = clock
        self._started = started or utc_now()
        self._thread = threading.get_ident()
        self._ns = dict.fromkeys(CATEGORIES, 0)
        self._open: list[Span] = []
        self._mark = clock()
        self._earlier: list[dict[str, Any]] = []

    @contextmanager
    def span(self, category: str) -> Iterator[Span]:
        """Charge the time inside to `category`, except what spans inside it take.

        What the time went to may be known only at its end: see `book_as`.

        Raises GoodputError for an unknown category, a span opened on another thread, or a span that
        ends before one inside it (a generator suspended inside a span does that).
        """
        span = Span(_known(category))
        if threading.get_ident() != self._thread:
            raise GoodputError(
                f"a {category!r} span was opened on another thread; the ledger measures the thread "
                "that made it"
            )
        self._charge()
        self._open.append(span)
        depth = len(self._open)
        try:
            yield span
        finally:
            self._charge()
            if len(self._open) != depth:
                raise GoodputError(
                    f"spans must nest: {category!r} ends while the open spans are "
                    f"{[span.category for span in self._open]}"
                )
            self._open.pop()

    def _charge(self) -> None:
        now = self._clock()
        elapsed, self._mark = now - self._mark, now
        if self._open:
            self._open[-1].ns += elapsed
        self._ns[self._open[-1].category if self._open else "idle"] += elapsed

    def book_as(self, span: Span, category: str) -> None:
        """Charge a span's time to `category`, and while it is open what is to come: a step that
        compiled, which may be known only after its end.

        Raises GoodputError for an unknown category.
        """
        self._ns[span.category] -= span.ns
        span.category = _known(category)
        self._ns[category] += span.ns

    def resume(self, earlier: Mapping[str, Any], lost_s: float = 0.0) -> None:
        """Put the segments of the processes before this one in front of its own.

        earlier: the `goodput` of the receipt the run resumes from. lost_s: seconds of steps in it
        that this process does again, because they came after the checkpoint; they move from
        `step` to `lost`, last segment first, as far as there is step time to move.
        """
        segments = [
            {**segment, "seconds": dict(segment["seconds"])} for segment in earlier["segments"]
        ]
        for segment in reversed(segments):
            moved = min(lost_s, segment["seconds"]["step"])
            segment["seconds"]["step"] = round(segment["seconds"]["step"] - moved, 6)
            segment["seconds"]["lost"] = round(segment["seconds"]["lost"] + moved, 6)
            lost_s -= moved
        self._earlier = segments

    def record(self) -> dict[str, Any]:
        """The ledger up to now, earlier segments included, as the receipt holds it.

        Seconds throughout. `useful` is the share of `step` in the wall time. Time between two
        segments is in none of them: no process was there to measure it.
        """
        self._charge()
        own = {
            "started": self._started,
            "wall_s": round(sum(self._ns.values()) / 1e9, 6),
            "seconds": {name: round(ns / 1e9, 6) for name, ns in self._ns.items()},
        }
        segments = [*self._earlier, own]
        wall = sum(part["wall_s"] for part in segments)
        seconds = {n: round(sum(p["seconds"][n] for p in segments), 6) for n in CATEGORIES}
        return {
            "wall_s": round(wall, 6),
            "seconds": seconds,
            "useful": round(seconds["step"] / wall, 6) if wall else 0.0,
            "segments": segments,
        }


def _known(category: str) -> str:
    if category not in SPANS:
        raise GoodputError(f"unknown category {category!r}; a span is {', '.join(SPANS)}")
    return category
