"""Several files of a site switched as one, under one lock; a crash is finished by the next run.

`<site>/.megacpp_patches/` exists while a patch is applied or a run is unfinished:
  state.json         the ledger: what of the original cannot be told from the files (see Entry)
  pristine/<sha256>  original files
  lock               held by flock during a run; has the holder's pid and host
  stage/             during a run: N, the N-th new file, and N.old, the file that it replaces
  journal.json       during the switch: both digests of every file
Nothing in it is believed without comparing digests, and no path in it without the manifest's rules.

Everything new is staged and synced first. Writing the journal is the point of no return: before it
the site is untouched; after it `finish` completes the switch, in this process or in a later one, or
undoes it where it cannot go on. `finish` is the only code that changes the site, so recovering is
no special case.
"""

import contextlib
import errno
import fcntl
import importlib.util
import json
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megacpp_mcore.patching import InterruptedRun, PatchError
from megacpp_mcore.patching.manifest import ABSENT, FOLDER, is_digest, is_target, sha256
from megacpp_mcore.patching.site import check_inside

LEDGER = f"{FOLDER}/state.json"

# Called before each single change to the disk with its name: tests end the process there.
Step = Callable[[str], None]


def no_step(name: str) -> None:
    """The Step of every run but a test's."""


@dataclass
class Entry:
    """The ledger's record of one package.

    patches: ids in order. files: path -> {"before", "after": digests, "mode": of the original}.
    rows: path -> its original line in RECORD, None when it had none.
    """

    version: str
    patches: list[str] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Action:
    """One file to switch, as the journal has it.

    before, original, after: digests of the file as it is now, as the wheel has it, as it shall be.
    package: "" for the lane's ledger. patched: not mere bookkeeping (RECORD, the ledger). staged:
    the new file's name in `stage/`.
    """

    path: str
    before: str
    original: str
    after: str
    package: str
    patched: bool
    staged: str

    def __post_init__(self) -> None:
        """Raises ValueError when a damaged or planted journal could lead out of the site by it."""
        known = self.path == LEDGER if self.package == "" else is_target(self.path)
        if self.package and not self.patched:
            known = re.fullmatch(r"[^/\\\s]+\.dist-info/RECORD", self.path)
        if not known or type(self.patched) is not bool or not isinstance(self.package, str):
            raise ValueError(f"{self.path!r} is not a file that the lane writes")
        digests = map(is_digest, (self.before, self.original, self.after))
        if not all(digests) or not re.fullmatch(r"\d+(\.old)?", self.staged):
            raise ValueError(f"{self.path}: a digest or the staged file's name is no such")


@dataclass
class Plan:
    """The switches of one site, in order. new: bytes (None: the file goes) and mode of each.

    versions: package -> installed version. originals: the bytes to keep for a revert.
    """

    store: "Store"
    versions: dict[str, str] = field(default_factory=dict)
    actions: list[Action] = field(default_factory=list)
    new: list[tuple[bytes | None, int]] = field(default_factory=list)
    originals: list[bytes] = field(default_factory=list)

    def add(
        self,
        path: str,
        data: bytes | None,
        mode: int,
        before: str,
        package: str,
        original: str | None = None,
    ) -> None:
        """One more file. original: the wheel's digest of a patched file; None for bookkeeping."""
        staged = str(len(self.actions))
        digests = (before, original or before, sha256(data))
        self.actions.append(Action(path, *digests, package, original is not None, staged))
        self.new.append((data, mode))


class Store:
    """The lane's folder in one site."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self.path = site / FOLDER
        self.journal = self.path / "journal.json"
        self.stage = self.path / "stage"
        self._lock = self.path / "lock"

    def ledger(self) -> dict[str, Entry]:
        """package -> Entry; empty when nothing is applied. Raises PatchError when damaged."""
        return self._read(self.site / LEDGER, "the patched packages", _entries) or {}

    def read_journal(self) -> dict[str, Any] | None:
        """The unfinished run's journal, or None. Raises PatchError when it is damaged.

        Keys: operation, pid, started, versions (package -> version), actions.
        """
        return self._read(self.journal, "the packages that the lane patches", _journal)

    def _read(self, path: Path, packages: str, build: Callable[[dict], dict]) -> dict | None:
        try:
            table = json.loads(path.read_bytes())
            if table["schema"] != 1:
                raise ValueError(f"schema {table['schema']} is not known")
            return build(table)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PatchError(
                f"{path}: cannot be read ({error}); reinstall {packages}, then delete {self.path}"
            ) from error

    def unfinished(self) -> bool:
        """Whether a run has left something to finish or to clean."""
        leftover = self.path.is_dir() and not (self.site / LEDGER).exists()
        return leftover or self.journal.exists() or self.stage.exists()

    def original(self, wanted: str) -> bytes | None:
        """The original file with this digest, or None when it is not kept or is damaged."""
        path = self.path / "pristine" / wanted
        return path.read_bytes() if wanted != ABSENT and digest(path) == wanted else None

    def keep(self, data: bytes) -> None:
        """Keep an original file's bytes."""
        path = self.path / "pristine" / sha256(data)
        path.parent.mkdir(exist_ok=True)
        if self.original(path.name) is None:
            write_durably(path, data)

    def clean(self) -> None:
        """Remove what no applied patch needs; the whole folder when none is applied.

        Needs the lock. Does nothing while a journal is there. The lock goes last: whoever waits for
        it finds a new one (see `locked`).
        """
        if self.journal.exists():
            return
        shutil.rmtree(self.stage, ignore_errors=True)
        ledger = self.ledger()
        kept = {file["before"] for entry in ledger.values() for file in entry.files.values()}
        leftovers = [path for path in self.path.glob("pristine/*") if path.name not in kept]
        for leftover in [*leftovers, *self.path.glob("*.tmp")]:
            leftover.unlink()
        if ledger:
            return
        with contextlib.suppress(FileNotFoundError):
            (self.path / "pristine").rmdir()
        self._lock.unlink(missing_ok=True)
        try:
            self.path.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise

    @contextlib.contextmanager
    def locked(self, wait: float) -> Iterator[None]:
        """Hold the site's lock. Waits up to `wait` seconds, then refuses naming the holder."""
        deadline = time.monotonic() + wait
        while (descriptor := self._try_lock()) is None:
            if time.monotonic() >= deadline:
                raise PatchError(
                    f"another `megacpp patch` works on {self.site} ({self._holder_text()}); it was "
                    f"waited for {wait:g} s. Run again when it has ended"
                )
            time.sleep(0.02)
        try:
            yield
        finally:
            os.close(descriptor)

    def _try_lock(self) -> int | None:
        # Not mkdir(exist_ok=True): it fails when the last holder removes the folder just then.
        with contextlib.suppress(FileExistsError):
            self.path.mkdir()
        with (
            contextlib.ExitStack() as undo,
            contextlib.suppress(BlockingIOError, FileNotFoundError),
        ):
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
            undo.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the file, or the folder, between our steps.
            if os.stat(self._lock).st_ino == os.fstat(descriptor).st_ino:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
                undo.pop_all()
                return descriptor
        return None

    def holder(self) -> str | None:
        """Who works on this site now, as "pid N on HOST"; None when nobody does."""
        try:
            with open(self._lock) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._holder_text()
        except OSError:
            return None
        return None

    def _holder_text(self) -> str:
        try:
            return self._lock.read_text() or "pid not yet written"
        except OSError:
            return "it has just ended"


def _entries(ledger: dict) -> dict[str, Entry]:
    entries = {name: Entry(**entry) for name, entry in ledger["packages"].items()}
    for path, file in ((p, f) for entry in entries.values() for p, f in entry.files.items()):
        digests = is_digest(file["before"]) and is_digest(file["after"])
        if not is_target(path) or not digests or type(file["mode"]) is not int:
            raise ValueError(f"{path!r} is not a file that the lane writes")
    return entries


def _journal(journal: dict) -> dict:
    keys = ("operation", "pid", "started")
    actions = [Action(**action) for action in journal["actions"]]
    versions = dict(journal["versions"])
    return {**{key: journal[key] for key in keys}, "versions": versions, "actions": actions}


def ledger_bytes(ledger: Mapping[str, Entry]) -> bytes | None:
    """The ledger's file; None when no package has a patch applied."""
    packages = {name: asdict(entry) for name, entry in ledger.items() if entry.patches}
    text = json.dumps({"schema": 1, "packages": packages}, indent=1, sort_keys=True)
    return f"{text}\n".encode() if packages else None


def digest(path: Path) -> str:
    """The sha256 of a file, "absent" when there is none."""
    try:
        return sha256(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT


def file_mode(path: Path) -> int:
    """The permission bits of a file, 0o644 when there is none."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return 0o644


def write_durably(path: Path, data: bytes) -> None:
    """Write a file of the store so that a crash leaves the whole file or none."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make renames and removals in a folder survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def stage(plan: Plan, operation: str, step: Step = no_step) -> None:
    """Write every new file, and a copy of the old one, beside the site's; then the journal.

    Needs the lock. Raises PatchError, with nothing changed, when the disk refuses.
    """
    store = plan.store
    try:
        shutil.rmtree(store.stage, ignore_errors=True)
        store.stage.mkdir()
        for data in plan.originals:
            step("keep an original")
            store.keep(data)
        for action, (data, mode) in zip(plan.actions, plan.new, strict=True):
            old = store.site / action.path
            step(f"stage {action.path}")
            if data is not None:
                _stage_one(store.stage / action.staged, old, data, mode)
            if action.before != ABSENT:
                _stage_one(
                    store.stage / f"{action.staged}.old", old, old.read_bytes(), file_mode(old)
                )
        sync_folder(store.stage)
        journal = {
            "schema": 1,
            "operation": operation,
            "pid": os.getpid(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "versions": plan.versions,
            "actions": [asdict(action) for action in plan.actions],
        }
        step("write the journal")
        write_durably(store.journal, json.dumps(journal, indent=1).encode())
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
            old = os.stat(target)
        except FileNotFoundError:
            old = None
        if old and os.geteuid() == 0:  # root works on an environment of someone else
            os.fchown(file.fileno(), old.st_uid, old.st_gid)
        file.flush()
        os.fsync(file.fileno())
    # A .pyc counts as current when its source's whole second and size are the ones it names.
    if old and int(old.st_mtime) >= int(os.stat(path).st_mtime):
        os.utime(path, (old.st_atime, int(old.st_mtime) + 1))


def finish(
    store: Store,
    installed_version: Callable[[str], str | None],
    step: Step = no_step,
    again: bool = True,
) -> tuple[bool, str]:
    """Complete the run that the journal describes. Returns (whether it was completed, a sentence).

    installed_version: package -> version now installed in this site. A package that was removed or
    changed since is left alone. again: this finishes an earlier run. Needs the lock and a journal.
    A run that cannot be completed is dropped when none of its files is switched (the package was
    reinstalled), and undone when the system refuses a file (for lack of a right, or once again) or
    a staged file is damaged. Raises PatchError when someone else changed a file while others are
    switched, InterruptedRun when the disk fails.
    """
    journal = store.read_journal()
    name = f"the {journal['operation']} that pid {journal['pid']} began"
    actions = [
        each
        for each in journal["actions"]
        if not each.package
        or installed_version(each.package) == journal["versions"].get(each.package)
    ]
    for each in actions:
        check_inside(store.site, each.package, [each.path])
    back = [
        replace(each, before=each.after, after=each.before, staged=f"{each.staged}.old")
        for each in reversed(actions)
    ]
    patched = [each for each in actions if each.patched]
    blocked = _first_blocked(store, actions)
    if not patched and len(actions) < len(journal["actions"]):
        blocked = "the package is not the one it was"
    # A file that a patch creates may survive a reinstall, so it does not show that none took place.
    undo = blocked and any(
        digest(store.site / each.path) == each.after != each.original != ABSENT for each in patched
    )
    if undo and _first_blocked(store, back):
        raise PatchError(
            f"{name} was interrupted and cannot be finished: {blocked}. Reinstall the package (pip "
            f"install --force-reinstall --no-deps), then run this again"
        )
    try:
        try:
            if not blocked:
                _switch(store, actions, step)
        except OSError as error:
            final = again or isinstance(error, PermissionError)
            if not final or _first_blocked(store, back):
                raise
            blocked, undo = str(error), True
        if undo:
            _switch(store, back, step)
        step("remove the journal")
        store.journal.unlink()
        sync_folder(store.path)
    except OSError as error:
        raise InterruptedRun(
            f"{name} was interrupted: {error}; `megacpp patch apply` or `revert` finishes it first"
        ) from error
    if undo:
        return False, f"undid {name}, which cannot be finished: {blocked}"
    if blocked:
        return False, f"dropped {name}, of which no file was switched: {blocked}"
    return True, f"finished {name}"


def _first_blocked(store: Store, actions: Sequence[Action]) -> str:
    reasons = (_blocked(store, each) for each in actions if each.patched)
    return next(filter(None, reasons), "")


def _blocked(store: Store, action: Action) -> str:
    """Why a file cannot be switched: changed by someone else, or no staged copy; else ""."""
    now = digest(store.site / action.path)
    if now not in (action.before, action.after):
        return f"{action.path} was changed by someone else since"
    if action.after not in (ABSENT, now, digest(store.stage / action.staged)):
        return f"the staged copy of {action.path} is missing or damaged"
    return ""


def _switch(store: Store, actions: Sequence[Action], step: Step) -> None:
    # RECORD may be someone else's by now; the next plan puts its rows right.
    for action in [each for each in actions if not _blocked(store, each)]:
        path = store.site / action.path
        if digest(path) != action.after:
            step(f"switch {action.path}")
            if action.after == ABSENT:
                path.unlink()
            else:
                os.replace(store.stage / action.staged, path)
            sync_folder(path.parent)
        if path.suffix == ".py":
            step(f"remove the .pyc of {action.path}")
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
