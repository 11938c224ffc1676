"""apply, revert and status on a fake site-packages, through their public functions."""

import subprocess

import pytest
from fakelane import (
    FILES,
    NEW,
    ONE,
    ONE_B,
    ONE_G,
    PATCHES,
    TWO_A,
    edit,
    make_lane,
    record_line,
    refused,
    snapshot,
    states,
)

from megacpp_mcore.patching import PatchError, manifest, state
from megacpp_mcore.patching.operations import apply, revert
from megacpp_mcore.patching.store import FOLDER

RECORD = "fakepkg-1.0.dist-info/RECORD"
ONE_PATH = "fakepkg/one.py"
BETA_ONLY = edit(ONE, (b"one = 15\n", b"one = 1515\n"))


def test_apply_then_revert_restores_every_byte_and_mode(lane, site):
    (site / ONE_PATH).chmod(0o600)
    before = snapshot(site)
    outcome = apply(lane, site)
    assert {path: (site / path).read_bytes() for path in (*FILES, "fakepkg/new.py")} == {
        "fakepkg/__init__.py": b"",
        ONE_PATH: ONE_G,
        "fakepkg/sub/two.py": TWO_A,
        "fakepkg/new.py": NEW,
    }
    assert snapshot(site)[ONE_PATH][1] == 0o600
    (site / ONE_PATH).chmod(0o644)
    assert outcome.applied == {"fakepkg": ("alpha", "beta", "gamma")}
    assert len(outcome.changed) == 3
    assert set(states(lane, site).values()) == {"applied"}
    assert len(revert(lane, site).changed) == 3
    assert snapshot(site) == before
    assert set(states(lane, site).values()) == {"not applied"}


def test_both_are_idempotent(lane, site):
    revert(lane, site)
    assert not (site / FOLDER).exists()
    apply(lane, site)
    times = {path: path.stat().st_mtime_ns for path in site.rglob("*")}
    assert apply(lane, site).changed == ()
    assert apply(lane, site, ["alpha"]).changed == ()
    assert {path: path.stat().st_mtime_ns for path in site.rglob("*")} == times


def test_record_has_the_new_digests_and_the_new_file(lane, site):
    before = (site / RECORD).read_text()
    apply(lane, site)
    after = (site / RECORD).read_text()
    assert record_line(ONE_PATH, ONE_G) in after
    assert record_line("fakepkg/new.py", NEW) in after
    kept = [line for line in before.splitlines() if ONE_PATH not in line and "two.py" not in line]
    assert kept == [line for line in after.splitlines() if line in kept]


def test_record_of_other_tools_keeps_its_other_rows(lane, site):
    """Rows that someone else adds between apply and revert stay; ours go back."""
    record = site / RECORD
    record.write_bytes(record.read_bytes().replace(b"\n", b"\r\n").rstrip(b"\r\n"))
    before = record.read_bytes()
    apply(lane, site)
    assert record.read_bytes().count(b"\r\n") == record.read_bytes().count(b"\n")
    record.write_bytes(record.read_bytes() + b"\r\nfakepkg/cache.bin,,")
    revert(lane, site)
    assert record.read_bytes() == before + b"\r\nfakepkg/cache.bin,,"


@pytest.mark.parametrize("row", ["fakepkg/one.py,,\n", ""])
def test_an_odd_row_of_record_comes_back_after_two_runs(lane, site, row):
    """A row without a digest, or none: nothing but the ledger remembers it."""
    record = site / RECORD
    record.write_text(record.read_text().replace(record_line(ONE_PATH, ONE), row))
    before = snapshot(site)
    apply(lane, site, ["alpha"])
    apply(lane, site)
    assert record_line(ONE_PATH, ONE_G) in record.read_text()
    revert(lane, site)
    assert snapshot(site) == before


def test_only_some(lane, site):
    before = snapshot(site)
    apply(lane, site, ["beta"])
    assert (site / ONE_PATH).read_bytes() == BETA_ONLY
    assert states(lane, site) == {"alpha": "not applied", "beta": "applied", "gamma": "not applied"}
    refused(apply, "gamma: .* patch 'alpha' .* apply with --only alpha", lane, site, ["gamma"])
    apply(lane, site, ["gamma", "alpha"])
    assert (site / ONE_PATH).read_bytes() == ONE_G
    refused(revert, "gamma: .* patch 'alpha' .* revert both", lane, site, ["alpha"])
    revert(lane, site, ["beta"])
    assert states(lane, site) == {"alpha": "applied", "beta": "not applied", "gamma": "applied"}
    revert(lane, site)
    assert snapshot(site) == before
    refused(apply, "unknown patch 'delta'", lane, site, ["delta"])


@pytest.mark.parametrize("change", ["edit", "delete"])
def test_a_drifted_file_is_named_and_refused(lane, site, change):
    apply(lane, site)
    if change == "edit":
        (site / ONE_PATH).write_bytes(ONE_G + b"# mine\n")
    else:
        (site / ONE_PATH).unlink()
    (row,) = state.status(lane, site)
    assert [patch["files"] for patch in row["patches"]] == [[ONE_PATH]] * 3
    assert set(states(lane, site).values()) == {"drifted"}
    refused(apply, "fakepkg/one.py .*someone else changed it", lane, site)
    refused(revert, "fakepkg/one.py .*someone else changed it", lane, site)
    (site / ONE_PATH).write_bytes(ONE_G)
    revert(lane, site)


def test_drift_elsewhere_does_not_stop_a_named_patch(lane, site):
    (site / "fakepkg/sub/two.py").write_bytes(b"mine\n")
    refused(apply, "two.py", lane, site)
    apply(lane, site, ["beta"])
    assert states(lane, site) == {"alpha": "drifted", "beta": "applied", "gamma": "not applied"}


def test_a_half_applied_patch_can_be_completed_or_taken_off(lane, site):
    before = snapshot(site)
    (site / "fakepkg/sub/two.py").write_bytes(TWO_A)
    assert states(lane, site)["alpha"] == "partially applied"
    refused(apply, "patch 'alpha' is partially applied", lane, site, ["beta"])
    apply(lane, site)
    assert set(states(lane, site).values()) == {"applied"}
    revert(lane, site)
    assert snapshot(site) == before


def test_revert_without_the_store(lane, site):
    """Files patched by hand, or a site copied without dot folders: undone exactly, by digest."""
    before = snapshot(site)
    apply(lane, site)
    subprocess.run(["rm", "-r", str(site / FOLDER)], check=True)
    assert set(states(lane, site).values()) == {"applied"}
    revert(lane, site)
    assert snapshot(site) == before


def test_a_ledger_is_not_believed_without_digests(lane, site):
    apply(lane, site, ["beta"])
    ledger = site / FOLDER / "state.json"
    ledger.write_text(ledger.read_text().replace('"beta"', '"alpha"'))
    assert "applied" not in states(lane, site).values()
    ledger.write_text("{")
    with pytest.raises(PatchError, match=r"state.json: cannot be read .* delete"):
        state.status(lane, site)


def test_damaged_originals_are_noticed(lane, site):
    apply(lane, site)
    for file in (site / FOLDER / "pristine").iterdir():
        file.write_bytes(b"damaged")
    before = snapshot(site)
    revert(lane, site)  # the whole lane can also be undone
    apply(lane, site)
    assert snapshot(site)[ONE_PATH] == before[ONE_PATH]
    revert(lane, site, ["beta"])
    for file in (site / FOLDER / "pristine").iterdir():
        file.write_bytes(b"damaged")
    refused(revert, "one.py", lane, site)


def test_another_release_of_the_lane(lane, site, tmp_path):
    """Its files are recognised, replaced by apply, and taken off by revert."""
    before = snapshot(site)
    apply(lane, site)
    other = {
        "beta": {ONE_PATH: (ONE, edit(ONE, (b"one = 15\n", b"one = 1516\n")))},
        "delta": {"fakepkg/__init__.py": (b"", b"x = 1\n")},
    }
    newer = manifest.load(make_lane(tmp_path / "newer", other))
    (row,) = state.status(newer, site)
    assert states(newer, site)["beta"] == "applied by another release of the lane"
    assert sorted(row["leftovers"]) == ["fakepkg/new.py", "fakepkg/sub/two.py"]
    assert not row["complete"]
    refused(apply, "another release of the lane: name no patch", newer, site, ["beta"])
    apply(newer, site)
    assert states(newer, site) == {"beta": "applied", "delta": "applied"}
    assert not (site / "fakepkg/new.py").exists()
    revert(lane, site)
    assert snapshot(site) == before


def test_what_another_release_patched_and_a_reinstall_brought_back(lane, site, tmp_path):
    """Such a file is in nobody's way, though only the ledger knows it."""
    apply(lane, site)
    newer = manifest.load(make_lane(tmp_path / "newer", {"beta": {ONE_PATH: (ONE, BETA_ONLY)}}))
    (site / "fakepkg/sub/two.py").write_bytes(FILES["fakepkg/sub/two.py"])
    (row,) = state.status(newer, site)
    assert row["leftovers"] == ["fakepkg/new.py"]
    apply(newer, site)
    assert (site / ONE_PATH).read_bytes() == BETA_ONLY
    assert not (site / "fakepkg/new.py").exists()


def test_some_patches_on_an_original_that_is_lost_are_drift(lane, site):
    apply(lane, site, ["beta"])
    for file in (site / FOLDER / "pristine").iterdir():
        file.write_bytes(b"damaged")
    assert states(lane, site)["beta"] == "drifted"


def test_every_patch_alone_after_any_other(lane, site):
    """The state depends on what is chosen, not on the way there."""
    before = snapshot(site)
    for ids in (["beta"], ["alpha"], ["alpha", "gamma"], ["alpha", "beta"], list(PATCHES)):
        apply(lane, site, ids)
        direct = snapshot(site)
        revert(lane, site)
        assert snapshot(site) == before
        for name in ids:
            apply(lane, site, [name])
        now = snapshot(site)
        assert {k: v for k, v in now.items() if FOLDER not in k} == {
            k: v for k, v in direct.items() if FOLDER not in k
        }
        revert(lane, site)
    assert ONE_B != ONE_G
