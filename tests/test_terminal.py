"""What a person at a terminal sees of every command: one line where it is refused, soon; no escape
sequence of a name; no bar where there is no room for one."""

import ctypes
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from megacpp_mcore import cli, terminal
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
