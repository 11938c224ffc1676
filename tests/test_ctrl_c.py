"""Ctrl-C at any moment of any command is exit status 130 and one line."""

import contextlib
import importlib
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from types import SimpleNamespace

import pytest

from megacpp_mcore import cli
from megacpp_mcore.errors import MegacppError


@pytest.mark.parametrize("where", ["build_parser", "run"])
def test_ctrl_c_anywhere_is_one_line(where, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    if where == "build_parser":
        monkeypatch.setattr(cli, "build_parser", interrupted)
    else:
        from megacpp_mcore.commands import recipe

        monkeypatch.setattr(recipe, "shipped", interrupted)
    assert cli.main(["recipe", "list"]) == 130
    assert capsys.readouterr() == ("", "megacpp: interrupted\n")


@pytest.mark.parametrize("error", [RuntimeError, MegacppError])
def test_ctrl_c_of_which_a_library_makes_another_error_is_one_line(error, monkeypatch, capsys):
    """torch does, where it imports NumPy. Without Ctrl-C the error is told."""
    from megacpp_mcore.commands import recipe

    def interrupted(*_):
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        raise error("NumPy cannot be imported twice")

    monkeypatch.setattr(recipe, "shipped", interrupted)
    assert cli.main(["recipe", "list"]) == 130
    assert capsys.readouterr() == ("", "megacpp: interrupted\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr(recipe, "shipped", lambda *_: (_ for _ in ()).throw(error("a defect")))
    if error is RuntimeError:
        with pytest.raises(RuntimeError, match="a defect"):
            cli.main(["recipe", "list"])
    else:
        assert cli.main(["recipe", "list"]) == 2


IMPORT_OF_TORCH = """
import os, signal, time
try:
    for _ in range(presses):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
except KeyboardInterrupt:  # as torch does in C++, where it imports NumPy
    swallowed.append(True)
"""


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_waits_until_torch_is_imported(presses, monkeypatch, capsys):
    """Which would swallow it; a second one does not wait, and the first is then told."""
    from megacpp_mcore.commands import recipe

    swallowed = []
    names = {"__name__": "torch", "presses": presses, "swallowed": swallowed}

    def importing(*_):
        exec(compile(IMPORT_OF_TORCH, "torch/__init__.py", "exec"), names)
        assert presses == 2, "KeyboardInterrupt was lost" * (time.sleep(5) is None)
        raise RuntimeError("another error")

    monkeypatch.setattr(recipe, "shipped", importing)
    before = signal.getitimer(signal.ITIMER_REAL)[0]
    assert cli.main(["recipe", "list"]) == 130
    assert capsys.readouterr() == ("", "megacpp: interrupted\n")
    assert len(swallowed) == presses - 1
    assert signal.getitimer(signal.ITIMER_REAL)[0] in (0, pytest.approx(before, abs=5))


def in_a_destructor():
    class Dying:
        def __del__(self):
            press()

    Dying()


def in_a_callback():
    class Dying:
        pass

    dying = Dying()
    watch = weakref.ref(dying, lambda watch: press())
    del dying
    return watch


def in_a_callback_of_importlib():
    """Which removes the lock of a module."""

    def watch(frame, event, argument):
        if event == "call" and frame.f_code.co_name == "cb":
            sys.setprofile(None)
            press()

    sys.setprofile(watch)
    try:
        importlib._bootstrap._get_module_lock("no_such_module")
    finally:
        sys.setprofile(None)


def press():
    os.kill(os.getpid(), signal.SIGINT)
    finished.append(sum(range(1000)))  # the handler is called before


finished = []


@pytest.mark.parametrize("where", [in_a_destructor, in_a_callback, in_a_callback_of_importlib])
def test_ctrl_c_where_python_swallows_exceptions_is_one_line(where, monkeypatch, capsys):
    from megacpp_mcore.commands import recipe

    def pressed(*_):
        kept = where()
        time.sleep(5)
        pytest.fail(f"KeyboardInterrupt was lost; {kept}")

    monkeypatch.setattr(recipe, "shipped", pressed)
    finished.clear()
    hook = sys.unraisablehook
    assert cli.main(["recipe", "list"]) == 130
    assert capsys.readouterr() == ("", "megacpp: interrupted\n")
    assert finished or where is in_a_callback, "a destructor was cut off"
    assert sys.unraisablehook is hook


@pytest.mark.parametrize("where", [in_a_destructor, in_a_callback, in_a_callback_of_importlib])
def test_ctrl_c_there_is_told_by_a_command_that_ends_at_once(where, monkeypatch, capsys):
    """Before the exception could be raised again."""
    command = SimpleNamespace(run=lambda args: 0 * bool(where()))
    parser = SimpleNamespace(parse_args=lambda words: command)
    monkeypatch.setattr(cli, "build_parser", lambda commands: parser)
    before = signal.getitimer(signal.ITIMER_REAL)[0]
    assert cli.main(["recipe", "list"]) == 130
    assert capsys.readouterr() == ("", "megacpp: interrupted\n")
    assert signal.getitimer(signal.ITIMER_REAL)[0] in (0, pytest.approx(before, abs=5))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("where", [in_a_destructor, in_a_callback, in_a_callback_of_importlib])
def test_a_command_that_handles_ctrl_c_itself_has_its_own_word(where, monkeypatch, capsys):
    def handles(args):
        try:
            kept = where()
            time.sleep(5)
        except KeyboardInterrupt:
            return 7
        pytest.fail(f"KeyboardInterrupt was lost; {kept}")

    parser = SimpleNamespace(parse_args=lambda words: SimpleNamespace(run=handles))
    monkeypatch.setattr(cli, "build_parser", lambda commands: parser)
    assert cli.main(["data", "build"]) == 7
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("inside", [cli._is_only_noted, cli._is_swallowed, cli._swallows])
def test_ctrl_c_in_its_own_handler_is_of_what_that_interrupted(inside):
    """Else it would raise in `main`, past the end of its block."""

    def told(interrupted):
        frame = None
        for function in (interrupted, cli._Signals._interrupt, inside):
            frame = SimpleNamespace(f_code=function.__code__, f_back=frame)
        return cli._is_only_noted(frame)

    assert told(cli.main) and told(cli._Signals.end)
    assert not told(cli._run)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_python_swallows_without_ctrl_c_is_told(monkeypatch):
    from megacpp_mcore.commands import recipe

    class Dying:
        def __del__(self):
            raise RuntimeError("a defect")

    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: told.append(str(found.exc_value)))
    monkeypatch.setattr(recipe, "shipped", lambda *_: Dying() and ["nam56r-tiny"])
    cli.main(["recipe", "list"])
    assert set(told) == {"a defect"}


# Presses Ctrl-C at the call of a function whose number is the first argument, and tells at the end
# of the command how many there were.
PRESSED = """
import os, signal, sys
at, calls = int(sys.argv.pop(1)), 0
def press(frame, event, argument):
    global calls
    calls += event == "call"
    if event == "call" and calls == at:
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)
from megacpp_mcore.cli import main
sys.setprofile(press)
status = main()
if not at:
    sys.setprofile(None)
    print(calls, file=sys.stderr)
sys.exit(status)
"""


def pressed(at, *words):
    done = subprocess.run(
        [sys.executable, "-c", PRESSED, str(at), *words], capture_output=True, text=True
    )
    return done.returncode, done.stderr


@pytest.mark.slow
def test_ctrl_c_at_random_moments_is_one_line():
    """Of a command from its begin to its end, most of which is imports."""
    words = ("recipe", "show", "nam56r-tiny")
    status, calls = pressed(0, *words)
    assert status == 0 and int(calls) > 1000
    chosen = random.Random(23)
    for at in [chosen.randrange(1, int(calls) - 20) for _ in range(12)]:
        assert pressed(at, *words) == (130, "megacpp: interrupted\n"), f"at call {at} of {calls}"


@pytest.mark.slow
def test_ctrl_c_again_and_again_until_the_process_is_gone_is_one_line():
    """To its last moment, in which Python has taken its handler away."""
    words = [sys.executable, "-m", "megacpp_mcore.cli", "recipe", "show", "nam56r-tiny"]
    for _ in range(4):
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            child.stdout.read(1)
            while child.poll() is None:
                child.send_signal(signal.SIGINT)
                time.sleep(0.0005)
            told = child.stderr.read().decode()
        assert (child.returncode, told) in [(130, "megacpp: interrupted\n"), (0, "")]


# Runs the command 40 times, each in a process that gets Ctrl-C after Ctrl-C from the time it is in
# the command's function until it is gone.
STORM = """
import os, signal, sys, time, traceback
from megacpp_mcore import cli
from megacpp_mcore.commands import recipe

def begun():
    os.write(told, b"b")
    time.sleep(5)

recipe.shipped = begun
for _ in range(40):
    (heard, told), (read, stderr) = os.pipe(), os.pipe()
    if not (child := os.fork()):
        os.dup2(stderr, 2)
        try:
            status = cli.main()
        except BaseException:
            traceback.print_exc()
            status = 1
        os._exit(status)
    os.close(stderr)
    os.close(told)
    os.read(heard, 1)
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        os.kill(child, signal.SIGINT)
    text = os.read(read, 10_000).decode()
    assert (os.waitstatus_to_exitcode(ended[1]), text) == (130, "megacpp: interrupted\\n"), text
    os.close(heard)
    os.close(read)
"""


@pytest.mark.slow
def test_ctrl_c_as_fast_as_can_be_is_one_line():
    """Also between the command's functions and its end."""
    done = subprocess.run(
        [sys.executable, "-c", STORM, "recipe", "list"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("place, presses", [("__enter__", 1), ("end", 1), ("end", 3)])
def test_ctrl_c_as_handlers_change_is_one_line_and_the_last(place, presses):
    """What comes after the command's end is ignored."""
    script = f"""
import os, signal, sys
from megacpp_mcore import cli
left, place = {presses}, cli._Signals.{place}
def press(signals):
    global left
    while left:
        left -= 1
        os.kill(os.getpid(), signal.SIGINT)
    place(signals)
cli._Signals.{place} = press
status = cli.main()
os.kill(os.getpid(), signal.SIGINT)
assert left == 0 and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
sys.exit(status)
"""
    words = [sys.executable, "-c", script, "recipe", "list"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "megacpp: interrupted\n")
