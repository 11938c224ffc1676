"""`apply` and `revert`: read the state, work out and check every file, then switch."""

import contextlib
import functools
import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_mcore.patching import DependencyError, PatchError, diffs, site, state, transaction
from megacpp_mcore.patching.manifest import ABSENT, Manifest, Patch, sha256
from megacpp_mcore.patching.state import PackageState
from megacpp_mcore.patching.store import LEDGER, Entry, Store, digest, ledger_bytes
from megacpp_mcore.patching.transaction import Plan, Step, no_step

WAIT = 30.0  # seconds to wait for another run on the same site
_SLACK = 1 << 20  # bytes left free for the journal, the ledger and file system blocks


@dataclass(frozen=True)
class Outcome:
    """What a run did. changed: the files it switched. applied: package -> ids now applied."""

    operation: str
    changed: tuple[str, ...]
    applied: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Request:
    """What is asked for. whole: no patch was named."""

    operation: str
    manifest: Manifest
    folder: Path | None
    selected: Sequence[Patch]
    whole: bool


def change(
    operation: str,
    manifest: Manifest,
    folder: Path | None = None,
    only: Collection[str] = (),
    wait: float = WAIT,
    step: Step = no_step,
) -> Outcome:
    """Apply or revert the lane, or the patches named in `only`; those not named stay as they are.

    "apply" puts them on a site. "revert" takes them off, to the original bytes and modes, and also
    what another release of the lane applied. folder: site-packages; None for this interpreter's.
    wait: seconds for another run to end. Idempotent. Raises PatchError when anything is not as it
    must be; nothing has been changed then, except that a run broken off earlier may have been
    finished (its message says so).
    """
    selected = manifest.check_diffs().select(only)
    request = _Request(operation, manifest, folder, selected, not only)
    notes: list[str] = []
    with contextlib.ExitStack() as locks:
        try:
            plans, absent = _locked_plans(request, locks, notes, wait, step)
            for plan in plans:
                transaction.stage(plan, operation, step)
                completed, why = transaction.finish(plan.store, step, again=False)
                if not completed:
                    raise PatchError(f"{plan.store.site}: {why}. Nothing was changed there")
        except OSError as error:  # of reading or locking: the transaction handles its own
            said = [*notes, f"{error}: nothing was changed; {operation} again"]
            raise PatchError("; ".join(said)) from error
        except PatchError as error:
            raise type(error)("; ".join([*notes, str(error)])) from error
        states = [state.read(manifest, package, folder) for package in manifest.packages]
    applied = {
        found.package: tuple(p.id for p in manifest.patches if p.id in found.applied(manifest))
        for found in states
        if found.installed is not None
    }
    changed = [str(p.store.site / each.path) for p in plans for each in p.actions if each.patched]
    return Outcome(operation, tuple(changed), applied, (*notes, *absent))


apply = functools.partial(change, "apply")
revert = functools.partial(change, "revert")


def _locked_plans(
    request: _Request, locks: contextlib.ExitStack, notes: list[str], wait: float, step: Step
) -> tuple[list[Plan], list[str]]:
    """The plans that write something, with every site they write to locked, and nothing unfinished.

    Plans first without any lock, so that a run with nothing to do writes nothing at all.
    """
    stores = {kept.site: kept for kept in state.stores(request.folder) if kept.unfinished()}
    if not stores:
        # What goes wrong here may come of a run beside this one: it is read again with the lock.
        with contextlib.suppress(PatchError, OSError):
            plans, absent = _plans(request)
            if not plans:
                return plans, absent
    for package in {patch.package for patch in request.selected}:
        with contextlib.suppress(PatchError):
            installed = site.find(package, request.folder)
            if installed is not None and _is_writable(installed.site):
                stores.setdefault(installed.site, Store(installed.site))
    for folder, kept in sorted(stores.items()):
        _check_folder(folder)
        locks.enter_context(kept.locked(wait))
        locks.callback(kept.clean)
        if kept.journal.exists():
            _, done = transaction.finish(kept, step)
            notes.append(f"{folder}: {done}")
    return _plans(request)


def _plans(request: _Request) -> tuple[list[Plan], list[str]]:
    """The plans that write, one a site, and a sentence for each package left out because absent.

    Everything is checked and nothing written. Raises PatchError.
    """
    manifest, where = request.manifest, request.folder or "this interpreter's site-packages"
    sites: dict[Path, list[PackageState]] = {}
    absent: list[str] = []
    for package in dict.fromkeys(patch.package for patch in request.selected):
        found = state.read(manifest, package, request.folder)
        leftovers = found.foreign_version and found.files and request.operation == "revert"
        if found.problem and not (leftovers and request.whole):
            raise PatchError(f"{found.problem}. Nothing was changed")
        if found.installed is not None:
            sites.setdefault(found.installed.site, []).append(found)
        elif request.whole:
            count = len(manifest.of(package))
            absent.append(f"{package} is not installed: its {count} patches are left out")
        else:
            raise PatchError(f"{package} {found.pinned} is not installed in {where}")
    if not sites:
        raise PatchError(
            f"none of {', '.join(manifest.packages)} is installed in {where}: there is nothing to "
            f"{request.operation}"
        )
    plans = [_site_plan(request, folder, packages) for folder, packages in sites.items()]
    plans = [plan for plan in plans if plan.actions]
    for plan in plans:
        _check_writable(plan)
    return plans, absent


def _site_plan(request: _Request, folder: Path, packages: Sequence[PackageState]) -> Plan:
    """The packages' files, then their RECORDs, then the ledger, which is the last to change."""
    plan = Plan(Store(folder))
    ledger = plan.store.ledger()
    records = []
    for found in packages:
        path, package = found.installed.record, found.package
        record = (folder / path).read_bytes()
        ledger[package], rows = _plan_files(request, found, plan, record)
        mode = transaction.file_mode(folder / path)
        records.append((path, site.record_with(record, rows), mode, sha256(record), package))
    for each in records:
        plan.add(*each)
    plan.add(LEDGER, ledger_bytes(ledger), 0o644, digest(folder / LEDGER), "")
    return plan


def _plan_files(
    request: _Request, found: PackageState, plan: Plan, record: bytes
) -> tuple[Entry, dict[str, str | None]]:
    """Add a package's files to the plan; returns its new ledger entry and RECORD's new rows."""
    manifest, package, folder = request.manifest, found.package, found.installed.site
    wanted, paths = _targets(request, found)
    site.check_inside(folder, package, [*paths, found.installed.record])
    version = plan.versions[package] = found.installed.version
    old = found.entry or Entry(version)
    new = Entry(version, wanted, {**old.files}, {**old.rows})
    end = "\r\n" if record.split(b"\n", 1)[0].endswith(b"\r") else "\n"
    standing, rows = dict(site.record_lines(record)), {}
    touching = {} if found.problem else manifest.touching(package)
    for path in paths:
        target = original = state.original(manifest, found, path)
        if path in touching:
            target = _composed(manifest, package, path, original, wanted)
        now, pristine = found.files[path].found, sha256(original)
        mode = old.files.get(path, {}).get("mode", transaction.file_mode(folder / path))
        plan.add(path, target, mode, now, package, pristine)
        # RECORD's line for the unpatched file: remembered, standing there now, or worked out.
        row = None if original is None else site.record_row(path, original, end)
        row = old.rows.get(path, standing.get(path) if now == pristine else row)
        if target == original:
            rows[path] = row
            new.files.pop(path, None)
            new.rows.pop(path, None)
        else:
            rows[path] = site.record_row(path, target, end)
            new.files[path] = {"before": pristine, "after": sha256(target), "mode": mode}
            new.rows[path] = row
            plan.originals += [original] if original is not None else []
    return new, rows


def _targets(request: _Request, found: PackageState) -> tuple[list[str], list[str]]:
    """(ids that shall be applied afterwards, paths that may change) of one package.

    Raises PatchError when a file was changed by someone else, or a patch not named stands half
    applied in the way.
    """
    applying, patches = request.operation == "apply", request.manifest.of(found.package)
    named = [patch for patch in patches if patch in request.selected]
    ids = {patch.id for patch in named}
    now = found.applied(request.manifest)
    paths = dict.fromkeys(file.path for patch in named for file in patch.files)
    if request.whole:
        paths, now = found.files, frozenset()
    for path in paths:
        _refuse_drift(found, path, request.whole)
    for patch in () if request.whole else patches:
        in_the_way = paths.keys() & {file.path for file in patch.files}
        if patch not in named and in_the_way and found.of(patch)[0] == state.PARTIAL:
            raise PatchError(
                f"patch {patch.id!r} is {state.PARTIAL} on a file that this would change: name it "
                f"as well, or name none"
            )
    wanted = now | ids if applying else now - ids
    return [patch.id for patch in patches if patch.id in wanted], list(paths)


def _refuse_drift(found: PackageState, path: str, whole: bool) -> None:
    file = found.files[path]
    where = f"{found.package}: {found.installed.site / path}"
    if file.is_outdated and not whole:
        raise PatchError(f"{where} was patched by another release of the lane: name no patch")
    if file.applied is None and not file.is_outdated:
        what = "is missing" if file.found == ABSENT else f"has sha256 {file.found}"
        raise PatchError(
            f"{where} {what}: the lane knows no such state, so someone else changed it. Nothing "
            f"was changed. Undo that change, or reinstall: {found.installed.reinstall}"
        )


def _composed(
    manifest: Manifest, package: str, path: str, original: bytes | None, wanted: list[str]
) -> bytes | None:
    """The file with the patches `wanted`, after each patch was found to leave what it promises."""
    entries, data = manifest.touching(package)[path], original
    last = max((n for n, (patch, _) in enumerate(entries, 1) if patch.id in wanted), default=0)
    for patch, file in entries[:last]:
        data = diffs.apply(patch.diffs[path], data, patch.id)
        if sha256(data) != file.after:
            raise PatchError(
                f"patch {patch.id!r}: files: {path}: sha256_after is {file.after}, but "
                f"{patch.file} leaves {sha256(data)}. Nothing was changed"
            )
    try:
        return diffs.compose(original, manifest.chain(package, path), wanted)
    except DependencyError as error:
        raise PatchError(
            f"{error}. Patches that share lines go on and off together: apply with --only "
            f"{error.needs} as well, or revert both"
        ) from error


def _check_writable(plan: Plan) -> None:
    """Refuse a read-only folder, a package on another file system, and a full disk."""
    folder = plan.store.site
    _check_folder(folder)
    paths = [folder / action.path for action in plan.actions]
    for path in (path for path in paths if path != folder / LEDGER):
        if not path.parent.is_dir():
            relative = path.relative_to(folder)
            raise PatchError(f"{path.parent}: the folder of {relative} does not exist")
        for each in {path.parent, *(file.parent for file in transaction.bytecode(path))}:
            _check_folder(each)
        if path.parent.stat().st_dev != folder.stat().st_dev:
            raise PatchError(
                f"{path.parent} is on another file system than {folder}: its files cannot be "
                f"switched by a rename"
            )
    data = [*(new for new, _ in plan.new if new is not None), *plan.originals]
    old = sum(path.stat().st_size for path in paths if path.exists())
    needed, free = sum(map(len, data)) + old + _SLACK, shutil.disk_usage(folder).free
    if free < needed:
        raise PatchError(
            f"{folder}: {free} bytes are free, {needed} are needed. Nothing was changed"
        )


def _is_writable(folder: Path) -> bool:
    """Whether this user may create and replace files in the folder."""
    return os.access(folder, os.W_OK | os.X_OK)


def _check_folder(folder: Path) -> None:
    if not _is_writable(folder):
        raise PatchError(
            f"{folder} is read-only for this user: nothing was changed. Run as its owner, or use "
            f"an environment of your own (python -m venv) or another folder with --site"
        )
