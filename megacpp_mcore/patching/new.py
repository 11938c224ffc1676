"""Make a patch of the lane from an edited copy of installed files."""

import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit

from megacpp_mcore.files import write_atomically
from megacpp_mcore.patching import PatchError, diffs, site, state, verify
from megacpp_mcore.patching.manifest import MANIFEST, NAME, REPRODUCERS, Manifest, load, sha256
from megacpp_mcore.patching.verify import Proof

Changes = dict[str, tuple[bytes | None, bytes]]  # path -> a file before (None: no file) and after


def new(
    lane: Path, draft: Mapping[str, Any], edited: Path, test: Path, folder: Path | None = None
) -> tuple[list[Path], Proof]:
    """Add a patch to the end of `lane`: the differences of `edited` from the installed files.

    draft: what the developer says, the manifest's id, reason, drop_when, needs, upstream and, if
    there is a number, defect. edited: a folder with changed (or added) files under their
    site-packages paths; files in it that are equal to the installed ones are no part of the patch.
    test: the reproducing script. It is run (`verify`), and must show the defect without the patch
    and none with it, or be unable to run here when the draft needs a GPU. folder: site-packages
    with the whole lane applied.
    Returns the files written and the proof. Raises PatchError, with nothing written, otherwise.
    """
    manifest, name = load(lane), draft["id"]
    inside = test.resolve().parent == (lane / REPRODUCERS).resolve()
    script = f"{REPRODUCERS}/{test.name if inside else re.sub('[-.]', '_', name) + '.py'}"
    if not edited.is_dir():
        raise PatchError(f"--from {edited}: is not a folder")
    if not test.is_file():
        raise PatchError(f"--test {test}: does not exist; a patch needs a test that reproduces it")
    if not NAME.fullmatch(name):
        raise PatchError(f"{name!r}: a patch's id is words of a-z and 0-9 joined by '-'")
    if any(patch.id == name for patch in manifest.patches):
        raise PatchError(f"the lane has a patch {name!r} already")
    if not inside and (lane / script).exists():
        raise PatchError(f"{lane / script}: exists already; give it as --test")
    package, changes = _changes(manifest, edited, folder)
    entry = _entry(draft, package, Path(script).name, changes)
    files = {
        f"{name}.patch": patch_text(draft["reason"], changes),
        script: test.read_bytes(),
        MANIFEST: (lane / MANIFEST).read_bytes().rstrip(b"\n") + b"\n\n" + entry,
    }
    with tempfile.TemporaryDirectory(prefix="megacpp-lane-") as scratch:
        trial = Path(scratch, "lane")
        shutil.copytree(lane, trial, ignore=shutil.ignore_patterns("__pycache__"))
        _write(trial, files)
        (proof,) = verify.verify(load(trial), folder, [name])
    if proof.verdict == verify.FAILED:
        raise PatchError(
            f"--test {test} does not prove the patch: {proof.reason}. "
            f"Without it: {proof.pristine.saw or proof.pristine.log or 'no output'}. "
            f"With it: {proof.patched.saw or proof.patched.log or 'no output'}"
        )
    return _write(lane, files), proof


def patch_text(header: str, changes: Changes) -> bytes:
    """A patch file: why, and the diff of every file."""
    body = b"".join(diffs.make(path, *change) for path, change in changes.items())
    return header.strip().encode() + b"\n\n" + body


def file_tables(changes: Changes) -> list[dict[str, str]]:
    """`[[patch.files]]` of a manifest."""
    return [
        {"path": path, "sha256_before": sha256(before), "sha256_after": sha256(after)}
        for path, (before, after) in changes.items()
    ]


def _write(lane: Path, files: dict[str, bytes]) -> list[Path]:
    """Write the files, the manifest last, each in one step."""
    (lane / REPRODUCERS).mkdir(exist_ok=True)
    for name, data in files.items():
        write_atomically(lane / name, data)
    return [lane / name for name in files]


def _changes(manifest: Manifest, edited: Path, folder: Path | None) -> tuple[str, Changes]:
    """(package, path -> (bytes with the whole lane, edited bytes)) of every file that differs."""
    files = {
        path.relative_to(edited).as_posix(): path
        for path in sorted(edited.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    found, record = _owner(manifest, {path.split("/")[0] for path in files}, folder)
    changes: Changes = {}
    for path, file in files.items():
        live, after = found.installed.site / path, file.read_bytes()
        before = live.read_bytes() if live.is_file() else None
        if before == after:
            continue
        if b"\0" in after:
            raise PatchError(f"{file}: is not a text file")
        # The installed file must be what the lane, or the wheel, puts there.
        chain = found.links.get(path)
        if chain and sha256(before) != chain[-1].after:
            raise PatchError(
                f"{live} does not have the whole lane: run `megacpp patch apply` first, and edit a "
                f"copy of the patched file"
            )
        row = record.rows.get(path, "").rstrip("\r\n")
        if not chain and before is not None and row != record.row(path, before).rstrip("\r\n"):
            raise PatchError(
                f"{live} is not the file that {found.package}'s RECORD lists: edit a copy, not the "
                f"installed file"
            )
        changes[path] = (before, after)
    if not changes:
        raise PatchError(f"{edited}: no file in it differs from {found.installed.site}")
    return found.package, changes


def _owner(
    manifest: Manifest, tops: set[str], folder: Path | None
) -> tuple[state.PackageState, site.Record]:
    """The package that has all the folders `tops`, and its RECORD."""
    for package in manifest.packages:
        found = state.read(manifest, package, folder)
        if found.installed is None:
            continue
        record = site.Record(found.installed)
        if tops and tops <= {path.split("/")[0] for path in record.rows if path}:
            if found.problem or found.interrupted:
                raise PatchError(found.problem or found.interrupted)
            return found, record
    raise PatchError(
        f"the edited files are below {', '.join(sorted(tops)) or 'nothing'}: no installed package "
        f"of the lane ({', '.join(manifest.packages)}) has all of these folders"
    )


def _entry(draft: Mapping[str, Any], package: str, test: str, changes: Changes) -> bytes:
    """The manifest's new `[[patch]]`."""
    patch = tomlkit.table()
    patch.update({"id": draft["id"], "package": package, "file": f"{draft['id']}.patch"})
    patch.update({"defect": draft["defect"]} if "defect" in draft else {})
    for key in ("reason", "drop_when"):
        text = draft[key].strip()
        patch[key] = tomlkit.string(text, multiline="\n" in text)
    upstream = tomlkit.inline_table()
    upstream.update(draft["upstream"])
    patch.update({"test": test, "needs": draft["needs"], "upstream": upstream})
    patch["files"] = file_tables(changes)
    return tomlkit.dumps({"patch": [patch]}).encode()
