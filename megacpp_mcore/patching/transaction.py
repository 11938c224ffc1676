"""Several files switched as one: staged, journaled, renamed; a crash is finished by the next run.

Everything new is written to `stage/` and synced first. Writing `journal.json` is the point of no
return: before it the site is untouched; after it `finish` can always complete the switch, in this
process or in a later one, because both digests of every file are in the journal and every new file
is staged. `finish` is the only code that changes the site, so recovering is no special case.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacpp_mcore.patching.errors import InterruptedRun, PatchError
from megacpp_mcore.patching.manifest import ABSENT, sha256
from megacpp_mcore.patching.store import Store, sync_folder, write_durably

# Called before each single change to the disk with its name: tests end the process there.
Step = Callable[[str], None]


def no_step(name: str) -> None:
    """The Step of every run but a test's."""


@dataclass(frozen=True)
class Write:
    """One file to switch. package: "" for the lane's ledger; patched: not mere bookkeeping.

    before, original: digests of the file as it is now, and as the wheel has it.
    """

    path: str
    before: str
    original: str
    data: bytes | None  # None: the file goes
    mode: int
    package: str
    patched: bool


def digest(path: Path) -> str:
    """The sha256 of a file, "absent" when there is none."""
    try:
        return sha256(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT


def stage(
    store: Store,
    operation: str,
    versions: Mapping[str, str],
    writes: Sequence[Write],
    originals: Sequence[bytes],
    step: Step = no_step,
) -> None:
    """Write every new file beside the old ones, then the journal. Needs the lock.

    versions: package -> installed version. Raises PatchError, with nothing changed, when the disk
    refuses.
    """
    try:
        shutil.rmtree(store.stage, ignore_errors=True)
        store.stage.mkdir()
        for data in originals:
            step("keep an original")
            store.keep(data)
        for number, write in enumerate(writes):
            if write.data is not None:
                step(f"stage {write.path}")
                _stage_one(store, number, write)
        sync_folder(store.stage)
        actions = [
            {
                "path": write.path,
                "before": write.before,
                "original": write.original,
                "after": sha256(write.data),
                "package": write.package,
                "patched": write.patched,
                "staged": str(number),
            }
            for number, write in enumerate(writes)
        ]
        journal = {
            "schema": 1,
            "operation": operation,
            "pid": os.getpid(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "versions": dict(versions),
            "actions": actions,
        }
        step("write the journal")
        write_durably(store.journal, json.dumps(journal, indent=1).encode())
    except OSError as error:
        with contextlib.suppress(OSError):  # if it stays, status says so and the next run finishes
            store.journal.unlink(missing_ok=True)
        raise PatchError(
            f"{store.site}: nothing was changed there: staging failed: {error}"
        ) from error


def _stage_one(store: Store, number: int, write: Write) -> None:
    path = store.stage / str(number)
    with open(path, "wb") as file:
        file.write(write.data)
        os.fchmod(file.fileno(), write.mode)
        try:
            old = os.stat(store.site / write.path)
        except FileNotFoundError:
            old = None
        if old and os.geteuid() == 0:  # root works on an environment of someone else
            os.fchown(file.fileno(), old.st_uid, old.st_gid)
        file.flush()
        os.fsync(file.fileno())
    # A .pyc counts as current when its source's whole second and size are the ones it names.
    if old and int(old.st_mtime) >= int(os.stat(path).st_mtime):
        os.utime(path, (old.st_atime, int(old.st_mtime) + 1))


def read_journal(store: Store) -> dict[str, Any] | None:
    """The unfinished run's journal, or None. Raises PatchError when it is damaged."""
    try:
        journal = json.loads(store.journal.read_bytes())
        if journal["schema"] != 1:
            raise ValueError(f"schema {journal['schema']} is not known")
        keys = {"path", "before", "original", "after", "package", "patched", "staged"}
        if not all(keys == action.keys() for action in journal["actions"]):
            raise KeyError("actions")
        _ = journal["operation"], journal["pid"], journal["started"], journal["versions"]
        return journal
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PatchError(
            f"{store.journal}: cannot be read ({error}); reinstall the packages that the lane "
            f"patches, then delete {store.path}"
        ) from error


def finish(
    store: Store, installed_version: Callable[[str], str | None], step: Step = no_step
) -> tuple[bool, str]:
    """Complete the run that the journal describes. Returns (whether it was completed, a sentence).

    installed_version: package -> version now installed in this site. A package that was removed or
    changed since is left alone. A run that cannot be completed and of which no file is switched
    (the package was reinstalled) is dropped. Needs the lock and a journal. Raises PatchError when
    someone else changed a file while others are switched.
    """
    journal = read_journal(store)
    name = f"the {journal['operation']} that pid {journal['pid']} began"
    actions = [
        action
        for action in journal["actions"]
        if not action["package"]
        or installed_version(action["package"]) == journal["versions"].get(action["package"])
    ]
    found = {action["path"]: digest(store.site / action["path"]) for action in actions}
    patched = [action for action in actions if action["patched"]]
    blocked = next(filter(None, (_blocked(store, each, found) for each in patched)), "")
    if not patched and len(actions) < len(journal["actions"]):
        blocked = "the package is not the one it was"
    # A file that a patch creates may survive a reinstall, so it does not show that none took place.
    switched = [a for a in patched if found[a["path"]] == a["after"] != a["original"] != ABSENT]
    if blocked and switched:
        raise PatchError(
            f"{name} was interrupted and cannot be finished: {blocked}. Reinstall the package (pip "
            f"install --force-reinstall --no-deps), then run this again"
        )
    try:
        if not blocked:
            # RECORD may be someone else's by now; the next plan puts its rows right.
            possible = [action for action in actions if not _blocked(store, action, found)]
            _switch(store, possible, found, step)
        step("remove the journal")
        store.journal.unlink()
        sync_folder(store.path)
    except OSError as error:
        raise InterruptedRun(
            f"{name} was interrupted: {error}; `megacpp patch apply` or `revert` finishes it first"
        ) from error
    if blocked:
        return False, f"dropped {name}, of which no file was switched: {blocked}"
    return True, f"finished {name}"


def _blocked(store: Store, action: dict, found: Mapping[str, str]) -> str:
    """Why a file cannot be switched: changed by someone else, or no staged copy; else ""."""
    path, now = action["path"], found[action["path"]]
    if now not in (action["before"], action["after"]):
        return f"{path} was changed by someone else since"
    if action["after"] not in (ABSENT, now, digest(store.stage / action["staged"])):
        return f"the staged copy of {path} is missing or damaged"
    return ""


def _switch(store: Store, actions: list[dict], found: Mapping[str, str], step: Step) -> None:
    for action in actions:
        path = store.site / action["path"]
        if found[action["path"]] != action["after"]:
            step(f"switch {action['path']}")
            if action["after"] == ABSENT:
                path.unlink()
            else:
                os.replace(store.stage / action["staged"], path)
            sync_folder(path.parent)
        if path.suffix == ".py":
            step(f"remove the .pyc of {action['path']}")
            for file in bytecode(path):
                file.unlink(missing_ok=True)


def bytecode(source: Path) -> list[Path]:
    """Every .pyc of a module: of any interpreter, optimisation level and cache prefix.

    They must go with their source. Python itself would notice most changed sources, but never
    checks an unchecked hash-based .pyc.
    """
    folders = {source.parent / "__pycache__"}
    folders.add(Path(importlib.util.cache_from_source(str(source))).parent)
    return [file for folder in folders for file in folder.glob(f"{source.stem}.*.pyc")]
