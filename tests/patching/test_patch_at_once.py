"""Two runs at once, and readers beside a run: waiting, refusing, and never a torn answer."""

import fcntl
import os
import signal
import time

import pytest
from fakelane import content, in_child, is_switch, outcome

from megacpp_mcore.patching import PatchError, state
from megacpp_mcore.patching.operations import apply, revert
from megacpp_mcore.patching.store import FOLDER, Store


def test_two_at_once_the_second_waits(lane, site, sets):
    """Eight runs at once, each sure of its result: no error, and the files are one of the sets."""
    for _ in range(5):
        children = [in_child(lambda n=n: (apply, revert)[n % 2](lane, site)) for n in range(8)]
        assert [outcome(child) for child in children] == [True] * 8
        assert content(site) in sets
    revert(lane, site)
    assert not (site / FOLDER).exists()


def test_a_folder_that_another_run_is_making_is_the_lanes_own(site):
    """A third of the checks failed that looked twice, whether it is a folder and whether it is."""
    store = Store(site)
    pristine = store.path / "pristine"
    store.path.mkdir()

    def make_and_remove():
        while True:
            pristine.mkdir()
            pristine.rmdir()

    child = in_child(make_and_remove)
    try:
        for _ in range(1000):
            store.check()
    finally:
        os.kill(child, signal.SIGKILL)
    assert not outcome(child)


def test_two_at_once_the_second_is_refused_after_its_wait(lane, site):
    reader, writer = os.pipe()

    def step(path):
        if path.endswith("/stage"):
            os.write(writer, b"x")
            time.sleep(60)

    child = in_child(lambda: apply(lane, site), step)
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


def test_a_torn_read_is_not_an_error(lane, site, monkeypatch):
    """Another run works while the state is read without the lock: it is read again with it."""
    read, calls = state.read, []

    def torn(*arguments):
        found = read(*arguments)
        if not calls:
            calls.append("first")  # before the fork: the child reads only
            assert outcome(in_child(lambda: apply(lane, site)))
        return found

    monkeypatch.setattr(state, "read", torn)
    apply(lane, site)
    assert state.status(lane, site)[0]["complete"]


def test_a_lock_whose_file_was_removed_is_no_lock(site, monkeypatch):
    """The last holder removes the folder while we wait in flock: the lock is taken anew."""
    kept, flock, calls = Store(site), fcntl.flock, []

    def late(descriptor, how):
        if not calls:
            calls.append(how)
            (kept.path / "lock").unlink()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with kept.locked(5.0):
        assert f"pid {os.getpid()} on" in Store(site).holder()


def test_status_during_a_run_says_who_works(lane, site):
    reader, writer = os.pipe()

    def step(path):
        if is_switch(site, path):
            os.write(writer, b"x")
            time.sleep(60)

    child = in_child(lambda: apply(lane, site), step)
    os.read(reader, 1)
    assert f"in progress (pid {child} on" in state.status(lane, site)[0]["interrupted"]
    os.kill(child, signal.SIGKILL)
    outcome(child)
    assert "is interrupted" in state.status(lane, site)[0]["interrupted"]
