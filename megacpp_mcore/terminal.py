"""What is written for a person: nothing that a file's name says moves the cursor, and a bar is
drawn only where it can be seen."""

import os
import re
from typing import Any, TextIO

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e]")


def printable(text: str) -> str:
    """Text with control characters but line breaks and tabs, surrogates (bytes of a name that are
    no UTF-8) and marks that turn the direction of writing as escapes: "\\x1b[31m"."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class Escaping:
    """A text stream that writes only what is `printable`; else as the stream itself."""

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
    """ "8 s", "2 min 05 s", "3 h 20 min": time left, rounded up to a second."""
    seconds = int(-(-seconds // 1))
    if seconds < 100:
        return f"{seconds} s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 100:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"
