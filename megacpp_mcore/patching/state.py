"""Which patches are applied, judged by the files' digests alone."""

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megacpp_mcore.patching import PatchError, diffs, site
from megacpp_mcore.patching.manifest import ABSENT, FOLDER, Link, Manifest, Patch, sha256
from megacpp_mcore.patching.store import Action, Entry, Store, digest

APPLIED = "applied"
NOT_APPLIED = "not applied"
PARTIAL = "partially applied"
DRIFTED = "drifted"
OUTDATED = "applied by another release of the lane"
UNFINISHED = "unfinished"


@dataclass
class FileState:
    """One file that the lane manages: its digest, and the patches in it.

    strange: "" for bytes that the lane makes; else what they are: OUTDATED, left by another release
    of the lane, with the original kept; UNFINISHED, found or written by a run that is not finished;
    else DRIFTED.
    """

    found: str
    applied: frozenset[str] = frozenset()
    strange: str = ""


@dataclass
class PackageState:
    """One pinned package in one site.

    problem: why the lane cannot work on it (another version, editable, ...), else "". installed is
    None when it is absent. interrupted: the unfinished or running operation, else "". entry: the
    ledger's, empty without one. links: path -> the patches that touch it; none in another version.
    """

    manifest: Manifest
    package: str
    installed: site.Installed | None = None
    problem: str = ""
    interrupted: str = ""
    entry: Entry = field(default_factory=lambda: Entry(""))
    links: Mapping[str, list[Link]] = field(default_factory=dict)
    files: dict[str, FileState] = field(default_factory=dict)

    @property
    def pinned(self) -> str:
        return self.manifest.packages[self.package]

    @property
    def patches(self) -> tuple[Patch, ...]:
        """The lane's patches of this package, none where it cannot be worked on."""
        return self.manifest.of(self.package) if self.installed and not self.problem else ()

    @property
    def applied(self) -> tuple[str, ...]:
        """The patches whose every file has them, in order."""
        return tuple(patch.id for patch in self.patches if self.of(patch)[0] == APPLIED)

    def of(self, patch: Patch) -> tuple[str, list[str]]:
        """One of the six states above, and the files that make it so (drifted, half applied)."""
        files = {file.path: self.files[file.path] for file in patch.files}
        for condition in (DRIFTED, UNFINISHED, OUTDATED):
            if those := [path for path, file in files.items() if file.strange == condition]:
                return condition, those
        without = [path for path, file in files.items() if patch.id not in file.applied]
        if not without:
            return APPLIED, []
        return (NOT_APPLIED, []) if len(without) == len(files) else (PARTIAL, without)

    def original(self, path: str) -> bytes | None:
        """The bytes of a managed file before any patch; None for one that a patch creates.

        From the file itself, the store, or by undoing the patches in it; always checked by digest.
        Raises PatchError when none of the three has them.
        """
        chain, file, live = self.links.get(path, []), self.files[path], self.installed.site / path
        wanted = chain[0].before if chain else self.entry.files[path].before
        if wanted == ABSENT:
            return None
        if file.found == wanted:
            return live.read_bytes()
        data = Store(self.installed.site).original(wanted)
        if data is None and file.found in [link.after for link in chain]:
            data = live.read_bytes()
            for link in reversed(chain):
                if link.id in file.applied:
                    data = diffs.apply(diffs.reverse(link.diff), data, link.id)
        if sha256(data) == wanted:
            return data
        raise PatchError(
            f"{self.package}: {path}: its original bytes (sha256 {wanted}) are not kept any more; "
            f"reinstall it: {self.installed.reinstall}"
        )

    def composed(self, path: str, ids: Collection[str]) -> bytes | None:
        """The bytes of a file of the manifest with the patches `ids`.

        Raises PatchError as `original` and `diffs.compose` do, and where a patch does not leave
        what the manifest promises.
        """
        original = data = self.original(path)
        chain = self.links[path]
        while chain and chain[-1].id not in ids:
            chain = chain[:-1]
        for link in chain:
            data = diffs.apply(link.diff, data, link.id)
            if sha256(data) != link.after:
                raise PatchError(
                    f"patch {link.id!r}: files: {path}: sha256_after is {link.after}, but "
                    f"{link.source} leaves {sha256(data)}. Nothing was changed"
                )
        return diffs.compose(original, chain, ids)

    def examine(self, path: str) -> None:
        """Read a file: after the first n patches, some of them, of another release, or drifted."""
        chain, kept = self.links.get(path, []), self.entry.files.get(path)
        stages = [chain[0].before if chain else kept.before, *(link.after for link in chain)]
        found = digest(self.installed.site / path)
        file = self.files[path] = FileState(found)
        if found in stages:
            file.applied = frozenset(link.id for link in chain[: stages.index(found)])
            return
        file.strange = DRIFTED
        if kept and found == kept.after:
            store = Store(self.installed.site)
            if not chain or kept.before == ABSENT or store.original(kept.before) is not None:
                file.strange = OUTDATED
            some = frozenset(self.entry.patches).intersection(link.id for link in chain)
            with contextlib.suppress(PatchError):
                if chain and sha256(self.composed(path, some)) == found:
                    file.applied, file.strange = some, ""


def read(manifest: Manifest, package: str, folder: Path | None = None) -> PackageState:
    """The state of a pinned package in `folder` (default: where this interpreter finds it).

    Writes nothing. Raises PatchError only for a damaged store.
    """
    state = PackageState(manifest, package)
    try:
        state.installed = installed = site.find(package, folder)
    except PatchError as error:
        state.problem = str(error)
        return state
    kept = [Store(installed.site)] if installed else stores(folder)
    state.interrupted, actions = _unfinished(kept, package)
    if installed is None:
        return state
    entry = kept[0].ledger().get(package)
    if entry and entry.version == installed.version:
        state.entry = entry
    if installed.version == state.pinned:
        state.links = manifest.links(package)
        if folder is None:
            state.problem = site.shadowed(installed, state.links)
    else:
        there = f"{package} {installed.version} is installed"
        state.problem = f"{there}, the lane is for {state.pinned}"
    for path in {**state.links, **state.entry.files}:  # the ledger's: another release patched them
        state.examine(path)
    for action in actions or _unfinished(kept, package)[1]:  # a run may have begun meanwhile
        file = state.files.get(action.path)
        if file and file.strange == DRIFTED and file.found in (action.before, action.after):
            file.strange = UNFINISHED
    return state


def stores(folder: Path | None) -> list[Store]:
    """Every store there is: in `folder`, or in the folders this interpreter imports from."""
    folders = site.search_path() if folder is None else [folder.resolve()]
    return [Store(path) for path in dict.fromkeys(folders) if (path / FOLDER).is_dir()]


def _unfinished(kept: Collection[Store], package: str) -> tuple[str, list[Action]]:
    """(what is unfinished or running, its files) of one package, from the first such journal."""
    for store in kept:
        journal = store.read_journal()
        actions = [each for each in journal.actions if each.package == package] if journal else []
        if actions:
            switched = sum(digest(store.site / each.path) == each.after for each in actions)
            holder = store.holder()
            how = f"in progress ({holder})" if holder else "interrupted"
            todo = "" if holder else "; `megacpp patch apply` or `revert` finishes it first"
            return (
                f"{journal.operation} of {journal.started} by pid {journal.pid} is {how}: "
                f"{switched} of {len(actions)} files switched{todo}"
            ), actions
    return "", []


def status(manifest: Manifest, folder: Path | None = None) -> list[dict[str, Any]]:
    """What `megacpp patch status` shows, one dict a package, ready for JSON.

    Keys: package, pinned, installed (version or None), site, problem, interrupted, patches (id,
    state, files that make it drifted, partial or outdated), leftovers (files that only another
    release of the lane knows), complete (nothing is to be done: all applied, or absent).
    """
    rows = []
    for found in (read(manifest, package, folder) for package in manifest.packages):
        patches = []
        for patch in found.patches:
            condition, files = found.of(patch)
            patches.append({"id": patch.id, "state": condition, "files": files})
        known = {file.path for patch in found.patches for file in patch.files}
        outdated = [path for path, file in found.files.items() if file.strange == OUTDATED]
        row = {
            "package": found.package,
            "pinned": found.pinned,
            "installed": found.installed.version if found.installed else None,
            "site": str(found.installed.site) if found.installed else None,
            "problem": found.problem,
            "interrupted": found.interrupted,
            "patches": patches,
            "leftovers": [path for path in outdated if path not in known],
        }
        quiet = not (found.problem or found.interrupted or row["leftovers"])
        row["complete"] = quiet and all(patch["state"] == APPLIED for patch in patches)
        rows.append(row)
    return rows
