"""Killed at any point, or run twice at once: the state is explained, and the next run finishes."""

import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
import traceback
from pathlib import Path

import pytest
from fakelane import FILES, make_site, snapshot

from megacpp_mcore.patching import PatchError, manifest, state, transaction
from megacpp_mcore.patching.operations import apply, revert
from megacpp_mcore.patching.store import FOLDER, Store

OPERATIONS = {"apply": apply, "revert": revert}
KILLS = 200


def in_child(function):
    """Start `function` in a forked child; returns its pid."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def outcome(child):
    """True when the child ended well, False when it was killed."""
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def content(site):
    """The package's own files: what imports see."""
    found = snapshot(site)
    return {path: value for path, value in found.items() if not path.startswith(FOLDER)}


@pytest.fixture
def site(tmp_path):
    """In memory where that is possible: a kill is the same there, and syncing costs nothing."""
    with contextlib.ExitStack() as stack:
        if os.access("/dev/shm", os.W_OK):
            tmp_path = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        yield make_site(tmp_path / "site")


@pytest.fixture
def sets(lane, site):
    """(files without the lane, files with it); the site is left without it."""
    old = content(site)
    apply(lane, site)
    new = content(site)
    revert(lane, site)
    assert content(site) == old != new
    return old, new


def check_killed(lane, site, sets):
    """After a kill: every file is old or new, and a mixed set is explained."""
    old, new = sets
    now = content(site)
    assert all(now.get(path) in (old.get(path), new.get(path)) for path in {*old, *new, *now})
    (row,) = state.status(lane, site)
    conditions = {patch["state"] for patch in row["patches"]}
    assert conditions <= {"applied", "not applied", "partially applied"}
    if now not in (old, new):
        assert "is interrupted" in row["interrupted"] and not row["complete"]


class DiesAt:
    """A Step that kills its process at the n-th step."""

    def __init__(self, number):
        self.left = number

    def __call__(self, name):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("second", OPERATIONS)
@pytest.mark.parametrize("first", OPERATIONS)
def test_killed_at_every_step(lane, site, sets, first, second):
    interrupted = set()
    for number in range(1, 100):
        if first == "revert":
            apply(lane, site)
        ended = outcome(in_child(lambda n=number: OPERATIONS[first](lane, site, step=DiesAt(n))))
        check_killed(lane, site, sets)
        interrupted.add(state.status(lane, site)[0]["interrupted"] != "")
        OPERATIONS[second](lane, site)
        assert content(site) == sets[second == "apply"]
        revert(lane, site)
        assert content(site) == sets[0] and not (site / FOLDER).exists()
        if ended:
            break
    assert number > 8 and interrupted == {True, False}


def test_killed_at_random_points(lane, site, sets):
    """SIGKILL after a random delay, so also inside a system call; then finished either way."""
    started = time.perf_counter()
    assert outcome(in_child(lambda: apply(lane, site)))
    whole = time.perf_counter() - started
    revert(lane, site)
    killed = 0
    for number in range(KILLS):
        first, second = random.choice([*OPERATIONS]), random.choice([*OPERATIONS])
        (revert if first == "apply" else apply)(lane, site)
        child = in_child(lambda operation=first: OPERATIONS[operation](lane, site))
        time.sleep(random.uniform(0, whole))
        os.kill(child, signal.SIGKILL)
        killed += not outcome(child)
        check_killed(lane, site, sets)
        if number % 3 == 0:  # the run that finishes is killed as well
            child = in_child(lambda operation=second: OPERATIONS[operation](lane, site))
            time.sleep(random.uniform(0, whole))
            os.kill(child, signal.SIGKILL)
            outcome(child)
            check_killed(lane, site, sets)
        OPERATIONS[second](lane, site)
        assert content(site) == sets[second == "apply"]
    assert killed > KILLS // 3, "the delays do not hit the runs"
    revert(lane, site)
    assert content(site) == sets[0] and not (site / FOLDER).exists()


def kill_between_switches(lane, site, operation=apply):
    """Leave a run broken off after one of its files was switched."""

    def step(name):
        if name.startswith("switch"):
            step.seen += 1
            if step.seen == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    step.seen = 0
    assert not outcome(in_child(lambda: operation(lane, site, step=step)))


def test_an_interrupted_run_is_explained_and_stops_applied(lane, site, monkeypatch):
    from megacpp_mcore import patching

    kill_between_switches(lane, site)
    (row,) = state.status(lane, site)
    assert "apply of " in row["interrupted"] and "1 of 4 files switched" in row["interrupted"]
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(manifest, "shipped_lane", lambda: lane.lane)
    patching.applied.cache_clear()
    with pytest.raises(PatchError, match="is interrupted"):
        patching.applied("fakepkg")
    outcome_ = apply(lane, site)
    assert "finished the apply that pid" in outcome_.notes[0]
    assert patching.applied("fakepkg") == {"alpha", "beta", "gamma"}
    patching.applied.cache_clear()


def test_someone_changes_a_file_of_an_interrupted_run(lane, site):
    before = snapshot(site)
    kill_between_switches(lane, site)
    (site / "fakepkg/sub/two.py").write_bytes(b"mine\n")
    with pytest.raises(PatchError, match=r"two.py was changed by someone else since. Reinstall"):
        revert(lane, site)
    make_site(site)  # reinstalled
    assert revert(lane, site).notes[0].endswith("the package was reinstalled or removed since")
    assert snapshot(site) == before


@pytest.mark.parametrize("version", [None, "1.1"])
def test_the_package_goes_while_a_run_is_interrupted(lane, site, version):
    kill_between_switches(lane, site)
    for path in (site / "fakepkg", site / "fakepkg-1.0.dist-info"):
        subprocess.run(["rm", "-r", str(path)], check=True)
    if version:
        make_site(site, version=version)
    (row,) = state.status(lane, site)
    assert "is interrupted" in row["interrupted"]
    with pytest.raises(PatchError, match=r"dropped the apply .* is(not )?.* installed"):
        apply(lane, site)
    assert not (site / FOLDER).exists()
    assert {path for path in FILES if (site / path).exists()} == (set(FILES) if version else set())


def test_a_damaged_stage_is_not_used(lane, site):
    kill_between_switches(lane, site)
    for path in Store(site).stage.iterdir():
        path.write_bytes(b"damaged")
    before = content(site)
    with pytest.raises(PatchError, match=r"copy of .* is missing or damaged. Reinstall"):
        apply(lane, site)
    assert content(site) == before
    make_site(site)
    apply(lane, site)
    assert state.status(lane, site)[0]["complete"]


def test_two_at_once_the_second_waits(lane, site, sets):
    """Eight runs at once, each sure of its result: no error, and the files are one of the sets."""
    for _ in range(5):
        children = [in_child(lambda n=n: (apply, revert)[n % 2](lane, site)) for n in range(8)]
        assert [outcome(child) for child in children] == [True] * 8
        assert content(site) in sets
    revert(lane, site)
    assert not (site / FOLDER).exists()


def test_two_at_once_the_second_is_refused_after_its_wait(lane, site):
    reader, writer = os.pipe()

    def step(name):
        os.write(writer, b"x")
        time.sleep(60)

    child = in_child(lambda: apply(lane, site, step=step))
    os.read(reader, 1)
    started = time.monotonic()
    with pytest.raises(PatchError, match=rf"another `megacpp patch` .*pid {child} on .*0.1 s"):
        apply(lane, site, wait=0.1)
    assert time.monotonic() - started < 5
    (row,) = state.status(lane, site)
    assert {patch["state"] for patch in row["patches"]} == {"not applied"}
    os.kill(child, signal.SIGKILL)
    outcome(child)
    apply(lane, site)


def test_status_during_a_run_says_who_works(lane, site):
    reader, writer = os.pipe()

    def step(name):
        if name.startswith("switch"):
            os.write(writer, b"x")
            time.sleep(60)

    child = in_child(lambda: apply(lane, site, step=step))
    os.read(reader, 1)
    assert f"in progress (pid {child} on" in state.status(lane, site)[0]["interrupted"]
    os.kill(child, signal.SIGKILL)
    outcome(child)
    assert "is interrupted" in state.status(lane, site)[0]["interrupted"]


def test_the_disk_fails_while_switching(lane, site, monkeypatch):
    """An error of the system leaves the journal: status says so, and the next run finishes."""
    replace, seen = os.replace, []

    def fails(source, target):
        if "stage" in str(source):
            seen.append(target)
            if len(seen) == 2:
                raise OSError(5, "Input/output error")
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(transaction.os, "replace", fails)
        with pytest.raises(PatchError, match=r"was interrupted: .*Input/output error") as caught:
            apply(lane, site)
    assert caught.value.exit_status == 1
    assert "is interrupted" in state.status(lane, site)[0]["interrupted"]
    apply(lane, site)
    assert state.status(lane, site)[0]["complete"]
