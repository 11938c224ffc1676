"""What a site can be: versions, checkouts, links, caches, full and read-only disks."""

import os
import py_compile
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fakelane import ONE, ONE_G, edit, make_lane, make_site, refused, snapshot, states

from megacpp_mcore.patching import PatchError, manifest, state
from megacpp_mcore.patching.operations import apply, revert
from megacpp_mcore.patching.store import FOLDER

ONE_PATH = "fakepkg/one.py"


def test_wrong_version(lane, tmp_path):
    site = make_site(tmp_path / "site", version="1.1")
    refused(apply, "fakepkg 1.1 is installed, the lane is for 1.0", lane, site)
    refused(revert, "fakepkg 1.1 is installed, the lane is for 1.0", lane, site)
    (row,) = state.status(lane, site)
    assert (row["installed"], row["pinned"], row["complete"]) == ("1.1", "1.0", False)
    assert "1.1 is installed" in row["problem"]


def test_revert_what_the_lane_of_another_version_applied(lane, site, tmp_path):
    before = snapshot(site)
    apply(lane, site)
    newer = manifest.load(make_lane(tmp_path / "newer", version="2.0"))
    refused(apply, "fakepkg 1.0 is installed, the lane is for 2.0", newer, site)
    revert(newer, site)
    assert snapshot(site) == before


def test_upgraded_underneath(lane, site, tmp_path):
    """pip has replaced the package while the lane was on it: nothing of the store is believed."""
    apply(lane, site)
    for path in (site / "fakepkg", site / "fakepkg-1.0.dist-info"):
        subprocess.run(["rm", "-r", str(path)], check=True)
    (row,) = state.status(lane, site)
    assert row["installed"] is None and row["problem"] == ""
    refused(apply, "fakepkg 1.0 is not installed|none of fakepkg is installed", lane, site)
    make_site(site, version="1.1")
    refused(revert, "fakepkg 1.1 is installed", lane, site)
    newer = manifest.load(make_lane(tmp_path / "newer", version="1.1"))
    apply(newer, site)
    revert(newer, site)
    assert snapshot(site) == snapshot(make_site(tmp_path / "other", version="1.1"))


def test_editable_and_other_development_installs(lane, site):
    info = site / "fakepkg-1.0.dist-info"
    (info / "direct_url.json").write_text('{"url": "file:///src", "dir_info": {"editable": true}}')
    refused(apply, "is an editable install of file:///src", lane, site)
    (info / "direct_url.json").write_text('{"url": "file:///a.whl", "archive_info": {}}')
    apply(lane, site)
    revert(lane, site)
    (info / "RECORD").unlink()
    refused(apply, "has no RECORD", lane, site)
    info.rename(site / "fakepkg.egg-info")
    refused(apply, "is a development checkout", lane, site)
    (row,) = state.status(lane, site)
    assert "is a development checkout" in row["problem"] and not row["complete"]


def test_two_versions_recorded(lane, site):
    (site / "FakePkg-0.9.dist-info").mkdir()
    refused(apply, "records it 2 times", lane, site)


def test_links_out_of_the_site(lane, site):
    outside = site.parent / "cache.py"
    (site / ONE_PATH).rename(outside)
    (site / ONE_PATH).symlink_to(outside)
    refused(apply, "one.py is a link to .*cache.py", lane, site)
    assert outside.read_bytes() == ONE


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_a_drifted_one(lane, site, make, patched):
    """A FIFO without a writer is not waited for."""
    if patched:
        apply(lane, site)
    (site / ONE_PATH).unlink()
    make(site / ONE_PATH)
    assert set(states(lane, site).values()) == {"drifted"}
    for function in (apply, revert):
        with pytest.raises(PatchError, match=r"one.py cannot be read: .*someone else changed it"):
            function(lane, site)
    assert not (site / ONE_PATH).is_file()


def test_a_record_that_is_no_utf8_or_repeats_itself_keeps_its_bytes(lane, site):
    record = site / "fakepkg-1.0.dist-info/RECORD"
    record.write_bytes(b"fakepkg/caf\xe9.txt,,\n\nx,,\nx,,\n\n" + record.read_bytes())
    before = snapshot(site)
    apply(lane, site)
    assert record.read_bytes().count(b"fakepkg/caf\xe9.txt,,\n\nx,,\nx,,\n\n") == 1
    revert(lane, site)
    assert snapshot(site) == before


def test_metadata_that_is_no_utf8(lane, site):
    (site / "fakepkg-1.0.dist-info/METADATA").write_bytes(b"Name: fakepkg\nVersion: \xff\n")
    refused(apply, "fakepkg-1.0.dist-info/METADATA: cannot be read", lane, site)
    (row,) = state.status(lane, site)
    assert "METADATA: cannot be read" in row["problem"] and not row["complete"]


def test_hard_links_of_a_package_cache_keep_their_bytes(lane, site):
    """uv links the files of its cache into site-packages."""
    cached = site.parent / "cached.py"
    os.link(site / ONE_PATH, cached)
    apply(lane, site)
    assert cached.read_bytes() == ONE
    assert (site / ONE_PATH).read_bytes() == ONE_G


def test_stale_bytecode_goes(lane, site):
    """An unchecked hash-based .pyc would be used for ever."""
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(site / ONE_PATH), doraise=True, invalidation_mode=unchecked)
    other = py_compile.compile(str(site / "fakepkg/__init__.py"), doraise=True)
    command = [sys.executable, "-c", "import fakepkg.one as m; print(m.one)"]

    def last_line():
        environment = {**os.environ, "PYTHONPATH": str(site)}
        return subprocess.run(command, env=environment, capture_output=True, text=True).stdout

    text = edit(ONE, (b"one = 19\n", b"one = 91\n"))
    assert last_line() == "19\n"
    (site / ONE_PATH).write_bytes(text)
    assert last_line() == "19\n"  # as feared
    (site / ONE_PATH).write_bytes(ONE)
    newer = edit(ONE, (b"one = 19\n", b"one = 77\n"))
    lane = manifest.load(make_lane(site.parent / "lane2", {"a": {ONE_PATH: (ONE, newer)}}))
    apply(lane, site)
    assert last_line() == "77\n"
    revert(lane, site)
    assert last_line() == "19\n"
    assert os.path.exists(other)


def test_bytecode_that_cannot_go_is_seen_before_anything_is_written(lane, site, monkeypatch):
    """Else the run would be broken off after its switch, and every later one too."""
    py_compile.compile(str(site / ONE_PATH), doraise=True)
    monkeypatch.setattr("os.access", lambda path, mode: path.name != "__pycache__")
    refused(apply, "__pycache__ is read-only for this user", lane, site)


def test_a_site_that_alone_is_read_only_is_refused(lane, site, monkeypatch):
    """Its packages and the store are not: without the site's lock a second run could go beside."""
    apply(lane, site)
    revert(lane, site)
    before = (site / ONE_PATH).read_bytes()
    monkeypatch.setattr("os.access", lambda path, mode: path != site)
    refused(apply, f"{site} is read-only for this user", lane, site)
    assert (site / ONE_PATH).read_bytes() == before


def test_the_patched_file_is_newer_by_a_whole_second(lane, site):
    """A .pyc names its source's second: a source from the future must not hide the change."""
    os.utime(site / ONE_PATH, (4e9, 4e9))
    apply(lane, site)
    assert int((site / ONE_PATH).stat().st_mtime) == 4_000_000_001


def test_full_disk(lane, site, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("U", (), {"free": 1000})())
    refused(apply, "1000 bytes are free, .* are needed", lane, site)


def test_the_disk_fails_while_staging(lane, site, monkeypatch):
    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    refused(apply, "nothing was changed there: .*No space left", lane, site)


def test_read_only_site(lane):
    """In a child that is another user, because root may write everywhere."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        site = make_site(Path(folder, "site"))
        apply(lane, site), revert(lane, site)  # imports everything while it can be read
        for path in [site, *site.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setuid(65534)
            try:
                os.write(writer, f"{states(lane, site)}\n".encode())
                apply(lane, site)
            except BaseException as error:
                os.write(writer, repr(error).encode())
            finally:
                os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        with open(reader) as file:
            said = file.read()
        assert said.startswith("{'alpha': 'not applied'")
        assert "PatchError" in said and "is read-only for this user: nothing was changed" in said
        assert not (site / FOLDER).exists()
        for path in [site, *site.rglob("*")]:
            path.chmod(0o755)


def test_two_packages_and_one_absent(site, tmp_path):
    lane = make_lane(tmp_path / "lane")
    text = (lane / "manifest.toml").read_text()
    other = make_lane(
        tmp_path / "other", {"omega": {"otherpkg/x.py": (b"a\n", b"b\n")}}, package="otherpkg"
    )
    entry = (other / "manifest.toml").read_text().split("\n\n", 1)[1]
    (lane / "manifest.toml").write_text(text + entry)
    for name in ("omega.patch", "reproducers/omega.py"):
        (lane / name).write_bytes((other / name).read_bytes())
    both = manifest.load(lane)
    assert [patch.package for patch in both.patches][-1] == "otherpkg"
    outcome = apply(both, site)
    assert outcome.notes == ("otherpkg is not installed: its 1 patches are left out",)
    refused(apply, "otherpkg 1.0 is not installed", both, site, ["omega"])
    assert apply(both, site, ["alpha"]).notes == ()
    revert(both, site)
    make_site(site, {"otherpkg/x.py": b"a\n"}, name="otherpkg")
    before = snapshot(site)
    apply(both, site)
    assert (site / "otherpkg/x.py").read_bytes() == b"b\n"
    revert(both, site, ["alpha", "beta", "gamma"])
    assert (site / "otherpkg/x.py").read_bytes() == b"b\n"
    revert(both, site)
    assert snapshot(site) == before
    make_site(site, {"otherpkg/x.py": b"a\n"}, name="otherpkg", version="2")
    refused(apply, "otherpkg: .* records it 2 times", both, site)
