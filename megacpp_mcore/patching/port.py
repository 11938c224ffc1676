"""What the lane would meet on another version of a package. Reads only."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from megacpp_mcore.patching import PatchError, diffs, site
from megacpp_mcore.patching.diffs import FileDiff, Hunk
from megacpp_mcore.patching.manifest import Manifest, Patch

AS_IS = "applies as is"
MOVED = "applies, moved"
UPSTREAM = "already upstream"
CONFLICT = "conflicts"


@dataclass(frozen=True)
class Report:
    """One patch on the new version. details: a sentence per hunk that is not as stated, and
    one when upstream is said to have a patch that still applies."""

    patch: str
    result: str  # AS_IS, MOVED, UPSTREAM or CONFLICT
    details: tuple[str, ...]


def port(
    manifest: Manifest, version: str, folder: Path, only: Collection[str] = ()
) -> list[Report]:
    """Report per patch how it fares on `version`, installed in `folder`.

    "already upstream" needs every hunk's lines after the change to be there and those before it
    not. "applies, moved" needs every hunk's lines to be there exactly once, and not changed
    elsewhere; the diff must be made again at the new lines before the lane can take it. Each patch
    is tried with the earlier ones applied, as far as they apply. Raises PatchError when no package
    of the lane has that version.
    """
    manifest.check_diffs()
    selected = manifest.select(only)
    found = [site.find(package, folder) for package in manifest.packages]
    there = {each.package: each.site for each in found if each and each.version == version}
    if not there or any(only and patch.package not in there for patch in selected):
        seen = ", ".join(f"{each.package} {each.version}" for each in found if each)
        seen = seen or f"none of {', '.join(manifest.packages)}"
        raise PatchError(f"no package of the lane in {folder} has version {version}; found {seen}")
    contents: dict[str, list[bytes] | None] = {}
    patches = [patch for patch in manifest.patches if patch.package in there]
    reports = [_one(patch, there[patch.package], contents) for patch in patches]
    return [report for patch, report in zip(patches, reports, strict=True) if patch in selected]


def _one(patch: Patch, folder: Path, contents: dict[str, list[bytes] | None]) -> Report:
    """Try one patch; when all of it applies, `contents` has it afterwards."""
    judged: list[tuple[str, str]] = []
    after: dict[str, list[bytes] | None] = {}
    for path, diff in patch.diffs.items():
        if path not in contents:
            file = folder / path
            contents[path] = diffs.split_lines(file.read_bytes()) if file.is_file() else None
        found, after[path] = _file(diff, contents[path])
        judged += found
    kinds = {kind for kind, _ in judged}
    details = tuple(detail for _, detail in judged if detail)
    if kinds == {UPSTREAM}:
        return Report(patch.id, UPSTREAM, ())
    if UPSTREAM in kinds:
        details = (*details, "part of the patch is already there")
    if kinds & {UPSTREAM, CONFLICT}:
        return Report(patch.id, CONFLICT, details)
    contents.update(after)
    if patch.upstream["state"] == "merged":
        link, where = patch.upstream["link"], patch.upstream["merged_in"]
        details = (*details, f"said to be merged, and still applies: {link} ({where})")
    return Report(patch.id, MOVED if MOVED in kinds else AS_IS, details)


def _file(
    diff: FileDiff, lines: list[bytes] | None
) -> tuple[list[tuple[str, str]], list[bytes] | None]:
    """((result, detail) of each hunk of a file, its lines with those applied that apply)."""
    if diff.creates:
        target = list(diff.hunks[0].target)
        if lines is None or lines == target:
            return [(AS_IS if lines is None else UPSTREAM, "")], target
        return [(CONFLICT, f"{diff.path}: the file exists already, with other content")], lines
    if lines is None:
        return [(CONFLICT, f"{diff.path}: the file is not in this version")], None
    judged, result = [], list(lines)
    shift = done = 0
    for hunk in diff.hunks:
        kind, detail, at = _place(hunk, lines, diff.path)
        judged.append((kind, detail))
        if at is not None and at < done:
            late = f"{diff.path}: hunk {hunk.number}: its lines stand before the last one's"
            judged.append((CONFLICT, late))
        elif at is not None:
            done = at + len(hunk.source)
            result[at + shift : done + shift] = hunk.target
            shift += len(hunk.target) - len(hunk.source)
    return judged, result


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
