"""How each patch applies to another version of a package, and a lane written for that version."""

import shutil
import subprocess
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import tomlkit

from megacpp_mcore.files import write_atomically
from megacpp_mcore.patching import PatchError, diffs, site, state, verify
from megacpp_mcore.patching.diffs import FileDiff, Hunk
from megacpp_mcore.patching.manifest import MANIFEST, REPRODUCERS, Manifest, Patch, load
from megacpp_mcore.patching.new import Changes, file_tables, patch_text

AS_IS = "applies as is"
MOVED = "applies, moved"
MERGED = "applies, merged"
UPSTREAM = "already upstream"
CONFLICT = "conflicts"

Contents = dict[str, bytes | None]  # path -> a file's bytes, None where there is no file


@dataclass(frozen=True)
class Report:
    """One patch on the new version. details: a sentence per hunk that is not as stated, what the
    reproducer saw, and one when upstream is said to have a patch that still applies."""

    patch: str
    result: str  # AS_IS, MOVED, MERGED, UPSTREAM or CONFLICT
    details: tuple[str, ...]


def port(
    manifest: Manifest,
    version: str,
    folder: Path,
    only: Collection[str] = (),
    base: Path | None = None,
    timeout: float | None = None,
    target: Path | None = None,
) -> list[Report]:
    """Report per patch how it fares on `version`, installed in `folder`.

    "already upstream": every hunk's lines after the change are there and those before it not, or a
    merge changes nothing, or the reproducer shows right behaviour without the patch. "applies,
    moved": every hunk's lines are there exactly once, and not changed elsewhere. "applies, merged":
    git merges the patch into the new file, from the pinned one. Each patch is tried with the
    earlier ones applied, as far as they apply.
    base: site-packages with the pinned versions, patched or not (default: this interpreter's).
    timeout: seconds for a reproducer; None runs none. It runs on `folder` as it is, where the lines
    do not settle the matter: not all of them apply, or upstream is said to have the patch.
    target: a new folder for the lane of `version`: every patch that applies, refreshed. Raises
    PatchError when no package of the lane has that version.
    """
    selected = manifest.select(only)
    found = [site.find(package, folder) for package in manifest.packages]
    there = {each.package: each.site for each in found if each and each.version == version}
    if not there or any(only and patch.package not in there for patch in selected):
        seen = ", ".join(f"{each.package} {each.version}" for each in found if each)
        seen = seen or f"none of {', '.join(manifest.packages)}"
        raise PatchError(f"no package of the lane in {folder} has version {version}; found {seen}")
    if target and (only or target.exists()):
        raise PatchError(f"{target}: " + ("exists" if target.exists() else "needs the whole lane"))
    contents: Contents = {}
    reports: list[Report] = []
    changes: dict[str, Changes] = {}
    for patch in [patch for patch in manifest.patches if patch.package in there]:
        where = there[patch.package]
        before = {path: contents.get(path, _read(where / path)) for path in patch.diffs}
        report, after = _textual(patch, before)
        if report.result == CONFLICT:
            report, after = _merged(manifest, patch, base, before, report)
        unsettled = report.result in (CONFLICT, MERGED) or patch.upstream["state"] == "merged"
        if timeout is not None and unsettled and report.result != UPSTREAM:
            report = _tried(report, verify.run(patch.reproducer, where, (), timeout))
        reports.append(report)
        if report.result in (AS_IS, MOVED, MERGED):
            contents.update(after)
            changed = [path for path in after if after[path] != before[path]]
            changes[patch.id] = {path: (before[path], after[path]) for path in changed}
    if target:
        _write(manifest, target, version, there, changes)
    return [each for each in reports if each.patch in {patch.id for patch in selected}]


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _textual(patch: Patch, before: Contents) -> tuple[Report, Contents]:
    """The patch by its hunks' lines alone, and the files with it where all of it applies."""
    judged: list[tuple[str, str]] = []
    after: Contents = {}
    for path, diff in patch.diffs.items():
        found, after[path] = _file(diff, before[path])
        judged += found
    kinds = {kind for kind, _ in judged}
    details = tuple(detail for _, detail in judged if detail)
    if kinds == {UPSTREAM}:
        return Report(patch.id, UPSTREAM, ()), before
    if UPSTREAM in kinds:
        details = (*details, "part of the patch is already there")
    if kinds & {UPSTREAM, CONFLICT}:
        return Report(patch.id, CONFLICT, details), before
    if patch.upstream["state"] == "merged":
        link, where = patch.upstream["link"], patch.upstream["merged_in"]
        details = (*details, f"said to be merged, and still applies: {link} ({where})")
    return Report(patch.id, MOVED if MOVED in kinds else AS_IS, details), after


def _merged(
    manifest: Manifest, patch: Patch, base: Path | None, theirs: Contents, textual: Report
) -> tuple[Report, Contents]:
    """The patch by a three-way merge of each of its files; `textual` where that is not possible."""
    pinned, git = state.read(manifest, patch.package, base), shutil.which("git")
    earlier = [each.id for each in manifest.patches[: manifest.patches.index(patch)]]
    after: Contents = {}
    try:
        if not git:
            raise PatchError("git is not installed")
        if pinned.problem or pinned.installed is None:
            absent = f"{patch.package} {pinned.pinned} is not installed"
            raise PatchError(pinned.problem or absent)
        for path in patch.diffs:
            ours = pinned.composed(path, [*earlier, patch.id])
            old = pinned.composed(path, earlier)
            after[path] = _three_way(git, ours, old, theirs[path])
    except PatchError as error:  # of the pinned package: another version, changed by hand, ...
        return replace(textual, details=(*textual.details, f"not merged: {error}")), theirs
    if None in after.values():
        return textual, theirs
    if after == theirs:
        return Report(patch.id, UPSTREAM, ("a three-way merge with it changes nothing",)), theirs
    return replace(textual, result=MERGED), after


def _three_way(git: str, ours: bytes, base: bytes | None, theirs: bytes | None) -> bytes | None:
    """What git makes of both changes to a file; None when they conflict or a side has no file."""
    if base is None or theirs is None:
        return ours if base == theirs or ours == theirs else None
    with tempfile.TemporaryDirectory(prefix="megacpp-merge-") as scratch:
        names = [Path(scratch, name) for name in ("lane", "pinned", "new")]
        for name, data in zip(names, (ours, base, theirs), strict=True):
            name.write_bytes(data)
        done = subprocess.run([git, "merge-file", "-p", "-q", *names], capture_output=True)
    return None if done.returncode else done.stdout


def _tried(report: Report, run: verify.Run) -> Report:
    """The report with what the reproducer shows on the new version without the lane."""
    saw = f"without the patch: {run.meaning}: {run.saw or 'it printed nothing'}"
    if run.status == verify.RIGHT:
        return Report(report.patch, UPSTREAM, (saw,))
    return replace(report, details=(*report.details, saw))


def _write(
    manifest: Manifest,
    target: Path,
    version: str,
    there: Collection[str],
    changes: dict[str, Changes],
) -> None:
    """A copy of the lane for `version` of the packages `there`, with the patches of `changes`."""
    shutil.copytree(manifest.lane, target, ignore=shutil.ignore_patterns("__pycache__"))
    document = tomlkit.parse((target / MANIFEST).read_text(encoding="utf-8"))
    for package in document["package"]:
        if package["name"] in there:
            package["version"] = version
    kept = tomlkit.aot()
    for entry, patch in zip(document["patch"], manifest.patches, strict=True):
        if patch.package in there and patch.id not in changes:
            (target / patch.file).unlink()
            (target / REPRODUCERS / patch.test).unlink()
            continue
        kept.append(entry)
        if patch.package in there:
            text = patch_text(diffs.header_and_body(patch.text)[0], changes[patch.id])
            write_atomically(target / patch.file, text)
            entry["files"] = file_tables(changes[patch.id])
    document["patch"] = kept
    write_atomically(target / MANIFEST, tomlkit.dumps(document))
    load(target)


def _file(diff: FileDiff, before: bytes | None) -> tuple[list[tuple[str, str]], bytes | None]:
    """((result, detail) of each hunk of a file, the file with those applied that apply)."""
    if diff.creates:
        made = b"".join(diff.hunks[0].target)
        if before in (None, made):
            return [(AS_IS if before is None else UPSTREAM, "")], made
        return [(CONFLICT, f"{diff.path}: the file exists already, with other content")], before
    if before is None:
        return [(CONFLICT, f"{diff.path}: the file is not in this version")], None
    judged, result, done = [], [], 0
    lines = diffs.split_lines(before)
    for hunk in diff.hunks:
        kind, detail, at = _place(hunk, lines, diff.path)
        judged.append((kind, detail))
        if at is not None and at < done:
            late = f"{diff.path}: hunk {hunk.number}: its lines stand before the last one's"
            judged.append((CONFLICT, late))
        elif at is not None:
            result += [*lines[done:at], *hunk.target]
            done = at + len(hunk.source)
    return judged, b"".join([*result, *lines[done:]])


def _place(hunk: Hunk, lines: list[bytes], path: str) -> tuple[str, str, int | None]:
    """(result, detail, index where the hunk applies or None)."""
    stated, where = max(hunk.start - 1, 0), f"{path}: hunk {hunk.number}"
    places, changed = _places(hunk.source, lines), _places(hunk.target, lines)
    if _is_upstream(hunk, places, changed):
        return UPSTREAM, "", None
    if stated in places:
        return AS_IS, "", stated
    if len(places) == 1 and not changed:
        return MOVED, f"{where}: from line {stated + 1} to {places[0] + 1}", places[0]
    at, there = (", ".join(str(place + 1) for place in each) for each in (places, changed))
    if places and changed:
        # In repeated code the lines before the change may be found at another of its copies.
        detail = (
            f"{where}: ambiguous: its lines before the change stand at {at}, those after it at "
            f"{there} (made for line {hunk.start})"
        )
    elif places:
        detail = f"{where}: its lines stand more than once: at {at}"
    else:
        detail = f"{_mismatch(hunk, lines, path)} (made for line {hunk.start})"
    return CONFLICT, detail, None


def _places(block: tuple[bytes, ...], lines: list[bytes]) -> list[int]:
    """Every index at which `block` stands in `lines`; an empty one only in an empty file."""
    if not block:
        return [] if lines else [0]
    starts = (index for index, line in enumerate(lines) if line == block[0])
    return [index for index in starts if tuple(lines[index : index + len(block)]) == block]


def _is_upstream(hunk: Hunk, places: list[int], changed: list[int]) -> bool:
    """Whether the lines after the change are there, and those before it are not.

    Lines added at a file's start or end leave the lines before the change in place, next to them.
    """
    source, target = len(hunk.source), len(hunk.target)
    if not places or target <= source:
        return bool(changed) and not places
    return any(at < place + source and place < at + target for at in changed for place in places)


def _mismatch(hunk: Hunk, lines: list[bytes], path: str) -> str:
    """What differs where most of the hunk's lines match, the nearest to its own when several do."""

    def rank(index: int) -> tuple[int, int]:
        block = lines[index : index + len(hunk.source)]
        same = sum(a == b for a, b in zip(block, hunk.source, strict=False))
        return same, -abs(index - hunk.start + 1)

    closest = max(range(len(lines)), key=rank, default=0)
    try:
        diffs.check_hunk(replace(hunk, start=closest + 1), lines, path)
    except PatchError as error:
        return str(error)
    return f"{path}: hunk {hunk.number}"
