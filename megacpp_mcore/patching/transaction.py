"""Several files of a site switched as one; a crash is finished, or undone, by the next run.

Everything new is staged and synced first. Writing the journal is the point of no return: before it
the site is untouched; after it `finish` completes the switch, in this process or in a later one, or
undoes it where it cannot go on. `finish` is the only code that changes the site, so recovering is
no special case.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import stat
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from megacpp_mcore.files import sync, write_atomically
from megacpp_mcore.patching import InterruptedRun, PatchError, site
from megacpp_mcore.patching.manifest import ABSENT, sha256
from megacpp_mcore.patching.store import Action, Entry, Journal, Kept, Store, digest


class Switch(NamedTuple):
    """One action of a plan, the new bytes (None: the file goes) and their mode."""

    action: Action
    data: bytes | None
    mode: int


@dataclass
class Plan:
    """The switches of one site, in order.

    ledger: as it shall be. versions: package -> installed version. originals: the bytes to keep
    for a revert.
    """

    store: Store
    ledger: dict[str, Entry]
    versions: dict[str, str] = field(default_factory=dict)
    switches: list[Switch] = field(default_factory=list)
    originals: list[bytes] = field(default_factory=list)

    def add(
        self, path: str, data: bytes | None, before: str, package: str, kept: Kept | None = None
    ) -> None:
        """One more file, unless it is as it shall be. kept: None for bookkeeping."""
        after, staged = sha256(data), str(len(self.switches))
        if before != after:
            original = kept.before if kept else before
            action = Action(path, before, original, after, package, kept is not None, staged)
            mode = kept.mode if kept else file_mode(self.store.site / path)
            self.switches.append(Switch(action, data, mode))


def file_mode(path: Path) -> int:
    """The permission bits of a file, 0o644 when there is none."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return 0o644


def stage(plan: Plan, operation: str) -> None:
    """Write every new file, and a copy of the one it replaces, to `stage/`; then the journal.

    Needs the lock. Raises PatchError, with nothing changed, when the disk refuses.
    """
    store = plan.store
    started = time.strftime("%Y-%m-%d %H:%M:%S %z")
    actions = [switch.action for switch in plan.switches]
    journal = Journal(operation, os.getpid(), started, plan.versions, actions)
    try:
        shutil.rmtree(store.stage, ignore_errors=True)
        store.stage.mkdir()
        for data in plan.originals:
            store.keep(data)
        for action, data, mode in plan.switches:
            old, new = store.site / action.path, store.stage / action.staged
            if data is not None:
                _stage_one(new, old, data, mode)
            if action.before != ABSENT:
                _stage_one(new.with_suffix(".old"), old, old.read_bytes(), file_mode(old))
        sync(store.stage)
        write_atomically(store.journal, json.dumps({"schema": 1, **asdict(journal)}, indent=1))
    except OSError as error:
        with contextlib.suppress(OSError):  # if it stays, status says so and the next run finishes
            store.journal.unlink(missing_ok=True)
        raise PatchError(
            f"{store.site}: nothing was changed there: staging failed: {error}"
        ) from error


def _stage_one(path: Path, target: Path, data: bytes, mode: int) -> None:
    with open(path, "wb") as file:
        file.write(data)
        os.fchmod(file.fileno(), mode)
        try:
            old = target.stat()
        except FileNotFoundError:
            old = None
        if old and os.geteuid() == 0:  # root works on an environment of someone else
            os.fchown(file.fileno(), old.st_uid, old.st_gid)
        file.flush()
        os.fsync(file.fileno())
    # A .pyc counts as current when its source's whole second and size are the ones it names.
    if old and int(old.st_mtime) >= int(path.stat().st_mtime):
        os.utime(path, (old.st_atime, int(old.st_mtime) + 1))


def finish(store: Store, again: bool = True) -> tuple[bool, str]:
    """Complete the run that the journal describes. Returns (whether it was completed, a sentence).

    again: this finishes an earlier run. A package that was removed or changed since is left alone.
    Needs the lock and a journal. A run that cannot be completed is dropped when none of its files
    is switched (the package was reinstalled), and undone when a staged file is damaged or the
    system refuses a file (for lack of a right, or once again). Raises PatchError when someone else
    changed a file while others are switched, InterruptedRun when the disk fails.
    """
    journal = store.read_journal()
    run = f"the {journal.operation} that pid {journal.pid} began"
    versions = journal.versions.items()
    there = {"", *(name for name, version in versions if _version(store, name) == version)}
    actions = [each for each in journal.actions if each.package in there]
    for each in actions:
        site.check_inside(store.site, each.package, [each.path])
    back = [
        replace(each, before=each.after, after=each.before, staged=f"{each.staged}.old")
        for each in reversed(actions)
    ]
    patched, unpatched = ([each for each in way if each.patched] for way in (actions, back))
    blocked = _blocked(store, *patched)
    if not patched and len(actions) < len(journal.actions):
        blocked = "the package is not the one it was"
    # A file that a patch creates may survive a reinstall, so it does not show that none took place.
    undo = blocked and any(
        digest(store.site / each.path) == each.after != each.original != ABSENT for each in patched
    )
    if undo and _blocked(store, *unpatched):
        raise PatchError(
            f"{run} was interrupted and cannot be finished: {blocked}. Reinstall the package (pip "
            f"install --force-reinstall --no-deps), then run this again"
        )
    try:
        try:
            _switch(store, () if blocked else actions)
        except OSError as error:
            final = again or isinstance(error, PermissionError)
            if not final or _blocked(store, *unpatched):
                raise
            blocked, undo = str(error), True
        _switch(store, back if undo else ())
        store.journal.unlink()
        sync(store.path)
    except OSError as error:
        raise InterruptedRun(
            f"{run} was interrupted: {error}; `megacpp patch apply` or `revert` finishes it first"
        ) from error
    if undo:
        return False, f"undid {run}, which cannot be finished: {blocked}"
    if blocked:
        return False, f"dropped {run}, of which no file was switched: {blocked}"
    return True, f"finished {run}"


def _version(store: Store, package: str) -> str | None:
    """The version now installed; None for a checkout or half an install as well."""
    with contextlib.suppress(PatchError):
        found = site.find(package, store.site)
        return found.version if found else None


def _blocked(store: Store, *actions: Action) -> str:
    """Why one of them cannot be switched: changed by someone else, or no staged copy; else ""."""
    for action in actions:
        now = digest(store.site / action.path)
        if now not in (action.before, action.after):
            return f"{action.path} was changed by someone else since"
        if action.after not in (ABSENT, now, digest(store.stage / action.staged)):
            return f"the staged copy of {action.path} is missing or damaged"
    return ""


def _switch(store: Store, actions: Sequence[Action]) -> None:
    # RECORD may be someone else's by now; the next plan puts its rows right.
    for action in [each for each in actions if not _blocked(store, each)]:
        path = store.site / action.path
        if digest(path) != action.after:
            if action.after == ABSENT:
                path.unlink()
            else:
                os.replace(store.stage / action.staged, path)
            sync(path.parent)
        for file in bytecode(path) if path.suffix == ".py" else ():
            file.unlink(missing_ok=True)


def bytecode(source: Path) -> list[Path]:
    """Every .pyc of a module: of any interpreter, optimisation level and cache prefix.

    They must go with their source. Python itself would notice most changed sources, but never
    checks an unchecked hash-based .pyc.
    """
    folders = {source.parent / "__pycache__"}
    folders.add(Path(importlib.util.cache_from_source(str(source))).parent)
    return [file for folder in folders for file in folder.glob(f"{source.stem}.*.pyc")]
