"""The `megacpp` command: argument parsing and printing only."""

import argparse
import contextlib
import errno
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from megacpp_mcore import __version__
from megacpp_mcore.commands.examples import add_examples
from megacpp_mcore.commands.parser import Parser
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.terminal import Escaping, printable

COMMANDS = (
    "translate",
    "recipe",
    "data",
    "train",
    "generate",
    "evaluate",
    "export",
    "import",
    "checkpoint",
    "report",
    "patch",
    "catalog",
    "doctor",
    "cuda",
    "bench",
    "completion",
)


def build_parser(commands: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser with these commands registered. Imports no torch."""
    parser = Parser(prog="megacpp", description=__doc__.split(":")[0])
    parser.add_argument("--version", action="version", version=f"megacpp {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in commands:
        importlib.import_module(f"megacpp_mcore.commands.{name}").register(subparsers)
    add_examples(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns its exit status: 0 done, 2 refused, 1 failed (why, on stderr), 130
    after Ctrl-C, 143 after SIGTERM."""
    words = sys.argv[1:] if argv is None else argv
    try:
        if any("\0" in word for word in words):  # from Python: no system passes one on
            raise MegacppError("an argument has a NUL, which no name of a file can have")
        # the others would take longer than most commands do
        args = build_parser([w for w in words[:1] if w in COMMANDS] or COMMANDS).parse_args(words)
        with _leaving_at_sigterm(), contextlib.redirect_stdout(Escaping(sys.stdout)):
            return args.run(args)
    except MegacppError as error:
        print(f"megacpp: {printable(str(error))}", file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe: keep Python from flushing stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        print(f"megacpp: {printable(f'{error.filename}: {error.strerror}')}", file=sys.stderr)
        # Only an argument or a setting has such a name; every command reads some.
        return 2 if error.errno in (errno.ENAMETOOLONG, errno.ELOOP) else 1
    except KeyboardInterrupt:
        print("megacpp: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


@contextlib.contextmanager
def _leaving_at_sigterm() -> Iterator[None]:
    """SIGTERM leaves the block as Ctrl-C does, so that no temporary file stays."""

    def leave(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():  # none else may set a handler
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
