"""`apply` and `revert`: read the state, work out and check every file, then switch."""

import contextlib
import functools
import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_mcore.patching import PatchError, site, state, store, transaction
from megacpp_mcore.patching.manifest import ABSENT, Manifest, Patch, sha256
from megacpp_mcore.patching.state import OUTDATED, PARTIAL, PackageState
from megacpp_mcore.patching.store import LEDGER, Entry, Kept, Store, digest, ledger_bytes
from megacpp_mcore.patching.transaction import Plan, file_mode

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
    wait: float = 30.0,
) -> Outcome:
    """Apply or revert the lane, or the patches named in `only`; those not named stay as they are.

    "apply" puts them on a site. "revert" takes them off, to the original bytes and modes, and also
    what another release of the lane applied. folder: site-packages; None for this interpreter's.
    wait: seconds for another run to end. Idempotent. Raises PatchError when anything is not as it
    must be; nothing has been changed then, except that a run broken off earlier may have been
    finished (its message says so).
    """
    request = _Request(operation, manifest, folder, manifest.select(only), not only)
    notes: list[str] = []
    with contextlib.ExitStack() as locks:
        try:
            plans = _locked_plans(request, locks, notes, wait)
            for plan in plans:
                transaction.stage(plan, operation)
                completed, why = transaction.finish(plan.store, again=False)
                if not completed:
                    raise PatchError(f"{plan.store.site}: {why}. Nothing was changed there")
        except OSError as error:  # of reading or locking: the transaction handles its own
            said = [*notes, f"{error}: nothing was changed; {operation} again"]
            raise PatchError("; ".join(said)) from error
        except PatchError as error:
            raise type(error)("; ".join([*notes, str(error)])) from error
        states = [state.read(manifest, package, folder) for package in manifest.packages]
    for found in states if request.whole else ():
        if found.installed is None and (count := len(manifest.of(found.package))):
            notes.append(f"{found.package} is not installed: its {count} patches are left out")
    applied = {found.package: found.applied for found in states if found.installed}
    switched = [(plan.store.site, each.action) for plan in plans for each in plan.switches]
    changed = [str(where / action.path) for where, action in switched if action.patched]
    return Outcome(operation, tuple(changed), applied, tuple(notes))


apply = functools.partial(change, "apply")
revert = functools.partial(change, "revert")


def _locked_plans(
    request: _Request, locks: contextlib.ExitStack, notes: list[str], wait: float
) -> list[Plan]:
    """The plans that write something, with every site they write to locked, and nothing unfinished.

    Plans first without any lock, so that a run with nothing to do writes nothing at all.
    """
    stores = {kept.site: kept for kept in state.stores(request.folder) if kept.unfinished()}
    if not stores:
        # A concurrent run may cause an error here: the state is read again under the lock.
        with contextlib.suppress(PatchError, OSError):
            if not _plans(request):
                return []
    for package in {patch.package for patch in request.selected}:
        with contextlib.suppress(PatchError):
            if (installed := site.find(package, request.folder)) is not None:
                _check_folder(installed.site)
                stores.setdefault(installed.site, Store(installed.site))
    for folder, kept in sorted(stores.items()):
        _check_folder(folder)
        locks.enter_context(kept.locked(wait))
        locks.callback(kept.clean)
        if kept.journal.exists():
            notes.append(f"{folder}: {transaction.finish(kept)[1]}")
    return _plans(request)


def _plans(request: _Request) -> list[Plan]:
    """The plans that write, one a site. Everything is checked and nothing written.

    Raises PatchError; a package that is absent is left out where no patch is named.
    """
    manifest, where = request.manifest, request.folder or "this interpreter's site-packages"
    plans: dict[Path, Plan] = {}
    for package in dict.fromkeys(patch.package for patch in request.selected):
        found = state.read(manifest, package, request.folder)
        leftovers = not found.links and found.files and request.operation == "revert"
        if found.problem and not (leftovers and request.whole):
            raise PatchError(f"{found.problem}. Nothing was changed")
        if found.installed is not None:
            kept = Store(found.installed.site)
            plan = plans.setdefault(kept.site, Plan(kept, kept.ledger()))
            _plan_package(request, found, plan)
        elif not request.whole:
            raise PatchError(f"{package} {found.pinned} is not installed in {where}")
    if not plans:
        raise PatchError(
            f"none of {', '.join(manifest.packages)} is installed in {where}: there is nothing to "
            f"{request.operation}"
        )
    for folder, plan in plans.items():  # the packages' files, their RECORDs, and last the ledger
        plan.add(LEDGER, ledger_bytes(plan.ledger), digest(folder / LEDGER), "")
        plan.switches.sort(key=lambda switch: not switch.action.patched)
    writing = [plan for plan in plans.values() if plan.switches]
    for plan in writing:
        _check_writable(plan)
    return writing


def _plan_package(request: _Request, found: PackageState, plan: Plan) -> None:
    """Add a package's files, its RECORD and its ledger entry to the plan."""
    package, folder, old = found.package, found.installed.site, found.entry
    wanted, paths = _targets(request, found)
    record, rows = site.Record(found.installed), {}
    site.check_inside(folder, package, [*paths, record.path])
    new = Entry(found.installed.version, wanted, {**old.files}, {**old.rows})
    for path in paths:
        original, now = found.original(path), found.files[path].found
        target = found.composed(path, wanted) if path in found.links else original
        known = new.files.pop(path, None)
        mode = known.mode if known else file_mode(folder / path)
        kept = Kept(sha256(original), sha256(target), mode)
        plan.add(path, target, now, package, kept)
        # RECORD's line for the unpatched file: remembered, standing there now, or worked out.
        row = record.rows.get(path) if now == kept.before else record.row(path, original)
        row = rows[path] = new.rows.pop(path, row)
        if target != original:
            rows[path] = record.row(path, target)
            new.files[path], new.rows[path] = kept, row
            plan.originals += [original] if original is not None else []
    plan.add(record.path, record.with_rows(rows), digest(folder / record.path), package)
    plan.versions[package], plan.ledger[package] = new.version, new


def _targets(request: _Request, found: PackageState) -> tuple[list[str], list[str]]:
    """(ids that shall be applied afterwards, paths that may change) of one package.

    Raises PatchError when a file was changed by someone else, or a patch not named stands half
    applied in the way.
    """
    patches, now = request.manifest.of(found.package), found.applied
    named = [patch for patch in patches if patch in request.selected]
    paths = dict.fromkeys(file.path for patch in named for file in patch.files)
    if request.whole:
        paths, now = found.files, ()
    for path in paths:
        file, where = found.files[path], f"{found.package}: {found.installed.site / path}"
        if file.strange == OUTDATED and not request.whole:
            raise PatchError(f"{where} was patched by another release of the lane: name no patch")
        if file.strange not in ("", OUTDATED):
            known = {ABSENT: "is missing", store.UNREADABLE: "cannot be read"}
            raise PatchError(
                f"{where} {known.get(file.found, f'has sha256 {file.found}')}: the lane knows no "
                f"such state, so someone else changed it. Nothing was changed. Undo that change, "
                f"or reinstall: {found.installed.reinstall}"
            )
    for patch in () if request.whole else patches:
        in_the_way = paths.keys() & {file.path for file in patch.files}
        if patch not in named and in_the_way and found.of(patch)[0] == PARTIAL:
            raise PatchError(
                f"patch {patch.id!r} is {PARTIAL} on a file that this would change: name it as "
                f"well, or name none"
            )
    on = request.operation == "apply"  # those not named stay as they are
    wanted = [each.id for each in patches if (on if each in named else each.id in now)]
    return wanted, list(paths)


def _check_writable(plan: Plan) -> None:
    """Refuse a read-only folder, a package on another file system, and a full disk."""
    folder = plan.store.site
    _check_folder(folder)
    paths = [folder / action.path for action, *_ in plan.switches]
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
    new = sum(
        len(data or b"") for data in [*(each.data for each in plan.switches), *plan.originals]
    )
    old = sum(path.stat().st_size for path in paths if path.exists())
    needed, free = new + old + _SLACK, shutil.disk_usage(folder).free
    if free < needed:
        said = f"{folder}: {free} bytes are free, {needed} are needed. Nothing was changed"
        raise PatchError(said)


def _check_folder(folder: Path) -> None:
    """Refuse a folder in which this user may not create and replace files."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PatchError(
            f"{folder} is read-only for this user: nothing was changed. Run as its owner, or use "
            f"an environment of your own (python -m venv) or another folder with --site"
        )
