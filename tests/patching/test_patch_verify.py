"""verify and new: a patch is proved by its reproducing test, or not made."""

import re
from pathlib import Path

import pytest
from fakelane import CHECKS, ONE, edit, make_site, snapshot

from megacpp_mcore.patching import PatchError, manifest, new, verify
from megacpp_mcore.patching.operations import apply


@pytest.mark.parametrize("patched", [False, True])
def test_verify_runs_each_test_without_and_with_the_lane(proving_lane, site, patched):
    if patched:
        apply(proving_lane, site)
    before = snapshot(site)
    proofs = list(verify.verify(proving_lane, site))
    assert [(proof.patch, proof.verdict) for proof in proofs] == [
        ("alpha", "proved"), ("beta", "proved"), ("gamma", "proved"),
    ]  # fmt: skip
    assert [(p.pristine.status, p.patched.status) for p in proofs] == [(1, 0)] * 3
    assert [(p.pristine.saw, p.patched.saw) for p in proofs] == [("has it not", "has it")] * 3
    assert snapshot(site) == before
    (proof,) = verify.verify(proving_lane, site, ["beta"])
    assert proof.patch == "beta"


def judged(lane, site, script, needs="cpu", timeout=60.0):
    (lane.lane / "reproducers/beta.py").write_text(script)
    path = lane.lane / "manifest.toml"
    path.write_text(path.read_text().replace('needs = "cpu"', f'needs = "{needs}"'))
    (proof,) = verify.verify(manifest.load(lane.lane), site, ["beta"], timeout)
    return proof.verdict, proof.reason


@pytest.mark.parametrize(
    ("script", "needs", "verdict", "reason"),
    [
        ("import sys; sys.exit(0)", "cpu", "failed", "without the patch: right behaviour"),
        ("import sys; sys.exit(1)", "cpu", "failed", "with it: defect shown"),
        ("import fakepkg.one as o; assert '1515' in open(o.__file__).read()", "cpu", "failed",
         r"without the patch: broken \(an uncaught exception"),
        ("raise SystemExit(3)", "cpu", "failed", r"without the patch: broken \(exit 3\)"),
        ("import os; os.kill(os.getpid(), 9)", "cpu", "failed", r"broken \(exit -9\)"),
        ("import sys; print('no GPU'); sys.exit(77)", "gpu", "not run here", "no GPU"),
        ("raise SystemExit(78)", "gpu", "failed", "without the patch: inapplicable"),
        ("import sys; sys.exit(77)", "cpu", "failed", "although the manifest says needs = 'cpu'"),
        ("import sys, fakepkg.one as o; t = open(o.__file__).read(); sys.exit(77 * ('33' in t))",
         "gpu", "failed", "with it: cannot run here"),
        ("import time; time.sleep(60)", "cpu", "failed", r"broken \(timed out\)"),
    ],
)  # fmt: skip
def test_verdicts(lane, site, script, needs, verdict, reason):
    got, why = judged(lane, site, script, needs, timeout=1.0 if "sleep" in script else 60.0)
    assert got == verdict
    assert re.search(reason, why), why


def test_a_timed_out_reproducer_leaves_no_process(lane, site, tmp_path):
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    judged(lane, site, script, timeout=2.0)
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_verify_refuses_what_it_cannot_use(lane, site):
    (site / "fakepkg/one.py").write_bytes(b"mine\n")
    with pytest.raises(PatchError, match=r"one.py was changed outside this lane"):
        verify.verify(lane, site)
    make_site(site, version="2")
    with pytest.raises(PatchError, match="records it 2 times"):
        verify.verify(lane, site)


def draft(name="delta", **fields):
    given = {"id": name, "reason": "why delta\n\nMore.", "drop_when": "never", "needs": "cpu"}
    return given | {"upstream": {"state": "not-reported"}} | fields


@pytest.fixture
def edited(tmp_path, proving_lane, site):
    """A folder with one edited file, a created one and one that is as installed."""
    apply(proving_lane, site)
    folder = tmp_path / "edited"
    (folder / "fakepkg/sub").mkdir(parents=True)
    (folder / "fakepkg/sub/three.py").write_bytes(b"three = 3")
    (folder / "fakepkg/__init__.py").write_bytes(b"")
    text = edit((site / "fakepkg/one.py").read_bytes(), (b"one = 19\n", b"one = 1919\n"))
    (folder / "fakepkg/one.py").write_bytes(text)
    (tmp_path / "test_it.py").write_text(CHECKS.format(text="one = 1919\n"))
    return folder


def test_new_writes_a_patch_that_works(proving_lane, site, edited, tmp_path):
    given = draft(defect=3)
    written, proof = new.new(proving_lane.lane, given, edited, tmp_path / "test_it.py", site)
    assert [path.name for path in written] == ["delta.patch", "delta.py", "manifest.toml"]
    assert proof.verdict == "proved"
    lane = manifest.load(proving_lane.lane)
    delta = lane.patches[-1]
    assert (delta.reason, delta.defect) == ("why delta\n\nMore.", 3)
    assert 'reason = """why delta\n\nMore."""' in (lane.lane / "manifest.toml").read_text()
    assert sorted(delta.diffs) == ["fakepkg/one.py", "fakepkg/sub/three.py"]
    assert delta.text.startswith(b"why delta\n\nMore.\n\ndiff --git a/fakepkg/one.py")
    apply(lane, site)
    for path in delta.diffs:
        assert (site / path).read_bytes() == (edited / path).read_bytes()


def test_new_keeps_the_manifest_as_it_was_written(proving_lane, site, edited, tmp_path):
    path = proving_lane.lane / "manifest.toml"
    before = path.read_text().replace("schema = 1", "# a comment\nschema   =   1")
    path.write_text(before)
    new.new(proving_lane.lane, draft(), edited, tmp_path / "test_it.py", site)
    assert path.read_text().startswith(before.rstrip("\n"))


def test_new_refuses(proving_lane, site, edited, tmp_path):
    lane, test = proving_lane.lane, tmp_path / "test_it.py"
    before = snapshot(lane)

    def refused(message, *, a_draft=draft(), folder=edited, script=test):  # noqa: B008
        with pytest.raises(PatchError, match=message):
            new.new(lane, a_draft, folder, script, site)
        assert snapshot(lane) == before

    refused("a patch needs a test", script=tmp_path / "none.py")
    refused("has a patch 'alpha' already", a_draft=draft("alpha"))
    refused("'../up': a patch's id", a_draft=draft("../up"))
    refused("is not a folder", folder=tmp_path / "none")
    refused("upstream: link: is missing", a_draft=draft(upstream={"state": "open"}))
    always = tmp_path / "always.py"
    always.write_text("import sys\nprint('always fine')\nsys.exit(0)\n")
    refused(
        "does not prove the patch: without the patch: right behaviour.*always fine", script=always
    )
    skipped = tmp_path / "skipped.py"
    skipped.write_text("import sys\nprint('no GPU')\nsys.exit(77)\n")
    refused("does not prove the patch: .*needs = 'cpu'", script=skipped)
    (edited / "fakepkg/data.bin").write_bytes(b"\0\1")
    refused("data.bin: is not a text file")
    (edited / "fakepkg/data.bin").unlink()
    (site / "fakepkg/__init__.py").write_bytes(b"edited_in_place = 1\n")
    refused("__init__.py is not the file that fakepkg's RECORD lists")
    make_site(site)
    refused("does not have the whole lane")
    same = tmp_path / "same"
    (same / "fakepkg").mkdir(parents=True)
    (same / "fakepkg/one.py").write_bytes(ONE)
    refused("no file in it differs", folder=same)
    (same / "elsewhere").mkdir()
    (same / "elsewhere/x.py").write_bytes(b"")
    refused("no installed package of the lane", folder=same)
