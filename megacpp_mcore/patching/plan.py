"""What a run would write, worked out and checked before anything is written."""

import os
import shutil
import stat
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from megacpp_mcore.patching import chain, site, state
from megacpp_mcore.patching.errors import DependencyError, PatchError
from megacpp_mcore.patching.manifest import ABSENT, Manifest, Patch, sha256
from megacpp_mcore.patching.state import PackageState
from megacpp_mcore.patching.store import LEDGER, Entry, Store, ledger_bytes
from megacpp_mcore.patching.transaction import Write, bytecode

_SLACK = 1 << 20  # bytes left free for the journal, the ledger and file system blocks


@dataclass
class Plan:
    """The writes of one site, in order; `originals` are the bytes to keep for a revert."""

    store: Store
    versions: dict[str, str] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)
    originals: list[bytes] = field(default_factory=list)


def targets(
    manifest: Manifest,
    found: PackageState,
    operation: str,
    selected: Collection[Patch],
    whole: bool,
) -> tuple[list[str], list[str]]:
    """(ids that shall be applied afterwards, paths that may change) of one package.

    operation: "apply" or "revert". whole: no patch was named. Raises PatchError when a file was
    changed by someone else, or a patch not named stands half applied in the way.
    """
    named = [patch for patch in selected if patch.package == found.package]
    if whole:
        paths = list(found.files)
        wanted = {patch.id for patch in named} if operation == "apply" else set()
    else:
        paths = list(dict.fromkeys(file.path for patch in named for file in patch.files))
        ids = {patch.id for patch in named}
        now = found.applied(manifest)
        wanted = now | ids if operation == "apply" else now - ids
    for path in paths:
        _refuse_drift(found, path, whole)
    for patch in () if whole or found.problem else manifest.of(found.package):
        condition, _ = found.of(patch)
        in_the_way = {file.path for file in patch.files}.intersection(paths)
        if patch not in named and condition == state.PARTIAL and in_the_way:
            raise PatchError(
                f"patch {patch.id!r} is {condition} on a file that this would change: name it as "
                f"well, or name none"
            )
    return [patch.id for patch in manifest.of(found.package) if patch.id in wanted], paths


def _refuse_drift(found: PackageState, path: str, whole: bool) -> None:
    file = found.files[path]
    where = f"{found.package}: {found.installed.site / path}"
    if file.outdated and not whole:
        raise PatchError(f"{where} was patched by another release of the lane: name no patch")
    if file.applied is None and not file.outdated:
        what = "is missing" if file.found == ABSENT else f"has sha256 {file.found}"
        raise PatchError(
            f"{where} {what}: the lane knows no such state, so someone else changed it. Nothing "
            f"was changed. Undo that change, or reinstall: pip install --force-reinstall --no-deps "
            f"{found.package}=={found.installed.version}"
        )


def build(
    manifest: Manifest,
    found: Iterable[PackageState],
    operation: str,
    selected: Collection[Patch],
    whole: bool,
) -> list[Plan]:
    """One plan a site, everything checked. Raises PatchError; nothing has been written.

    found: the installed packages that the operation works on.
    """
    plans: dict[Path, Plan] = {}
    ledgers: dict[Path, dict[str, Entry]] = {}
    records: dict[Path, list[Write]] = {}
    for package in found:
        folder = package.installed.site
        plan = plans.setdefault(folder, Plan(Store(folder)))
        ledger = ledgers.setdefault(folder, plan.store.ledger())
        wanted, paths = targets(manifest, package, operation, selected, whole)
        site.check_inside(package.installed, [*paths, package.installed.record])
        plan.versions[package.package] = package.installed.version
        ledger[package.package], record = _package(manifest, package, plan, wanted, paths)
        records.setdefault(folder, []).extend(record)
    for folder, plan in plans.items():
        plan.writes += records[folder]
        _add_ledger(plan, ledgers[folder])
        if plan.writes:
            check_writable(plan)
    return list(plans.values())


def _package(
    manifest: Manifest, found: PackageState, plan: Plan, wanted: list[str], paths: list[str]
) -> tuple[Entry, list[Write]]:
    """Add the package's files to the plan; returns its new ledger entry and RECORD's write."""
    old = found.entry or Entry(found.installed.version)
    new = Entry(
        found.installed.version,
        wanted,
        {path: value for path, value in old.files.items() if path not in paths},
        {path: value for path, value in old.rows.items() if path not in paths},
    )
    record_path = found.installed.site / found.installed.record
    record = record_path.read_bytes()
    rows = site.record_rows(record)
    end = "\r\n" if record.split(b"\n", 1)[0].endswith(b"\r") else "\n"
    changed_rows: dict[str, str | None] = {}
    touching = manifest.touching(found.package) if not found.problem else {}
    for path in paths:
        original = state.original(manifest, found, path, plan.store)
        target = original
        if path in touching:
            target = _compose(manifest, found.package, path, original, wanted)
        now = found.files[path].found
        mode = old.files.get(path, {}).get("mode", _mode(found.installed.site / path))
        pristine = sha256(original)
        if sha256(target) != now:
            plan.writes.append(Write(path, now, pristine, target, mode, found.package, True))
        row = _original_row(old, rows, path, original, now, end)
        if target == original:
            changed_rows[path] = row
            continue
        new.files[path] = {"before": pristine, "after": sha256(target), "mode": mode}
        new.rows[path] = row
        changed_rows[path] = site.record_row(path, target, end)
        if original is not None:
            plan.originals.append(original)
    changed = site.record_with(record, changed_rows)
    if changed == record:
        return new, []
    mode = _mode(record_path)
    now = sha256(record)
    return new, [Write(found.installed.record, now, now, changed, mode, found.package, False)]


def _compose(
    manifest: Manifest, package: str, path: str, original: bytes | None, wanted: list[str]
) -> bytes | None:
    try:
        return chain.compose(original, manifest.chain(package, path), wanted)
    except DependencyError as error:
        raise PatchError(
            f"{error}. Patches that share lines go on and off together: apply with --only "
            f"{error.needs} as well, or revert both"
        ) from error


def _original_row(
    old: Entry, rows: dict[str, str], path: str, original: bytes | None, now: str, end: str
) -> str | None:
    """RECORD's line for the unpatched file: remembered, standing there now, or worked out."""
    if path in old.rows:
        return old.rows[path]
    if now == sha256(original):
        return rows.get(path)
    return None if original is None else site.record_row(path, original, end)


def _mode(path: Path) -> int:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return 0o644


def _add_ledger(plan: Plan, ledger: dict[str, Entry]) -> None:
    path = plan.store.site / LEDGER
    before = path.read_bytes() if path.exists() else None
    after = ledger_bytes(ledger)
    if before != after:
        now = sha256(before)
        plan.writes.append(Write(LEDGER, now, now, after, 0o644, "", False))


def check_writable(plan: Plan) -> None:
    """Refuse a read-only folder, a package on another file system, and a full disk."""
    folder = plan.store.site
    check_folder(folder)
    device = folder.stat().st_dev
    for write in plan.writes:
        parent = (folder / write.path).parent
        if write.path == LEDGER:
            continue
        if not parent.is_dir():
            raise PatchError(f"{parent}: the folder of {write.path} does not exist")
        check_folder(parent)
        for cache in {file.parent for file in bytecode(folder / write.path)}:
            check_folder(cache)
        if parent.stat().st_dev != device:
            raise PatchError(
                f"{parent} is on another file system than {folder}: its files cannot be switched "
                f"by a rename"
            )
    needed = sum(len(write.data or b"") for write in plan.writes) + sum(map(len, plan.originals))
    free = shutil.disk_usage(folder).free
    if free < needed + _SLACK:
        raise PatchError(
            f"{folder}: {free} bytes are free, {needed + _SLACK} are needed. Nothing was changed"
        )


def check_folder(folder: Path) -> None:
    """Refuse a folder in which this user may not create and replace files."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PatchError(
            f"{folder} is read-only for this user: nothing was changed. Run as its owner, or use "
            f"an environment of your own (python -m venv) or another folder with --site"
        )
