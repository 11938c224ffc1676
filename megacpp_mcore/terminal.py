"""Output for a terminal: control characters are escaped, and a progress bar needs room."""

import os
import re
import sys
import time
from typing import Any, TextIO

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e]")


def printable(text: str) -> str:
    """Text with escapes, such as "\\x1b[31m", for control characters (but line breaks and tabs),
    surrogates (bytes of a name that are not UTF-8) and marks that change the writing direction."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class Escaping:
    """A text stream that writes `printable` text; otherwise it behaves as the stream itself."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def has_room(stream: TextIO) -> bool:
    """Whether a stream is a terminal with rows and columns to draw a bar in."""
    try:
        if not stream.isatty():
            return False
        size = os.get_terminal_size(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return False
    return size.lines > 1 and size.columns > 20


def left(seconds: float) -> str:
    """Time left as "8 s", "2 min 05 s" or "3 h 20 min", rounded up to a second."""
    seconds = int(-(-seconds // 1))
    if seconds < 100:
        return f"{seconds} s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 100:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


class Progress:
    """How far long work has come, on stderr: a bar on a terminal, else a line now and then, both
    with the time left. Use as a context.

    total: the work, in `unit`; done: how much of it was done before.
    """

    LINES_S = 10.0  # between two lines of a log

    def __init__(
        self, name: str, total: int, unit: str = "B", *, done: int = 0, quiet: bool = False
    ) -> None:
        self._name, self._total, self._quiet = name, total, quiet
        self._done = self._before = done
        self._began = self._said = time.monotonic()
        self._bar = None
        if has_room(sys.stderr) and not quiet:
            from tqdm import tqdm

            self._bar = tqdm(desc=name, total=total, initial=done, unit=unit, unit_scale=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, amount: int) -> None:
        """Some more of it is done."""
        self._done += amount
        if self._bar is not None:
            self._bar.update(amount)
            return
        now = time.monotonic()
        if self._quiet or now - self._said < self.LINES_S or self._done <= self._before:
            return
        self._said = now
        rest = max(0, self._total - self._done)
        seconds = (now - self._began) / (self._done - self._before) * rest
        share = min(100, 100 * self._done // max(1, self._total))
        print(f"{self._name}: {share} %, {left(seconds)} left", file=sys.stderr, flush=True)
