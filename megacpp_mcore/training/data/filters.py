"""What to leave out of source files: licence headers, and files that a program wrote."""

import re

_HEAD = 4096  # bytes in which a generated file says so
_GENERATED = re.compile(
    rb"@generated\b|do not edit( this file| by hand|[.!\s*/#-]|$)|"
    rb"(automatically|auto-?)[ -]?generated\b|generated (automatically )?by\b|"
    rb"this file (was|is) (automatically )?generated",
    re.IGNORECASE,
)
_LICENCE = re.compile(
    rb"copyright|licen[cs]e[ds]?\b|SPDX-|all rights reserved|redistribution and use", re.IGNORECASE
)
_COMMENT = re.compile(
    rb"\A\s*(/\*.*?\*/|(?:[ \t]*(?://|#(?!\s*(?:include|pragma|if|define|ifndef|ifdef|import))|;;|--)"
    rb"[^\n]*\n)+)",
    re.DOTALL,
)  # the comment that a file begins with: /* */, or lines of //, #, ;; or --


def is_generated(text: bytes) -> bool:
    """Whether a file's beginning says that a program wrote it."""
    return _GENERATED.search(text[:_HEAD]) is not None


def without_licence(text: bytes) -> bytes:
    """`text` without the comments at its beginning, as long as each speaks of a licence."""
    while (found := _COMMENT.match(text)) and _LICENCE.search(found[0]):
        text = text[found.end() :].lstrip(b"\r\n")
    return text
