"""Megatron's argument parser without what it does again each time it is built.

Its options come from dataclasses whose sources it parses for their help, half a second of processor
time for every parser, and so for every model that a test builds and every rank that one starts.
"""

from megatron.training import argument_utils

_found: dict[type, dict[str, str]] = {}
_parse = argument_utils.ArgumentGroupFactory._get_field_docstrings


def _parse_once(self: argument_utils.ArgumentGroupFactory, cls: type) -> dict[str, str]:
    if cls not in _found:
        _found[cls] = _parse(self, cls)
    return dict(_found[cls])


def parse_once() -> None:
    """From here on, in this process."""
    argument_utils.ArgumentGroupFactory._get_field_docstrings = _parse_once
