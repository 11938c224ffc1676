"""The manifest's schema: every bad entry is refused with its name and its key."""

import re

import pytest
from fakelane import NEW, ONE, ONE_A, PATCHES, make_lane

from megacpp_mcore.patching import PatchError, manifest


def load_changed(folder, old, new, count=1):
    """The good lane with one text of its manifest replaced."""
    path = make_lane(folder) / "manifest.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, count))
    return manifest.load(folder)


def test_a_good_lane(lane):
    assert lane.packages == {"fakepkg": "1.0"}
    assert [patch.id for patch in lane.patches] == ["alpha", "beta", "gamma"]
    alpha = lane.patches[0]
    assert alpha.files[0] == manifest.PatchedFile(
        "fakepkg/one.py", manifest.sha256(ONE), manifest.sha256(ONE_A)
    )
    assert alpha.reproducer.is_file()
    assert [patch.id for patch in lane.select(["gamma", "alpha"])] == ["alpha", "gamma"]


ALPHA_BEFORE = manifest.sha256(ONE)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema = 1", "schema = 2", "schema: 2 is not known"),
        ("schema = 1", "schema = '1'", "schema: '1' is not of type int"),
        ("schema = 1", "", "key 'schema' is missing"),
        ("schema = 1", "schema = 1\nauthor = 'x'", "unknown key 'author'"),
        ("schema = 1", "schema =", "cannot be read"),
        ('version = "1.0"', "", r"\[\[package\]\] 1: key 'version' is missing"),
        ('name = "fakepkg"', 'name = "Fake_Pkg"', "name: 'Fake_Pkg' is not a normalized"),
        ("[[package]]", '[[package]]\nname="fakepkg"\nversion="2"\n[[package]]', "given twice"),
        ('id = "alpha"', "", r"\[\[patch\]\] 1: key 'id' is missing"),
        ('id = "alpha"', 'id = "a lpha"', "id: 'a lpha' is not words"),
        ('id = "beta"', 'id = "alpha"', "id: 'alpha' is given twice"),
        ('file = "beta.patch"', 'file = "alpha.patch"', "file: 'alpha.patch' is given twice"),
        ('package = "fakepkg"', 'package = "other"', "'alpha': package: 'other' is not one of"),
        ('file = "alpha.patch"', 'file = "gone.patch"', "'alpha': file: .*gone.patch does not"),
        ('file = "alpha.patch"', 'file = "../a.patch"', "'alpha': file: '../a.patch' is not the"),
        ('reason = "why beta"', "", "patch 'beta': key 'reason' is missing"),
        ('reason = "why beta"', 'reason = " "', "patch 'beta': reason: is empty"),
        ('drop_when = "upstream has it"', "", "patch 'alpha': key 'drop_when' is missing"),
        ('test = "alpha.py"', "", "patch 'alpha': key 'test' is missing"),
        ('test = "alpha.py"', 'test = ""', "patch 'alpha': test: is empty"),
        ('test = "alpha.py"', 'test = "none.py"', "'alpha': test: .*none.py does not exist"),
        ('test = "alpha.py"', 'test = "alpha.sh"', "'alpha': test: 'alpha.sh' is not the name"),
        ('needs = "cpu"', 'needs = "tpu"', "'alpha': needs: 'tpu' is not one of cpu, gpu"),
        ('needs = "cpu"', 'needs = "cpu"\nwants = 1', "patch 'alpha': unknown key 'wants'"),
        ('needs = "cpu"', 'needs = "cpu"\ndefect = "1"', "'alpha': defect: '1' is not of type"),
        ('"not-reported"', '"fixed"', "'alpha': upstream: state: 'fixed' is not one of"),
        ('"not-reported"', '"not-reported", link = "x"', "upstream: link: has no place"),
        ('"not-reported"', '"open"', "upstream: link: is missing when state is 'open'"),
        ('"not-reported"', '"merged", link = "x"', "upstream: merged_in: is missing"),
        ('"not-reported"', '"open", link = "x", merged_in = "2"', "merged_in: has no place"),
        ('path = "fakepkg/one.py"', 'path = "../one.py"', "path: '../one.py' is not a plain"),
        ('path = "fakepkg/one.py"', 'path = "/etc/one.py"', "path: '/etc/one.py' is not a plain"),
        ('path = "fakepkg/one.py"', 'path = "one.py"', "path: 'one.py' is not a plain"),
        ('path = "fakepkg/one.py"', 'path = "f-1.dist-info/one.py"', "is not a plain path"),
        ('path = "fakepkg/one.py"', 'path = ".megacpp_patches/one.py"', "is not a plain path"),
        ('path = "fakepkg/one.py"', 'path = "fakepkg/sub/two.py"', "files.path: .* given twice"),
        (f'before = "{ALPHA_BEFORE}"', 'before = "12"', "one.py: sha256_before: '12' is not 64"),
        (f'before = "{ALPHA_BEFORE}"', f'before = "{manifest.sha256(ONE_A)}"', "is equal to"),
        (f'after = "{manifest.sha256(ONE_A)}"', f'after = "{"0" * 64}"', "patch 'beta': files: f"),
        ('before = "absent"', f'before = "{"1" * 64}"', "new.py: sha256_before is .* creates the"),
    ],
)  # fmt: skip
def test_bad_entries_are_named(tmp_path, old, new, message):
    with pytest.raises(PatchError, match=message):
        load_changed(tmp_path, old, new)


def test_a_patch_without_files(tmp_path):
    path = make_lane(tmp_path) / "manifest.toml"
    text = re.sub(r"(?s)\[\[patch\.files\]\].*?(?=\[\[patch\]\])", "", path.read_text(), count=1)
    path.write_text(text)
    with pytest.raises(PatchError, match="patch 'alpha': key 'files' is missing"):
        manifest.load(tmp_path)


def test_the_diff_must_touch_the_listed_files(tmp_path):
    make_lane(tmp_path)
    patches = {**PATCHES, "beta": {"fakepkg/other.py": (b"a\n", b"b\n")}}
    other = make_lane(tmp_path / "other", patches) / "beta.patch"
    (tmp_path / "beta.patch").write_bytes(other.read_bytes())
    with pytest.raises(PatchError, match=r"'beta': files: the manifest lists fakepkg/one.py, beta"):
        manifest.load(tmp_path)


def test_the_reason_must_stand_above_the_diff(tmp_path):
    path = make_lane(tmp_path) / "beta.patch"
    path.write_bytes(path.read_bytes().split(b"\n\n", 1)[1])
    with pytest.raises(PatchError, match=r"beta.patch: the reason is missing"):
        manifest.load(tmp_path)


def test_a_folder_without_manifest(tmp_path):
    with pytest.raises(PatchError, match=r"manifest.toml: cannot be read"):
        manifest.load(tmp_path)


def test_an_unknown_id(lane):
    with pytest.raises(PatchError, match="unknown patch 'delta'; the lane has alpha, beta, gamma"):
        lane.select(["delta"])


def test_absent_is_a_digest_of_its_own():
    assert manifest.sha256(None) == "absent" != manifest.sha256(b"") != manifest.sha256(NEW)


def test_a_fix_on_a_development_branch_is_not_taken_for_a_release():
    """Dropped at 0.20, wrong optimizer states would come back: that has pull request 5929 only."""
    (patch,) = manifest.load().select(["optimizer-state-of-mixed-dtypes"])
    assert patch.upstream["link"].endswith("/5835") and "no release" in patch.upstream["merged_in"]
    assert "5835" in patch.drop_when and not patch.drop_when.startswith("megatron-core is 0.20")
