"""What is applied: read from the files' digests, never from a note that they were changed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from megacpp_mcore.patching import chain, diffs, site, store, transaction
from megacpp_mcore.patching.errors import PatchError
from megacpp_mcore.patching.manifest import ABSENT, Manifest, Patch, sha256

APPLIED = "applied"
NOT_APPLIED = "not applied"
PARTIAL = "partially applied"
DRIFTED = "drifted"
OUTDATED = "applied by another release of the lane"
UNFINISHED = "unfinished"


@dataclass(frozen=True)
class FileState:
    """One file that the lane manages.

    applied: the patches in it, or None when its bytes are none that the lane makes. outdated: they
    are what another release of the lane left, with the original kept. unfinished: they are what a
    run that is not finished found or wrote.
    """

    path: str
    found: str
    applied: frozenset[str] | None
    outdated: bool = False
    unfinished: bool = False


@dataclass
class PackageState:
    """One pinned package in one site.

    problem: why the lane cannot work on it (another version, editable, ...), else "". installed is
    None when it is absent. interrupted: the unfinished or running operation, else "".
    """

    package: str
    pinned: str
    installed: site.Installed | None
    problem: str = ""
    interrupted: str = ""
    entry: store.Entry | None = None
    files: dict[str, FileState] = field(default_factory=dict)

    @property
    def foreign_version(self) -> bool:
        """Whether another version than the pinned one is installed."""
        return self.installed is not None and self.installed.version != self.pinned

    def of(self, patch: Patch) -> tuple[str, list[str]]:
        """One of the six states above, and the files that make it so (drifted, half applied)."""
        files = [self.files[file.path] for file in patch.files]
        unknown = [file for file in files if file.applied is None and not file.outdated]
        drifted = [file.path for file in unknown if not file.unfinished]
        if drifted:
            return DRIFTED, drifted
        if unknown:
            return UNFINISHED, [file.path for file in unknown]
        if any(file.outdated for file in files):
            return OUTDATED, [file.path for file in files if file.outdated]
        without = [file.path for file in files if patch.id not in file.applied]
        if not without:
            return APPLIED, []
        return (NOT_APPLIED, []) if len(without) == len(files) else (PARTIAL, without)

    def applied(self, manifest: Manifest) -> frozenset[str]:
        """The patches whose every file has them."""
        if self.installed is None or self.problem:
            return frozenset()
        patches = manifest.of(self.package)
        return frozenset(patch.id for patch in patches if self.of(patch)[0] == APPLIED)


def read(manifest: Manifest, package: str, folder: Path | None = None) -> PackageState:
    """The state of a pinned package in `folder` (default: where this interpreter finds it).

    Writes nothing. Raises PatchError only for a damaged store.
    """
    pinned = manifest.packages[package]
    try:
        installed = site.find(package, folder)
    except PatchError as error:
        return PackageState(package, pinned, None, problem=str(error))
    if installed is None:
        notes = (_interrupted(kept, package) for kept in stores(folder))
        return PackageState(package, pinned, None, interrupted=next(filter(None, notes), ""))
    kept = store.Store(installed.site)
    state = PackageState(package, pinned, installed, interrupted=_interrupted(kept, package))
    entry = kept.ledger().get(package)
    state.entry = entry if entry and entry.version == installed.version else None
    if state.foreign_version:
        state.problem = f"{package} {installed.version} is installed, the lane is for {pinned}"
    else:
        for path in manifest.touching(package):
            state.files[path] = _managed(manifest, state, path, kept)
        if folder is None:
            state.problem = _shadowed(installed, state.files)
    for path, record in (state.entry.files if state.entry else {}).items():
        if path not in state.files:
            state.files[path] = _leftover(installed, path, record)
    for action in _unfinished_actions(kept, package):
        file = state.files.get(action["path"])
        if file and file.applied is None and file.found in (action["before"], action["after"]):
            state.files[file.path] = replace(file, unfinished=True)
    return state


def stores(folder: Path | None) -> list[store.Store]:
    """Every store there is: in `folder`, or in the folders this interpreter imports from."""
    folders = site.search_path() if folder is None else [folder.resolve()]
    return [store.Store(path) for path in dict.fromkeys(folders) if (path / store.FOLDER).is_dir()]


def _shadowed(installed: site.Installed, paths: Iterable[str]) -> str:
    for path in paths:
        other = site.shadowed_by(installed, path)
        if other is not None:
            return (
                f"{installed.package} is installed in {installed.site}, but this interpreter "
                f"imports {path} from {other}, which the lane does not patch; take it off "
                f"PYTHONPATH, or name the folder with --site"
            )
    return ""


def _unfinished_actions(kept: store.Store, package: str) -> list[dict]:
    journal = transaction.read_journal(kept) or {"actions": []}
    return [action for action in journal["actions"] if action["package"] == package]


def _interrupted(kept: store.Store, package: str) -> str:
    journal, actions = transaction.read_journal(kept), _unfinished_actions(kept, package)
    if journal is None or not actions:
        return ""
    switched = [a for a in actions if transaction.digest(kept.site / a["path"]) == a["after"]]
    holder = kept.holder()
    how = f"in progress ({holder})" if holder else "interrupted"
    return (
        f"{journal['operation']} of {journal['started']} by pid {journal['pid']} is {how}: "
        f"{len(switched)} of {len(actions)} files switched"
        + ("" if holder else "; `megacpp patch apply` or `revert` finishes it first")
    )


def _managed(manifest: Manifest, state: PackageState, path: str, kept: store.Store) -> FileState:
    """A file of the manifest: after the first n patches, after some of them, or drifted."""
    found = transaction.digest(state.installed.site / path)
    entries = manifest.touching(state.package)[path]
    if found == entries[0][1].before:
        return FileState(path, found, frozenset())
    for count, (_, file) in enumerate(entries, 1):
        if found == file.after:
            return FileState(path, found, frozenset(patch.id for patch, _ in entries[:count]))
    record = state.entry.files.get(path) if state.entry else None
    if record is None or found != record["after"]:
        return FileState(path, found, None)
    ids = frozenset(state.entry.patches) & {patch.id for patch, _ in entries}
    original = kept.original(record["before"])
    if record["before"] != ABSENT and original is None:
        return FileState(path, found, None)
    if record["before"] == entries[0][1].before:
        try:
            made = chain.compose(original, manifest.chain(state.package, path), ids)
        except PatchError:
            made = None
        if sha256(made) == found:
            return FileState(path, found, ids)
    return FileState(path, found, None, outdated=True)


def _leftover(installed: site.Installed, path: str, record: Mapping) -> FileState:
    """A file that only the ledger knows: another release of the lane has patched it."""
    found = transaction.digest(installed.site / path)
    if found == record["before"]:
        return FileState(path, found, frozenset())
    return FileState(path, found, None, outdated=found == record["after"])


def original(manifest: Manifest, state: PackageState, path: str, kept: store.Store) -> bytes | None:
    """The bytes of a managed file before any patch; None for one that a patch creates.

    From the file itself, the store, or by undoing the patches in it; always checked by digest.
    Raises PatchError when none of the three has them.
    """
    entries = None if state.problem else manifest.touching(state.package).get(path)
    file = state.files[path]
    record = state.entry.files.get(path) if state.entry else None
    wanted = entries[0][1].before if entries else record["before"]
    if wanted == ABSENT:
        return None
    if file.found == wanted:
        return (state.installed.site / path).read_bytes()
    data = kept.original(wanted)
    if data is not None:
        return data
    if file.applied and file.found in {known.after for _, known in entries}:
        data = (state.installed.site / path).read_bytes()
        for name, diff in reversed(manifest.chain(state.package, path)):
            if name in file.applied:
                data = diffs.apply(diffs.reverse(diff), data, name)
        if sha256(data) == wanted:
            return data
    raise PatchError(
        f"{state.package}: {path}: its original bytes (sha256 {wanted}) are not kept any more; "
        f"reinstall it: pip install --force-reinstall --no-deps "
        f"{state.package}=={state.installed.version}"
    )


def status(manifest: Manifest, folder: Path | None = None) -> list[dict]:
    """What `megacpp patch status` shows, one dict a package, ready for JSON.

    Keys: package, pinned, installed (version or None), site, problem, interrupted, patches (id,
    state, files that make it drifted, partial or outdated), leftovers (files that only another
    release of the lane knows), complete (nothing is to be done: all applied, or absent).
    """
    result = []
    for package, pinned in manifest.packages.items():
        found = read(manifest, package, folder)
        readable = found.installed is not None and not found.problem
        conditions = {patch.id: found.of(patch) for patch in manifest.of(package) if readable}
        leftovers = [
            path
            for path, file in found.files.items()
            if file.outdated and (not readable or path not in manifest.touching(package))
        ]
        quiet = not (found.problem or found.interrupted or leftovers)
        result.append(
            {
                "package": package,
                "pinned": pinned,
                "installed": found.installed.version if found.installed else None,
                "site": str(found.installed.site) if found.installed else None,
                "problem": found.problem,
                "interrupted": found.interrupted,
                "patches": [
                    {"id": name, "state": condition, "files": files}
                    for name, (condition, files) in conditions.items()
                ],
                "leftovers": leftovers,
                "complete": quiet and all(state == APPLIED for state, _ in conditions.values()),
            }
        )
    return result
