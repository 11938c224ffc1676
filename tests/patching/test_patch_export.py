"""export, with the real `git am`, and port."""

import re
import subprocess

import pytest
from fakelane import FILES, ONE, ONE_A, TWO, edit, make_lane, make_site, snapshot

from megacpp_mcore.patching import PatchError, export, manifest, port, state, verify
from megacpp_mcore.patching.operations import apply


def git(folder, *arguments, data=None):
    run = subprocess.run(
        ["git", "-c", "user.name=T", "-c", "user.email=t@example.org", *arguments],
        cwd=folder, input=data, capture_output=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr.decode()
    return run.stdout.decode()


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "upstream"
    make_site(folder)
    git(folder, "init", "-q")
    git(folder, "-c", "core.autocrlf=false", "add", "fakepkg")
    git(folder, "commit", "-q", "-m", "release")
    return folder


AUTHOR = "Jörg Doe <joerg@example.org>"


@pytest.mark.parametrize("applied_first", [False, True])
def test_git_am_takes_an_exported_patch(lane, site, repository, applied_first):
    if applied_first:
        apply(lane, site)
    (lane.lane / "reproducers/_help.py").write_text("help_ = 1\n")
    (lane.lane / "reproducers/beta.py").write_text("# ---\nimport _help\ndiff = 'ü'\nFrom = 1\n")
    git(repository, "am", data=export.export(lane, "beta", site, AUTHOR))
    expected = edit(ONE, (b"one = 15\n", b"one = 1515\n"))  # alpha is no part of it
    assert (repository / "fakepkg/one.py").read_bytes() == expected
    message = git(repository, "log", "-1", "--format=%an <%ae>%n%B")
    assert message.startswith(f"{AUTHOR}\nWhy beta.\n\nwhy beta\n\nAgainst fakepkg 1.0.\n")
    assert "beta.py:\n\n    # ---\n    import _help\n    diff = 'ü'\n    From = 1\n" in message
    assert "\n_help.py:\n\n    help_ = 1\n" in message
    assert git(repository, "status", "--porcelain", "fakepkg") == ""


def test_git_am_takes_a_series(lane, site, repository):
    """gamma builds on alpha; alpha changes a file with carriage returns."""
    mail = export.export(lane, "gamma", site, AUTHOR)
    assert b"Apply first: alpha." in mail
    alpha = export.export(lane, "alpha", site, AUTHOR)
    assert b"git am --keep-cr" in alpha
    git(repository, "-c", "core.autocrlf=false", "am", "--keep-cr", data=alpha)
    git(repository, "-c", "core.autocrlf=false", "am", "--keep-cr", data=mail)
    apply(lane, site, ["alpha", "gamma"])
    for path in ("fakepkg/one.py", "fakepkg/sub/two.py", "fakepkg/new.py"):
        assert (repository / path).read_bytes() == (site / path).read_bytes()


def test_prose_that_git_would_misread(lane, repository):
    path = lane.lane / "alpha.patch"
    reason = b"Why alpha.\n\n--- is no separator\ndiff is a word\nFrom here on\nSubject: x\n\n"
    path.write_bytes(reason + path.read_bytes().split(b"\n\n", 1)[1])
    mail = export.export(manifest.load(lane.lane), "alpha", None, AUTHOR)
    git(repository, "-c", "core.autocrlf=false", "am", "--keep-cr", data=mail)
    message = git(repository, "log", "-1", "--format=%B")
    for line in reason.decode().split("\n\n", 1)[1].splitlines():
        assert line in message
    assert (repository / "fakepkg/one.py").read_bytes() == ONE_A


def test_export_refuses(lane, tmp_path):
    with pytest.raises(PatchError, match="author 'nobody' is not of the form"):
        export.export(lane, "alpha", None, "nobody")
    with pytest.raises(PatchError, match=r"'beta' shares a file .* fakepkg is not installed"):
        export.export(lane, "beta", tmp_path, AUTHOR)
    with pytest.raises(PatchError, match="unknown patch"):
        export.export(lane, "delta", None, AUTHOR)


def test_a_name_with_a_line_break_makes_no_header(lane):
    with pytest.raises(PatchError, match=r"is not of the form"):
        export.export(lane, "alpha", None, '"A\nBcc: b@example.org" <a@example.org>')


@pytest.mark.parametrize("text", [b"def (:\n", b"# \xff\n", b"\0"])
def test_a_reproducer_that_is_no_python(lane, text):
    (lane.lane / "reproducers/alpha.py").write_bytes(text)
    with pytest.raises(PatchError, match=r"alpha.py: cannot be read as Python: "):
        export.export(lane, "alpha", None, AUTHOR)


@pytest.mark.parametrize("patch", [patch.id for patch in manifest.load().patches])
def test_git_am_takes_each_patch_of_our_lane(patch, tmp_path):
    """On the original files of the installed wheel, after the patches that its message names."""
    lane = manifest.load()
    (chosen,) = lane.select([patch])
    found = state.read(lane, chosen.package)
    if found.installed is None:
        pytest.skip(f"{chosen.package} is not installed")
    for path in found.files:
        data = found.original(path)
        if data is not None:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_bytes(data)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "release")

    def am(name):
        mail = export.export(lane, name, None, AUTHOR)
        needs = re.search(rb"^Apply first: (.*)\.$", mail, re.MULTILINE)
        for first in needs[1].decode().split(", ") if needs else ():
            am(first)
        git(tmp_path, "am", data=mail)

    am(patch)
    assert git(tmp_path, "status", "--porcelain") == ""
    changed = git(tmp_path, "show", "--name-only", "--format=", "HEAD").split()
    assert sorted(changed) == sorted(file.path for file in chosen.files)


NOT_MERGED = "not merged: fakepkg 1.0 is not installed"


def ported(lane, tmp_path, files, version="1.1", **how):
    """patch -> (result, details) on a package with the changed `files`; by default, of the lines
    alone: the pinned version is not there to merge from, and no reproducer runs."""
    site = make_site(tmp_path / "next", {**FILES, **files}, version=version)
    before = snapshot(site)
    reports = port.port(lane, version, site, **how)
    assert snapshot(site) == before
    return {report.patch: (report.result, report.details) for report in reports}


def test_port_as_is(lane, tmp_path):
    assert set(ported(lane, tmp_path, {}).values()) == {("applies as is", ())}


def test_port_moved(lane, tmp_path):
    found = ported(lane, tmp_path, {"fakepkg/one.py": b"new\n" * 4 + ONE})
    assert found["alpha"] == ("applies, moved", ("fakepkg/one.py: hunk 1: from line 1 to 5",))
    assert found["beta"] == ("applies, moved", ("fakepkg/one.py: hunk 1: from line 14 to 18",))
    assert found["gamma"][0] == "applies, moved"


def test_port_already_upstream(lane, tmp_path):
    upstream = edit(ONE, (b"one = 15\n", b"one = 1515\n"))
    found = ported(lane, tmp_path, {"fakepkg/one.py": b"new\n" + upstream})
    assert [result for result, _ in found.values()] == [
        "applies, moved", "already upstream", "applies, moved",
    ]  # fmt: skip


def test_port_of_what_is_said_to_be_merged(lane, tmp_path):
    """A patch that still applies is not there, whatever the manifest says of upstream."""
    file = lane.lane / "manifest.toml"
    merged = 'upstream = {state = "merged", link = "https://example.org/1", merged_in = "1.1"}'
    text = file.read_text().replace('upstream = { state = "not-reported" }', merged, 1)
    file.write_text(text)
    (lane.lane / "reproducers/alpha.py").write_text("print('wrong'); raise SystemExit(1)\n")
    found = ported(manifest.load(lane.lane), tmp_path, {}, timeout=60.0)
    said = "said to be merged, and still applies: https://example.org/1 (1.1)"
    assert found["alpha"] == ("applies as is", (said, "without the patch: defect shown: wrong"))
    assert found["beta"] == ("applies as is", ())


def test_port_lines_added_at_the_end_of_a_file(tmp_path):
    """The lines before the change are still there when upstream has it: it must not go on twice."""
    after = ONE + b"more = 1\n"
    lane = manifest.load(make_lane(tmp_path / "l2", {"tail": {"fakepkg/one.py": (ONE, after)}}))
    assert ported(lane, tmp_path, {"fakepkg/one.py": after})["tail"][0] == "already upstream"
    assert ported(lane, tmp_path, {"fakepkg/one.py": ONE})["tail"][0] == "applies as is"


def test_port_is_not_misled_by_repeated_code(tmp_path):
    """Upstream has the change: the lines before it are now found once, at the wrong place."""
    call = b"build(\n    config,\n    layer,\n    group,\n    name,\n    more,\n)\n"
    before = b"if moe:\n" + call
    after = before.replace(b"    group,\n", b"    group,\n    is_mtp,\n")
    patches = {"flag": {"fakepkg/one.py": (b"top\n" + before, b"top\n" + after)}}
    lane = manifest.load(make_lane(tmp_path / "l3", patches))
    upstream = b"top\nif mlp:\n" + call + after
    files = {"fakepkg/one.py": b"x\n" + upstream}
    result, (detail, why) = ported(lane, tmp_path, files)["flag"]
    assert (result, why) == ("conflicts", NOT_MERGED)
    assert "ambiguous: its lines before the change stand at 5, those after it at 13" in detail
    pinned = make_site(tmp_path / "pinned", {"fakepkg/one.py": b"top\n" + before})
    assert ported(lane, tmp_path, files, base=pinned)["flag"] == (
        "already upstream", ("a three-way merge with it changes nothing",),
    )  # fmt: skip


def test_port_conflicts(lane, site, tmp_path):
    changed = edit(ONE, (b"one = 2\n", b"one = 22\n"), (b"one = 16\n", b"two = 16\n"))
    found = ported(lane, tmp_path, {"fakepkg/one.py": b"new\n" + changed}, base=site)
    result, (detail,) = found["alpha"]
    assert result == "conflicts"
    assert detail == (
        "fakepkg/one.py: hunk 1, line 4: expected 'one = 2\\n', found 'one = 22\\n' "
        "(made for line 1)"
    )
    assert "line 18: expected 'one = 16" in found["beta"][1][0]
    assert found["gamma"][0] == "conflicts"


def test_port_partly_upstream_is_a_conflict(lane, tmp_path):
    found = ported(lane, tmp_path, {"fakepkg/one.py": ONE_A, "fakepkg/sub/two.py": TWO})
    assert found["alpha"] == ("conflicts", ("part of the patch is already there", NOT_MERGED))


def test_port_other_conflicts(tmp_path):
    twice = b"".join(b"%d\n" % n for n in range(9))
    patches = {
        "twice": {"fakepkg/one.py": (twice, twice.replace(b"4", b"44"))},
        "makes": {"fakepkg/new.py": (None, b"mine\n")},
        "gone": {"fakepkg/gone.py": (b"a\n", b"b\n")},
    }
    lane = manifest.load(make_lane(tmp_path / "lane2", patches))
    files = {"fakepkg/one.py": b"x\n" + twice + twice, "fakepkg/new.py": b"theirs\n"}
    found = ported(lane, tmp_path, files)
    assert {result for result, _ in found.values()} == {"conflicts"}
    assert found["twice"][1] == (
        "fakepkg/one.py: hunk 1: its lines stand more than once: at 3, 12", NOT_MERGED,
    )  # fmt: skip
    assert "exists already" in found["makes"][1][0]
    assert "is not in this version" in found["gone"][1][0]


NEAR = edit(ONE, (b"one = 0\n", b"zero = 0\n"), (b"one = 7\n", b"seven = 7\n"))


def test_port_merges_from_the_pinned_version(lane, site, tmp_path):
    """alpha's lines of context have changed, and so its hunk does not apply; its change does."""
    found = ported(lane, tmp_path, {"fakepkg/one.py": NEAR, "fakepkg/sub/two.py": TWO}, base=site)
    assert found["alpha"][0] == "applies, merged"
    assert "line 1: expected 'one = 0\\n', found 'zero = 0\\n'" in found["alpha"][1][0]
    assert [found[name][0] for name in ("beta", "gamma")] == ["applies as is", "applies, merged"]


def test_port_merges_what_is_partly_upstream(lane, site, tmp_path):
    apply(lane, site)  # the lane is in the pinned files: their originals are what is merged from
    files = {"fakepkg/one.py": ONE_A, "fakepkg/sub/two.py": TWO}
    target = tmp_path / "refreshed"
    found = ported(lane, tmp_path, files, base=site, target=target)
    assert found["alpha"] == ("applies, merged", ("part of the patch is already there",))
    assert list(manifest.load(target).patches[0].diffs) == ["fakepkg/sub/two.py"]


def test_port_without_git_does_not_merge(lane, site, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = ported(lane, tmp_path, {"fakepkg/one.py": NEAR}, base=site)
    assert found["alpha"][0] == "conflicts"
    assert found["alpha"][1][-1] == "not merged: git is not installed"


def test_port_does_not_merge_from_a_file_that_someone_changed(lane, site, tmp_path):
    (site / "fakepkg/one.py").write_bytes(b"mine\n")
    found = ported(lane, tmp_path, {"fakepkg/one.py": NEAR}, base=site)
    assert found["alpha"][0] == "conflicts"
    assert "not merged: fakepkg: fakepkg/one.py: its original bytes" in found["alpha"][1][-1]


def test_port_runs_the_reproducers(proving_lane, site, tmp_path):
    """On the new version without the lane, where the lines do not tell."""
    other_way = NEAR + b"one = 333\n"  # has what alpha's reproducer looks for, not alpha's lines
    scripts = proving_lane.lane / "reproducers"
    (scripts / "gamma.py").write_text("import sys\nprint('no such class')\nsys.exit(78)\n")
    found = ported(proving_lane, tmp_path, {"fakepkg/one.py": other_way}, base=site, timeout=60.0)
    assert found["alpha"] == ("already upstream", ("without the patch: right behaviour: has it",))
    assert found["beta"][0] == "applies, moved" and len(found["beta"][1]) == 1  # its lines tell
    result, (_, saw) = found["gamma"]
    assert (result, saw) == ("conflicts", "without the patch: inapplicable: no such class")


def test_port_writes_a_lane_that_applies_and_is_proved(proving_lane, site, tmp_path):
    """beta is upstream's now and left out; the others are made for the new lines and digests."""
    files = {"fakepkg/one.py": b"new = 1\n" + edit(NEAR, (b"one = 15\n", b"one = 1515\n"))}
    target = tmp_path / "refreshed"
    how = {"base": site, "timeout": 60.0, "target": target}
    found = ported(proving_lane, tmp_path, files, **how)
    assert [result for result, _ in found.values()] == [
        "applies, merged", "already upstream", "applies, merged",
    ]  # fmt: skip
    lane, new = manifest.load(target), tmp_path / "next"
    assert lane.packages == {"fakepkg": "1.1"}
    assert [patch.id for patch in lane.patches] == ["alpha", "gamma"]
    assert not (target / "beta.patch").exists() and not (target / "reproducers/beta.py").exists()
    assert lane.patches[0].text.startswith(b"Why alpha.\n\ndiff --git ")
    assert set(port_again(lane, new).values()) == {("applies as is", ())}
    assert [proof.verdict for proof in verify.verify(lane, new)] == ["proved", "proved"]
    apply(lane, new)
    wanted = edit(files["fakepkg/one.py"], (b"one = 3\n", b"one = 3333\none = 333\n"))
    assert (new / "fakepkg/one.py").read_bytes() == wanted
    with pytest.raises(PatchError, match="refreshed: exists"):
        port.port(proving_lane, "1.1", new, target=target)
    with pytest.raises(PatchError, match="needs the whole lane"):
        port.port(proving_lane, "1.1", new, ["alpha"], target=tmp_path / "part")


def port_again(lane, site):
    reports = port.port(lane, "1.1", site)
    return {report.patch: (report.result, report.details) for report in reports}


def test_port_needs_the_version_installed(lane, site):
    with pytest.raises(PatchError, match=r"no package .* has version 3.0; found fakepkg 1.0"):
        port.port(lane, "3.0", site)
