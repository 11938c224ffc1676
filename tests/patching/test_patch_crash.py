"""Killed at any point, or run twice at once: the state is explained, and the next run finishes."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakelane import (
    FILES,
    ONE_G,
    DiesAt,
    content,
    in_child,
    kill_between_switches,
    make_site,
    outcome,
    snapshot,
    two_sets,
)

from megacpp_mcore.files import write_atomically
from megacpp_mcore.patching import PatchError, manifest, state, transaction
from megacpp_mcore.patching.operations import apply, revert
from megacpp_mcore.patching.store import FOLDER, Store

pytestmark = pytest.mark.slow

_APART = """
import sys
from pathlib import Path
import test_patch_crash as test
from fakelane import two_sets
from megacpp_mcore.patching import manifest

lane, site = manifest.load(Path(sys.argv[1])), Path(sys.argv[2])
getattr(test, sys.argv[3])(lane, site, two_sets(lane, site), *sys.argv[4:])
"""
OPERATIONS = {"apply": apply, "revert": revert}
KILLS = 200


def apart(check, lane, site, *words):
    """check(lane, site, sets, *words) in a Python without torch, whose forks take a millisecond
    where those of the tests' process take 25."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", _APART, str(lane.lane), str(site), check.__name__, *words],
        env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def check_killed(lane, site, sets):
    """After a kill: every file is old or new, and a mixed set is explained."""
    old, new = sets
    now = content(site)
    assert all(now.get(path) in (old.get(path), new.get(path)) for path in {*old, *new, *now})
    (row,) = state.status(lane, site)
    conditions = {patch["state"] for patch in row["patches"]}
    assert conditions <= {"applied", "not applied", "partially applied", "unfinished"}
    if now not in (old, new):
        assert "is interrupted" in row["interrupted"] and not row["complete"]


@pytest.mark.parametrize("second", OPERATIONS)
@pytest.mark.parametrize("first", OPERATIONS)
def test_killed_at_every_step(lane, site, first, second):
    apart(killed_at_every_step, lane, site, first, second)


def killed_at_every_step(lane, site, sets, first, second):
    interrupted = set()
    for number in range(1, 200):
        if first == "revert":
            apply(lane, site)
        ended = outcome(in_child(lambda: OPERATIONS[first](lane, site), DiesAt(number)))
        check_killed(lane, site, sets)
        interrupted.add(state.status(lane, site)[0]["interrupted"] != "")
        OPERATIONS[second](lane, site)
        assert content(site) == sets[second == "apply"]
        revert(lane, site)
        assert content(site) == sets[0] and not (site / FOLDER).exists()
        if ended:
            break
    assert ended and number > 25 and interrupted == {True, False}


def test_killed_at_every_step_of_a_few_patches(lane, site):
    """Bytes of a subset are in no manifest: only the journal and the ledger know them."""
    apart(killed_at_every_step_of_a_few_patches, lane, site)


def killed_at_every_step_of_a_few_patches(lane, site, sets):
    ids = ["alpha", "gamma"]
    old, new = two_sets(lane, site, ids)
    seen = set()
    for number in range(1, 200):
        ended = outcome(in_child(lambda: apply(lane, site, ids), DiesAt(number)))
        check_killed(lane, site, (old, new))
        seen |= {patch["state"] for patch in state.status(lane, site)[0]["patches"]}
        apply(lane, site, ids)
        assert content(site) == new
        revert(lane, site, ids)
        assert content(site) == old and not (site / FOLDER).exists()
        if ended:
            break
    assert ended and "unfinished" in seen


def test_killed_at_random_points(lane, site):
    apart(killed_at_random_points, lane, site)


def killed_at_random_points(lane, site, sets):
    """SIGKILL after a random delay, so also inside a system call; then finished either way.

    The longest delay follows what the machine needs just now: shorter after a run that ended first,
    longer after one that was killed. The run that finishes a killed one is killed as well at times.
    """
    longest, killed = 0.02, 0

    def kill(operation):
        nonlocal longest, killed
        child = in_child(lambda: OPERATIONS[operation](lane, site))
        time.sleep(random.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        ended = outcome(child)
        longest *= 0.8 if ended else 1.1
        killed += not ended
        check_killed(lane, site, sets)

    while killed < KILLS:
        first, second = random.choice([*OPERATIONS]), random.choice([*OPERATIONS])
        (revert if first == "apply" else apply)(lane, site)
        kill(first)
        if random.random() < 0.3:
            kill(second)
        OPERATIONS[second](lane, site)
        assert content(site) == sets[second == "apply"]
    revert(lane, site)
    assert content(site) == sets[0] and not (site / FOLDER).exists()


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
    assert "of which no file was switched" in revert(lane, site).notes[0]
    assert snapshot(site) == before


def test_a_file_changed_before_the_first_switch(lane, site, monkeypatch):
    """Someone else writes a file between the check and the switch: nothing is switched at all."""

    def late(path, content):
        assert path == Store(site).journal
        (site / "fakepkg/sub/two.py").write_bytes(b"mine\n")
        write_atomically(path, content)

    monkeypatch.setattr(transaction, "write_atomically", late)
    before = content(site)
    with pytest.raises(PatchError, match=r"two.py was changed by someone else.* Nothing was"):
        apply(lane, site)
    assert content(site) == {**before, "fakepkg/sub/two.py": (b"mine\n", 0o644)}
    assert not (site / FOLDER).exists()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("switches", [1, 2, 3])
def test_reinstalled_while_a_run_is_interrupted(lane, site, operation, switches):
    """By another installer, whose RECORD is different; a file that a patch creates survives it."""
    if operation == "revert":
        apply(lane, site)
    kill_between_switches(lane, site, OPERATIONS[operation], switches)
    make_site(site)
    record = site / "fakepkg-1.0.dist-info/RECORD"
    record.write_bytes(record.read_bytes() + b"fakepkg-1.0.dist-info/REQUESTED,,\n")
    before = {path: value for path, value in content(site).items() if "new.py" not in path}
    apply(lane, site)
    assert state.status(lane, site)[0]["complete"]
    revert(lane, site)
    assert content(site) == before


@pytest.mark.parametrize("version", [None, "1.1"])
def test_the_package_goes_while_a_run_is_interrupted(lane, site, version):
    kill_between_switches(lane, site)
    for path in (site / "fakepkg", site / "fakepkg-1.0.dist-info"):
        subprocess.run(["rm", "-r", str(path)], check=True)
    if version:  # upstream has taken a part of the lane
        make_site(site, {**FILES, "fakepkg/one.py": ONE_G}, version=version)
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
