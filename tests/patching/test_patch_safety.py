"""What is on the disk is not believed, and a switch that cannot go forward goes back."""

import contextlib
import json
import os
import re
import shutil
from functools import partial

import pytest
from fakelane import (
    ONE_G,
    DiesAt,
    content,
    in_child,
    kill_between_switches,
    outcome,
    refused,
    snapshot,
)

from megacpp_mcore.patching import PatchError, manifest, state, transaction
from megacpp_mcore.patching.operations import apply, revert
from megacpp_mcore.patching.store import FOLDER, Store


@pytest.mark.parametrize("only", [[], ["alpha", "gamma"]], ids=["whole", "some"])
def test_what_a_patch_leaves_is_checked_before_anything_is_written(lane, site, only):
    path = lane.lane / "manifest.toml"
    path.write_text(path.read_text().replace(manifest.sha256(ONE_G), "0" * 64))
    wrong = manifest.load(lane.lane)
    refused(
        apply, "'gamma': files: fakepkg/one.py: sha256_after is 0+, but gamma.p", wrong, site, only
    )
    apply(wrong, site, ["beta"])


def planted(site, **fields):
    """A journal of an interrupted run that would write `b"planted"`."""
    kept = Store(site)
    kept.stage.mkdir(parents=True)
    (kept.stage / "0").write_bytes(b"planted")
    action = {"path": "fakepkg/one.py", "before": "absent", "original": "absent"}
    action |= {"after": manifest.sha256(b"planted"), "package": "fakepkg", "patched": True}
    journal = {"schema": 1, "operation": "apply", "pid": 1, "started": "", "versions": {}}
    journal["versions"] = {"fakepkg": "1.0"}
    journal["actions"] = [{**action, "staged": "0", **fields}]
    kept.journal.write_text(json.dumps(journal))


@pytest.mark.parametrize(
    "fields",
    [
        {"path": "../outside.py"},
        {"path": "{outside}"},
        {"path": "fakepkg/../../outside.py"},
        {"path": "fakepkg//x.py"},
        {"path": f"{FOLDER}/lock"},
        {"path": f"{FOLDER}/lock", "package": "", "patched": False},
        {"path": "../outside.dist-info/RECORD", "patched": False},
        {"path": "fakepkg/x.py", "patched": False},
        {"path": 1},
        {"staged": "../../outside.py"},
        {"after": "../outside.py"},
    ],
    ids=str,
)
def test_a_planted_journal_leads_nowhere(lane, site, fields):
    outside = site.parent / "outside.py"
    (site.parent / "outside.dist-info").mkdir()
    fields = {k: str(outside) if v == "{outside}" else v for k, v in fields.items()}
    planted(site, **fields)
    before = snapshot(site.parent)
    for operation in (apply, revert):
        with pytest.raises(PatchError, match=r"journal.json: cannot be read .*then delete"):
            operation(lane, site)
    after = snapshot(site.parent)
    assert {**after, f"site/{FOLDER}/lock": 0} == {**before, f"site/{FOLDER}/lock": 0}


def test_a_journal_behind_a_link_out_of_the_site_is_refused(lane, site):
    (site.parent / "outside").mkdir()
    (site / "fakepkg/linked").symlink_to(site.parent / "outside")
    planted(site, path="fakepkg/linked/x.py")
    with pytest.raises(PatchError, match=r"x.py is a link to .*outside/x.py"):
        apply(lane, site)
    assert not any((site.parent / "outside").iterdir())


@pytest.mark.parametrize("name", ["", "pristine", "stage", "lock", "state.json", "journal.json"])
@pytest.mark.parametrize("kind", ["link to a folder", "link to a file", "FIFO"])
@pytest.mark.parametrize("applied", [False, True])
def test_what_stands_for_the_lanes_own_files_leads_nowhere(lane, site, name, kind, applied):
    """A link would have files elsewhere truncated or deleted, a FIFO would be waited for."""
    outside = site.parent / "outside"
    outside.mkdir()
    (outside / "mine.tmp").write_text("mine")
    if applied:
        apply(lane, site)
    planted = site / FOLDER / name
    planted.parent.mkdir(exist_ok=True)
    if planted.is_dir():
        shutil.rmtree(planted)
    planted.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(planted)
    else:
        planted.symlink_to(outside if kind == "link to a folder" else outside / "mine.tmp")
    for function in (apply, revert):
        refused(
            function, rf"{FOLDER}/?{name} is no (folder|regular file), .* delete it", lane, site
        )
    assert [(path.name, path.read_text()) for path in outside.iterdir()] == [("mine.tmp", "mine")]


def test_a_planted_ledger_leads_nowhere(lane, site):
    outside = site.parent / "outside.py"
    outside.write_bytes(b"mine")
    apply(lane, site)
    ledger = site / FOLDER / "state.json"
    table = json.loads(ledger.read_text())
    file = {"before": "absent", "after": manifest.sha256(b"mine"), "mode": 420}
    table["packages"]["fakepkg"]["files"][str(outside)] = file
    ledger.write_text(json.dumps(table))
    with pytest.raises(PatchError, match=r"state.json: cannot be read .*then delete"):
        revert(lane, site)
    assert outside.read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["state.json", "journal.json"])
@pytest.mark.parametrize("patches", [None, 1, "beta", [[]], {}], ids=repr)
def test_a_part_of_another_type_is_refused(lane, site, name, patches):
    """A ledger's list of ids, a journal's actions."""
    damage = partial(
        re.sub, r'(?s)("patches"|"actions"): \[.*?\n? *\]', rf"\1: {json.dumps(patches)}"
    )
    broken_store(lane, site, name)
    path = site / FOLDER / name
    path.write_text(damage(path.read_text()))
    for function in (apply, revert):
        with pytest.raises(PatchError, match=rf"{name}: cannot be read .*then delete"):
            function(lane, site)


@pytest.mark.parametrize("name", ["state.json", "journal.json"])
def test_a_table_without_its_keys_is_refused(lane, site, name):
    broken_store(lane, site, name)
    (site / FOLDER / name).write_text('{"schema": 1}')
    with pytest.raises(PatchError, match=rf"{name}: cannot be read .*then delete"):
        state.status(lane, site)


@pytest.mark.parametrize("name", ["state.json", "journal.json"])
def test_any_part_replaced_by_anything_is_an_answer_or_a_refusal(lane, site, name, tmp_path):
    """What was written by hand, or by a program gone wrong, ends no command with a traceback."""
    broken_store(lane, site, name)
    kept = shutil.copytree(site, tmp_path / "kept")
    table = json.loads((site / FOLDER / name).read_text())
    for changed in {json.dumps(each) for other in OTHERS for each in replaced(table, other)}:
        for function in (apply, revert):
            shutil.rmtree(site)
            shutil.copytree(kept, site)
            (site / FOLDER / name).write_text(changed)
            for each in (state.status, function):
                with contextlib.suppress(PatchError):
                    each(lane, site)


OTHERS = [None, True, -1, "x", [], [[]], {}]


def broken_store(lane, site, name):
    """A site with a ledger, or with the journal of an interrupted run."""
    if name == "state.json":
        apply(lane, site, ["alpha", "gamma"])
    else:
        kill_between_switches(lane, site)


def replaced(value, other):
    """`value` with one of its parts replaced by `other`, or a key left out, for each of them."""
    yield other
    keys = range(len(value)) if isinstance(value, list) else value if type(value) is dict else ()
    for key in keys:
        if type(value) is dict:
            yield {each: part for each, part in value.items() if each != key}
        for part in replaced(value[key], other):
            changed = value.copy()
            changed[key] = part
            yield changed


@pytest.fixture
def immutable(monkeypatch):
    """Makes replacing two.py fail, as for a file with the immutable flag."""
    real = os.replace

    def replace(source, target):
        if str(target).endswith("sub/two.py"):
            raise PermissionError(1, "Operation not permitted")
        real(source, target)

    monkeypatch.setattr(transaction.os, "replace", replace)


def test_a_switch_that_cannot_go_forward_goes_back(lane, site, immutable):
    before = content(site)
    with pytest.raises(PatchError, match=r"undid the apply .*not permitted. Nothing was") as caught:
        apply(lane, site)
    assert caught.value.exit_status == 2
    assert content(site) == before and not (site / FOLDER).exists()


@pytest.mark.parametrize("first", [apply, revert], ids=["apply", "revert"])
def test_an_interrupted_switch_that_cannot_go_forward_goes_back(lane, site, sets, first, request):
    """Files of a kill between two switches: the next run undoes them before it does its own."""
    if first is revert:
        apply(lane, site)
    kill_between_switches(lane, site, first)
    request.getfixturevalue("immutable")
    second = revert if first is apply else apply
    said = second(lane, site)
    assert f"undid the {first.args[0]} that pid" in said.notes[0] and not said.changed
    assert content(site) == sets[first is revert]


def test_any_error_that_comes_twice_undoes_the_run(lane, site, sets, monkeypatch):
    kill_between_switches(lane, site)
    real = os.replace

    def replace(source, target):
        if "stage" in str(source) and str(target).endswith("sub/two.py"):
            raise OSError(5, "Input/output error")
        real(source, target)

    monkeypatch.setattr(transaction.os, "replace", replace)
    assert "undid the apply" in revert(lane, site).notes[0]
    assert content(site) == sets[0] and not (site / FOLDER).exists()


def test_damaged_new_files_are_undone_too(lane, site, sets):
    kill_between_switches(lane, site)
    for path in Store(site).stage.glob("?"):
        path.write_bytes(b"damaged")
    assert "is missing or damaged" in revert(lane, site).notes[0]
    assert content(site) == sets[0]


def test_killed_at_every_step_of_going_back(lane, site, sets, immutable):
    for number in range(1, 200):
        ended = outcome(in_child(lambda: undone(lane, site), DiesAt(number)))
        now = content(site)
        assert all(now[path] in (sets[0].get(path), sets[1].get(path)) for path in now)
        revert(lane, site)
        assert content(site) == sets[0] and not (site / FOLDER).exists()
        if ended:
            break
    assert ended and number > 25 and not state.status(lane, site)[0]["interrupted"]


def undone(lane, site):
    with pytest.raises(PatchError, match="undid the apply"):
        apply(lane, site)
