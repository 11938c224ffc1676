"""What the parsers of all commands share."""

import argparse
from typing import Any, NoReturn

from megacpp_mcore.terminal import printable


class Parser(argparse.ArgumentParser):
    """A parser that prints description and epilog as they are written; so do its subparsers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter} | options)

    def error(self, message: str) -> NoReturn:
        """Names in a refusal are shown escaped."""
        super().error(printable(message))


def add_overrides(
    parser: argparse.ArgumentParser, text: str = "override one key; may be given again"
) -> None:
    """Add `--set A.B=C` as `overrides`."""
    parser.add_argument(
        "--set", dest="overrides", metavar="A.B=C", action="append", default=[], help=text
    )
