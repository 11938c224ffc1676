"""The lane as data: `manifest.toml`, its schema, and the patches it lists.

Every key is known and every entry is complete, or loading raises PatchError with the entry and the
key. A patch without a reproducing test cannot be in the manifest.
"""

import functools
import hashlib
import importlib.resources
import os
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from megacpp_mcore.files import read_regular
from megacpp_mcore.patching import PatchError, diffs
from megacpp_mcore.patching.diffs import FileDiff

MANIFEST = "manifest.toml"
REPRODUCERS = "reproducers"
ABSENT = "absent"  # stands for the sha256 of a file that does not exist
FOLDER = ".megacpp_patches"  # the lane's own folder in a site, never a patch's target
NAME = re.compile(r"[a-z0-9]+([._-][a-z0-9]+)*")  # of a patch and of a package
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TEXTS = ("id", "package", "file", "reason", "drop_when", "test", "needs")


def sha256(data: bytes | None) -> str:
    """The hex digest of `data`, or "absent" for None."""
    return ABSENT if data is None else hashlib.sha256(data).hexdigest()


def is_digest(value: Any) -> bool:
    """Whether `value` is something that `sha256` returns."""
    return value == ABSENT or (isinstance(value, str) and _SHA256.fullmatch(value) is not None)


def is_target(path: Any) -> bool:
    """Whether `path` is one the lane may write: below a package's folder, relative and plain."""
    if not isinstance(path, str) or "\\" in path or "\0" in path or re.search(r"\s", path):
        return False
    first, *rest = parts = path.split("/")
    own = first == FOLDER or first.endswith((".dist-info", ".egg-info"))
    return bool(rest) and not own and not {"", ".", ".."}.intersection(parts)


@dataclass(frozen=True)
class PatchedFile:
    """One file of a patch: its path in site-packages and its digest before and after."""

    path: str
    before: str
    after: str


class Link(NamedTuple):
    """One patch among those that touch a file. source: the patch file's name."""

    id: str
    diff: FileDiff
    before: str
    after: str
    source: str


@dataclass(frozen=True)
class Patch:
    """One entry of the manifest; the fields are the keys of `[[patch]]`.

    needs: "cpu" or "gpu", where the reproducing test can run.
    """

    id: str
    package: str
    file: str
    reason: str
    drop_when: str
    test: str
    needs: str
    upstream: Mapping[str, str]
    files: tuple[PatchedFile, ...]
    defect: int | None
    lane: Path

    @property
    def text(self) -> bytes:
        """The patch file's bytes."""
        return (self.lane / self.file).read_bytes()

    @property
    def reproducer(self) -> Path:
        """The reproducing test's script."""
        return self.lane / REPRODUCERS / self.test

    @functools.cached_property
    def diffs(self) -> Mapping[str, FileDiff]:
        """path -> its diff. Raises PatchError when the diff does not touch exactly `files`."""
        if not diffs.header_and_body(self.text)[0]:
            raise PatchError(f"{self.file}: the reason is missing above the first `diff --git`")
        parsed = {diff.path: diff for diff in diffs.parse(self.text, self.file)}
        listed = [file.path for file in self.files]
        if parsed.keys() != set(listed):
            raise PatchError(
                f"patch {self.id!r}: files: the manifest lists {_names(listed)}, "
                f"{self.file} changes {_names(parsed)}"
            )
        for file in self.files:
            creates = parsed[file.path].creates
            if creates != (file.before == ABSENT):
                raise PatchError(
                    f"patch {self.id!r}: {file.path}: sha256_before is {file.before!r}, but "
                    f"{self.file} {'creates' if creates else 'changes'} the file"
                )
        return parsed


@dataclass(frozen=True)
class Manifest:
    """A lane that passed its schema. `packages`: name -> pinned version; `patches`: in order."""

    lane: Path
    packages: Mapping[str, str]
    patches: tuple[Patch, ...]

    def of(self, package: str) -> tuple[Patch, ...]:
        """The patches of one package, in order."""
        return tuple(patch for patch in self.patches if patch.package == package)

    def links(self, package: str) -> dict[str, list[Link]]:
        """path -> the patches that touch it, in order: a chain that `diffs.compose` takes.

        Raises PatchError for one that does not start from what the one before it leaves.
        """
        result: dict[str, list[Link]] = {}
        for patch in self.of(package):
            for path, before, after in ((f.path, f.before, f.after) for f in patch.files):
                chain = result.setdefault(path, [])
                if chain and chain[-1].after != before:
                    raise PatchError(
                        f"patch {patch.id!r}: files: {path}: sha256_before is {before}, but "
                        f"patch {chain[-1].id!r} before it leaves {chain[-1].after}"
                    )
                chain.append(Link(patch.id, patch.diffs[path], before, after, patch.file))
        return result

    def select(self, ids: Collection[str]) -> tuple[Patch, ...]:
        """The patches named, in the lane's order; all when none is named. Refuses an unknown id."""
        known = [patch.id for patch in self.patches]
        for name in ids:
            if name not in known:
                raise PatchError(f"unknown patch {name!r}; the lane has {_names(known)}")
        return tuple(patch for patch in self.patches if not ids or patch.id in ids)


def shipped_lane() -> Path:
    """The folder of the lane that comes with this package."""
    return Path(str(importlib.resources.files("megacpp_mcore.patches")))


def load(lane: Path | str | None = None) -> Manifest:
    """Read `manifest.toml` of the folder `lane` (default: the shipped one) and its patch files.

    Raises PatchError naming the entry and the key that is unknown, missing or wrong.
    """
    lane = shipped_lane() if lane is None else Path(lane)
    path = lane / MANIFEST
    try:
        table = tomllib.loads(read_regular(path).decode())
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not TOML
        raise PatchError(f"{path}: cannot be read: {error}") from error
    _keys(table, {"schema": int, "package": list}, {"patch": list}, MANIFEST)
    _check(table["schema"] == 1, MANIFEST, f"schema: {table['schema']} is not known; this reads 1")
    packages: dict[str, str] = {}
    for number, entry in enumerate(table["package"], 1):
        where = f"[[package]] {number}"
        _keys(entry, dict.fromkeys(("name", "version"), str), {}, where)
        name = entry["name"]
        _check(NAME.fullmatch(name), where, f"name: {name!r} is not a normalized package name")
        _check(name not in packages, where, f"name: {name!r} is given twice")
        packages[name] = entry["version"]
    entries = enumerate(table.get("patch", ()), 1)
    patches = tuple(_patch(entry, number, packages, lane) for number, entry in entries)
    for key in ("id", "file"):
        _unique([getattr(patch, key) for patch in patches], "[[patch]]", key)
    manifest = Manifest(lane, packages, patches)
    for package in packages:
        manifest.links(package)
    return manifest


def _patch(entry: Any, number: int, packages: Mapping[str, str], lane: Path) -> Patch:
    named = isinstance(entry, dict) and isinstance(entry.get("id"), str)
    where = f"patch {entry['id']!r}" if named else f"[[patch]] {number}"
    required = {**dict.fromkeys(_TEXTS, str), "upstream": dict, "files": list}
    _keys(entry, required, {"defect": int}, where)
    words = f"id: {entry['id']!r} is not words of a-z and 0-9 joined by '-'"
    _check(NAME.fullmatch(entry["id"]), where, words)
    _one_of(entry["package"], packages, where, "package")
    _one_of(entry["needs"], ("cpu", "gpu"), where, "needs")
    _upstream(entry["upstream"], f"{where}: upstream")
    for key, folder, suffix in (("file", lane, ".patch"), ("test", lane / REPRODUCERS, ".py")):
        name = entry[key]
        plain = PurePosixPath(name).name == name and name.endswith(suffix)
        _check(plain, where, f"{key}: {name!r} is not the name of a {suffix} file")
        _check(os.path.isfile(folder / name), where, f"{key}: {folder / name} does not exist")
    _check(entry["files"], where, "files: at least one is needed")
    files = tuple(_file(file, f"{where}: files") for file in entry["files"])
    _unique([file.path for file in files], where, "files.path")
    return Patch(**{"defect": None, **entry, "files": files}, lane=lane)


def _file(entry: Any, where: str) -> PatchedFile:
    _keys(entry, dict.fromkeys(("path", "sha256_before", "sha256_after"), str), {}, where)
    path, before, after = entry["path"], entry["sha256_before"], entry["sha256_after"]
    plain = f"path: {path!r} is not a plain path of a package's file below site-packages"
    _check(is_target(path), where, plain)
    where = f"{where}: {path}"
    either = f"sha256_before: {before!r} is not 64 hex digits or 'absent'"
    _check(is_digest(before), where, either)
    _check(_SHA256.fullmatch(after), where, f"sha256_after: {after!r} is not 64 hex digits")
    _check(before != after, where, "sha256_after is equal to sha256_before")
    return PatchedFile(path, before, after)


def _upstream(upstream: Mapping[str, Any], where: str) -> None:
    _keys(upstream, {"state": str}, {"link": str, "merged_in": str}, where)
    state = upstream["state"]
    _one_of(state, ("open", "merged", "not-reported"), where, "state")
    for key, states in (("link", ("open", "merged")), ("merged_in", ("merged",))):
        verb = "is missing" if state in states else "has no place"
        wanted = (key in upstream) == (state in states)
        _check(wanted, where, f"{key}: {verb} when state is {state!r}")


def _keys(table: Any, required: Mapping[str, type], optional: Mapping[str, type], where: str):
    """Refuse a table with an unknown key, without a required one, or with a value of other type."""
    known = {**required, **optional}
    _check(isinstance(table, dict), where, f"is {table!r}, not a table")
    for key in table:
        _check(key in known, where, f"unknown key {key!r}; known: {_names(known)}")
    for key in required:
        _check(key in table, where, f"key {key!r} is missing")
    for key, value in table.items():
        kind = known[key]
        _check(type(value) is kind, where, f"{key}: {value!r} is not of type {kind.__name__}")
        _check(kind is not str or value.strip(), where, f"{key}: is empty")


def _check(holds: Any, where: str, otherwise: str) -> None:
    if not holds:
        raise PatchError(f"{where}: {otherwise}")


def _one_of(value: str, known: Collection[str], where: str, key: str) -> None:
    _check(value in known, where, f"{key}: {value!r} is not one of {_names(known)}")


def _unique(names: list[str], where: str, key: str) -> None:
    for name in names:
        _check(names.count(name) == 1, where, f"{key}: {name!r} is given twice")


def _names(names: Collection[str]) -> str:
    return ", ".join(names) or "none"
