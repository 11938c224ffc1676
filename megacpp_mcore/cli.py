"""The `megacpp` command: argument parsing and printing only."""

import argparse
import contextlib
import errno
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

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
    after Ctrl-C, 143 after SIGTERM. Without argv the process is the command: Ctrl-C is ignored from
    its end on, as Python takes its handler away before the process is gone."""
    signals, status = _Signals(last=argv is None), None
    try:
        with signals:
            status = _run(sys.argv[1:] if argv is None else argv, signals)
    except KeyboardInterrupt:
        status = None
    except Exception:
        if not signals.interrupted:
            raise
    while not signals.ended:
        try:  # noqa: SIM105  in this frame Ctrl-C raises nothing, in suppress's it would
            signals.end()
        except KeyboardInterrupt:
            pass
    if status is not None and not signals.noted:
        return status
    print("megacpp: interrupted", file=sys.stderr)
    return 128 + signal.SIGINT


def _run(words: list[str], signals: "_Signals") -> int:
    if signals.noted:
        raise KeyboardInterrupt
    try:
        if any("\0" in word for word in words):  # from Python: no system passes one on
            raise MegacppError("an argument has a NUL, which no name of a file can have")
        # the others would take longer than most commands do
        args = build_parser([w for w in words[:1] if w in COMMANDS] or COMMANDS).parse_args(words)
        with contextlib.redirect_stdout(Escaping(sys.stdout)):
            return args.run(args)
    except MegacppError as error:
        if signals.interrupted:
            raise
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


class _Signals:
    """SIGTERM leaves the block as Ctrl-C does, so that no temporary file stays.

    last: SIGINT is ignored after the block. interrupted: whether Ctrl-C was pressed in it; a
    library may make another error of that. noted: whether it was pressed in `main` or while
    handlers changed, where it raises no exception, or the command ended while the exception waited.
    Where that would be swallowed (`_swallows`) it waits (a second Ctrl-C does not), and where it
    was, as in any other callback of Python's, it is raised again. ended: whether handlers are what
    they were before the block; a Ctrl-C may have kept `end` from that.
    """

    def __init__(self, last: bool) -> None:
        self.interrupted, self.ended, self._last = False, False, last
        self.noted, self._ending = False, False
        self._before: dict[signal.Signals, Any] = {}
        self._timer: tuple[float, float] | None = None  # another's
        self._unraisablehook = sys.unraisablehook
        # which alone may set a handler
        self._is_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> None:
        sys.unraisablehook = self._unraisable
        if not self._is_main_thread:
            return
        self._before = {signal.SIGTERM: signal.signal(signal.SIGTERM, self._leave)}
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Restore the handlers. Can be called again where Ctrl-C interrupted it."""
        self._ending = True
        is_caught = signal.getsignal(signal.SIGINT) in (signal.default_int_handler, self._interrupt)
        if self._last and self._is_main_thread and is_caught:
            self._before[signal.SIGINT] = signal.SIG_IGN
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._timer is not None:
            left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
            self.noted = self.noted or left > 0
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._timer is not None:
            signal.setitimer(signal.ITIMER_REAL, *self._timer)
        sys.unraisablehook = self._unraisablehook
        self.ended = True

    def _leave(self, *_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        first = number == signal.SIGALRM or not self.interrupted
        self.interrupted = True
        if self._ending or _is_only_noted(frame):
            self.noted = True
            return
        if not (first and _is_swallowed(frame)):
            raise KeyboardInterrupt
        self._interrupt_soon()

    def _unraisable(self, found: Any) -> None:
        """What Python does with an exception that it swallows."""
        if self.interrupted and issubclass(found.exc_type, KeyboardInterrupt):
            self._interrupt_soon()
        elif not (self._ending and found.exc_type is OSError and _IGNORED in str(found.exc_value)):
            self._unraisablehook(found)

    def _interrupt_soon(self) -> None:
        handler = signal.signal(signal.SIGALRM, self._interrupt)
        self._before.setdefault(signal.SIGALRM, handler)
        timer = signal.setitimer(signal.ITIMER_REAL, 0.05)
        self._timer = self._timer or timer


def _is_only_noted(frame: FrameType | None) -> bool:
    """Whether Ctrl-C is to raise nothing in the frame, or in that which a handler interrupted."""
    while frame is not None and frame.f_code in _OF_THE_HANDLER:
        frame = frame.f_back
    return frame is not None and frame.f_code in _WITHOUT_EXCEPTION


def _is_swallowed(frame: FrameType | None) -> bool:
    """Whether an exception raised in the frame would be."""
    while frame is not None:
        if _swallows(frame):
            return True
        frame = frame.f_back
    return False


def _swallows(frame: FrameType) -> bool:
    """The import of torch (it imports NumPy from C++), a destructor, and the callback with which
    importlib removes a lock."""
    code = frame.f_code
    if code.co_name == "<module>":
        return frame.f_globals.get("__name__") == "torch"
    if code.co_name == "cb":
        return code.co_filename == "<frozen importlib._bootstrap>"
    return code.co_name == "__del__"


# CPython, of a Ctrl-C that came just before it was to be ignored.
_IGNORED = "ignored due to race condition"
_WITHOUT_EXCEPTION = {
    function.__code__ for function in (main, _Signals.__enter__, _Signals.__exit__, _Signals.end)
}
_OF_THE_HANDLER = {
    function.__code__
    for function in (_Signals._interrupt, _is_only_noted, _is_swallowed, _swallows)
}


if __name__ == "__main__":
    sys.exit(main())
