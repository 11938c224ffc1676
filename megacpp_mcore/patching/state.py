"""What is applied: read from the files' digests, never from a note that they were changed."""

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megacpp_mcore.patching import PatchError, diffs, site
from megacpp_mcore.patching.manifest import ABSENT, FOLDER, Manifest, Patch, sha256
from megacpp_mcore.patching.store import Action, Entry, Store, digest

APPLIED = "applied"
NOT_APPLIED = "not applied"
PARTIAL = "partially applied"
DRIFTED = "drifted"
OUTDATED = "applied by another release of the lane"
UNFINISHED = "unfinished"


@dataclass(frozen=True)
class FileState:
    """One file that the lane manages.

    applied: the patches in it, or None when its bytes are none that the lane makes. other says what
    they are then: OUTDATED, left by another release of the lane, with the original kept;
    UNFINISHED, found or written by a run that is not finished; else DRIFTED.
    """

    path: str
    found: str
    applied: frozenset[str] | None
    other: str = DRIFTED

    @property
    def is_outdated(self) -> bool:
        return self.applied is None and self.other == OUTDATED


@dataclass
class PackageState:
    """One pinned package in one site.

    problem: why the lane cannot work on it (another version, editable, ...), else "". installed is
    None when it is absent. interrupted: the unfinished or running operation, else "".
    """

    package: str
    pinned: str
    installed: site.Installed | None = None
    problem: str = ""
    interrupted: str = ""
    entry: Entry | None = None
    files: dict[str, FileState] = field(default_factory=dict)

    @property
    def foreign_version(self) -> bool:
        """Whether another version than the pinned one is installed."""
        return self.installed is not None and self.installed.version != self.pinned

    def of(self, patch: Patch) -> tuple[str, list[str]]:
        """One of the six states above, and the files that make it so (drifted, half applied)."""
        files = [self.files[file.path] for file in patch.files]
        for condition in (DRIFTED, UNFINISHED, OUTDATED):
            those = [f.path for f in files if f.applied is None and f.other == condition]
            if those:
                return condition, those
        without = [file.path for file in files if patch.id not in file.applied]
        if not without:
            return APPLIED, []
        return (NOT_APPLIED, []) if len(without) == len(files) else (PARTIAL, without)

    def patches(self, manifest: Manifest) -> tuple[Patch, ...]:
        """The lane's patches of this package, none where it cannot be worked on."""
        return manifest.of(self.package) if self.installed and not self.problem else ()

    def applied(self, manifest: Manifest) -> frozenset[str]:
        """The patches whose every file has them."""
        return frozenset(p.id for p in self.patches(manifest) if self.of(p)[0] == APPLIED)


def read(manifest: Manifest, package: str, folder: Path | None = None) -> PackageState:
    """The state of a pinned package in `folder` (default: where this interpreter finds it).

    Writes nothing. Raises PatchError only for a damaged store.
    """
    state = PackageState(package, manifest.packages[package])
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
    state.entry = entry if entry and entry.version == installed.version else None
    if state.foreign_version:
        there = f"{package} {installed.version} is installed"
        state.problem = f"{there}, the lane is for {state.pinned}"
    else:
        for path in manifest.touching(package):
            state.files[path] = _managed(manifest, state, path)
        if folder is None:
            state.problem = site.shadowed(installed, state.files)
    for path, record in (state.entry.files if state.entry else {}).items():
        if path not in state.files:  # another release of the lane has patched it
            found = digest(installed.site / path)
            pristine = frozenset() if found == record["before"] else None
            other = OUTDATED if found == record["after"] else DRIFTED
            state.files[path] = FileState(path, found, pristine, other)
    for action in actions or _unfinished(kept, package)[1]:  # a run may have begun meanwhile
        file = state.files.get(action.path)
        if file and file.other == DRIFTED and file.found in (action.before, action.after):
            state.files[file.path] = replace(file, other=UNFINISHED)
    return state


def stores(folder: Path | None) -> list[Store]:
    """Every store there is: in `folder`, or in the folders this interpreter imports from."""
    folders = site.search_path() if folder is None else [folder.resolve()]
    return [Store(path) for path in dict.fromkeys(folders) if (path / FOLDER).is_dir()]


def _unfinished(kept: Sequence[Store], package: str) -> tuple[str, list[Action]]:
    """(what is unfinished or running, its files) of one package, from the first such journal."""
    for store in kept:
        journal = store.read_journal() or {"actions": []}
        actions = [action for action in journal["actions"] if action.package == package]
        if actions:
            switched = sum(digest(store.site / each.path) == each.after for each in actions)
            holder = store.holder()
            how = f"in progress ({holder})" if holder else "interrupted"
            todo = "" if holder else "; `megacpp patch apply` or `revert` finishes it first"
            return (
                f"{journal['operation']} of {journal['started']} by pid {journal['pid']} is {how}: "
                f"{switched} of {len(actions)} files switched{todo}"
            ), actions
    return "", []


def _managed(manifest: Manifest, state: PackageState, path: str) -> FileState:
    """A file of the manifest: after the first n patches, after some of them, or drifted."""
    found = digest(state.installed.site / path)
    entries = manifest.touching(state.package)[path]
    ids = [patch.id for patch, _ in entries]
    stages = [entries[0][1].before, *(file.after for _, file in entries)]
    if found in stages:
        return FileState(path, found, frozenset(ids[: stages.index(found)]))
    record = state.entry.files.get(path) if state.entry else None
    if record is None or found != record["after"]:
        return FileState(path, found, None)
    original = Store(state.installed.site).original(record["before"])
    if record["before"] != ABSENT and original is None:
        return FileState(path, found, None)
    some = frozenset(state.entry.patches).intersection(ids)
    if record["before"] == stages[0]:
        with contextlib.suppress(PatchError):
            made = diffs.compose(original, manifest.chain(state.package, path), some)
            if sha256(made) == found:
                return FileState(path, found, some)
    return FileState(path, found, None, OUTDATED)


def original(manifest: Manifest, state: PackageState, path: str) -> bytes | None:
    """The bytes of a managed file before any patch; None for one that a patch creates.

    From the file itself, the store, or by undoing the patches in it; always checked by digest.
    Raises PatchError when none of the three has them.
    """
    entries = None if state.problem else manifest.touching(state.package).get(path)
    wanted = entries[0][1].before if entries else state.entry.files[path]["before"]
    if wanted == ABSENT:
        return None
    file, live = state.files[path], state.installed.site / path
    if file.found == wanted:
        return live.read_bytes()
    data = Store(state.installed.site).original(wanted)
    if data is None and file.applied and file.found in {known.after for _, known in entries}:
        data = live.read_bytes()
        for name, diff in reversed(manifest.chain(state.package, path)):
            if name in file.applied:
                data = diffs.apply(diffs.reverse(diff), data, name)
    if sha256(data) == wanted:
        return data
    raise PatchError(
        f"{state.package}: {path}: its original bytes (sha256 {wanted}) are not kept any more; "
        f"reinstall it: {state.installed.reinstall}"
    )


def composed(
    manifest: Manifest, state: PackageState, path: str, ids: Collection[str]
) -> bytes | None:
    """A managed file's bytes with the patches `ids`; see `original` and `diffs.compose`."""
    pristine = original(manifest, state, path)
    return diffs.compose(pristine, manifest.chain(state.package, path), ids)


def status(manifest: Manifest, folder: Path | None = None) -> list[dict]:
    """What `megacpp patch status` shows, one dict a package, ready for JSON.

    Keys: package, pinned, installed (version or None), site, problem, interrupted, patches (id,
    state, files that make it drifted, partial or outdated), leftovers (files that only another
    release of the lane knows), complete (nothing is to be done: all applied, or absent).
    """
    rows = []
    for found in (read(manifest, package, folder) for package in manifest.packages):
        patches = []
        for patch in found.patches(manifest):
            condition, files = found.of(patch)
            patches.append({"id": patch.id, "state": condition, "files": files})
        known = {file.path for patch in found.patches(manifest) for file in patch.files}
        outdated = [path for path, file in found.files.items() if file.is_outdated]
        leftovers = [path for path in outdated if path not in known]
        row = {
            "package": found.package,
            "pinned": found.pinned,
            "installed": found.installed.version if found.installed else None,
            "site": str(found.installed.site) if found.installed else None,
            "problem": found.problem,
            "interrupted": found.interrupted,
            "patches": patches,
            "leftovers": leftovers,
        }
        quiet = not (found.problem or found.interrupted or leftovers)
        row["complete"] = quiet and all(patch["state"] == APPLIED for patch in patches)
        rows.append(row)
    return rows
