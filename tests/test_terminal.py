"""What a person at a terminal sees of every command: one line where it is refused or interrupted,
soon; no escape sequence of a name; no bar where there is no room for one."""

import contextlib
import ctypes
import fcntl
import importlib
import os
import pty
import random
import re
import signal
import struct
import subprocess
import sys
import termios
import time
import weakref

import pytest

from megacpp_mcore import cli, terminal
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.patching import manifest
from megacpp_mcore.terminal import Escaping, Progress, has_room, left, printable
from megacpp_mcore.training.cpu import progress
from megacpp_mcore.training.cpu.progress import still_due

CHEAP = [
    ("train", "nope"),
    ("train", "nam56r"),
    ("train", "nam56r-tiny", "--set", "data.data_path=nowhere"),
    ("train", "nam56r-tiny", "--set", "data.num_workers=2"),
    ("report", "show", "nowhere.json"),
    ("data", "check", "nowhere"),
    ("recipe", "show", "nope"),
    ("generate", "nowhere"),
    ("evaluate", "nowhere", "--data", "nowhere"),
    ("export", "nowhere", "--out", "new"),
]


@pytest.mark.slow
@pytest.mark.parametrize("words", CHEAP, ids=" ".join)
def test_what_needs_no_torch_to_be_refused_is_refused_without_it(words, tmp_path):
    """In one line; `import torch` is an error there."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = subprocess.run(
        [sys.executable, "-m", "megacpp_mcore.cli", *words], cwd=tmp_path, capture_output=True,
        text=True, env=os.environ | {"PYTHONPATH": f"{tmp_path}"},
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"megacpp: .*\n", done.stderr), done.stderr


def test_gpus_are_refused_without_torch_where_there_is_no_driver(monkeypatch, capsys):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["train", "nam56r", "--gpus", "2"]) == 2
    assert "CUDA shows 0 GPUs" in capsys.readouterr().err


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


def test_names_are_shown_with_their_escape_sequences_escaped(capsys):
    assert printable("a\x1b[31mb\x9b\u202e\n\tc") == "a\\x1b[31mb\\x9b\\u202e\n\tc"
    assert printable(os.fsdecode(b"\xff.toml")) == "\\udcff.toml"
    assert printable("größe ≤ 3") == "größe ≤ 3"
    for name in ("\x1b[2J.json", os.fsdecode(b"\xff.json")):
        assert cli.main(["report", "show", name]) == 2
        said = capsys.readouterr().err
        assert "\x1b" not in said and said.isascii()
    print("\x1b[1m", file=Escaping(sys.stdout))
    assert capsys.readouterr().out == "\\x1b[1m\n"
    for words in (["train", "nam56r-tiny", "--\x1b[2J"], ["report", "show", "a", "\x1b[2J"]):
        with pytest.raises(SystemExit):
            cli.main(words)
        said = capsys.readouterr().err
        assert "\\x1b[2J" in said and "\x1b" not in said


@pytest.mark.parametrize(
    ("rows", "columns", "room"), [(24, 80, True), (0, 80, False), (24, 0, False)]
)
def test_a_bar_needs_a_terminal_with_rows_and_columns(rows, columns, room, tmp_path):
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with open(follower, "w") as terminal, open(tmp_path / "log", "w") as log:
        assert has_room(terminal) == room and not has_room(log)
    os.close(leader)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (0.2, "1 s"), (99, "99 s"), (125, "2 min 05 s"), (12000, "3 h 20 min")],
)
def test_time_left(seconds, said):
    assert left(seconds) == said


def test_time_left_knows_of_what_comes_after_the_last_step(monkeypatch, capsys):
    """At the last step an evaluation and a save are still to come; a save between two lines slows
    neither the speed nor the time left."""
    monkeypatch.setattr(progress, "has_room", lambda stream: False)
    log = progress.ProgressLog(0, 4, 2, lambda step_s: 7.0 + step_s)
    for step in range(1, 5):
        log.step(step, 1.0, 1000, 1e-3, 0.5, seconds=2.0)
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" | ")[2] for line in lines] == ["9 s left", "9 s left"]
    assert all("| 500 tokens/s |" in line for line in lines)


def test_long_work_is_a_line_now_and_then_in_a_log(monkeypatch, capsys):
    """With the time left; none for short work, and none when it is to be quiet."""
    clock = iter([0.0, 4.0, 12.0, 13.0, 23.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))
    with Progress("data build", 1000) as progress:
        for amount in (100, 200, 100, 350):
            progress.advance(amount)
    said = capsys.readouterr().err.splitlines()
    assert said == ["data build: 30 %, 28 s left", "data build: 75 %, 8 s left"]
    clock = iter([0.0, 50.0])
    with Progress("data build", 10, quiet=True) as progress:
        progress.advance(5)
    assert capsys.readouterr().err == ""


def test_long_work_that_was_resumed_is_timed_from_there(monkeypatch, capsys):
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))
    with Progress("data build", 1000, done=500) as progress:
        progress.advance(100)
    assert capsys.readouterr().err == "data build: 60 %, 40 s left\n"


def test_long_work_is_a_bar_on_a_terminal(monkeypatch):
    """With the time left, and no line of a log."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    clock = iter([0.0, 50.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))
    with open(follower, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress("data build", 1000) as progress:
            progress.advance(1000)
        shown = ""
        while "100%" not in shown:
            shown += os.read(leader, 4096).decode()
    os.close(leader)
    assert "data build: 100%|" in shown and "% left" not in shown and "[00:00<00:00" in shown


@pytest.mark.parametrize("steps", [2, 1], ids=["done", "stopped"])
def test_a_bar_stays_only_where_all_steps_are_done(steps, monkeypatch):
    """And no time left stays with it."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with open(follower, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        log = progress.ProgressLog(0, 2, 1, lambda step_s: 7.0)
        log._bar.mininterval = 0  # every step is drawn
        for step in range(1, steps + 1):
            log.step(step, 1.0, 1000, 1e-3, 0.5, seconds=2.0)
        log.close()
        stream.write("\nend")
        stream.flush()
        shown = ""
        while not shown.endswith("end"):
            shown += os.read(leader, 4096).decode()
    os.close(leader)
    *before, last = shown.removesuffix("end").rstrip("\r\n").split("\r")
    assert any("7 s left" in line for line in before)
    assert "left" not in last and ("2/2" in last) == (steps == 2)
    assert bool(last.strip()) == (steps == 2)


@pytest.mark.parametrize(
    ("interval", "done", "last", "count"),
    [(None, 0, 10, 1), (3, 0, 10, 4), (3, 3, 10, 3), (5, 0, 10, 2), (5, 9, 10, 1), (5, 10, 10, 1)],
)
def test_what_is_still_due_is_counted(interval, done, last, count):
    """At each multiple of the interval that is neither done nor the end, and at the end."""
    assert still_due(interval, done, last) == count


def test_patches_that_a_help_text_names_exist():
    from megacpp_mcore.commands.patch import _EPILOG

    known = {patch.id for patch in manifest.load(None).patches}
    assert set(re.findall(r"--only ([\w-]+)", _EPILOG)) <= known
