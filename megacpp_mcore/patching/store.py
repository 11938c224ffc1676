"""The lane's own folder in a site: what was applied, the original bytes, the journal, the lock.

`<site>/.megacpp_patches/` exists while a patch is applied or a run is unfinished:
  state.json         the ledger: what of the originals cannot be told from the files (see Entry)
  pristine/<sha256>  original files
  lock               held by flock during a run; has the holder's pid and host
  stage/             during a run: N, the N-th new file, and N.old, the file that it replaces
  journal.json       during the switch: both digests of every file (see Action)
Nothing in it is believed without comparing digests, and no path in it without the manifest's rules.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from megacpp_mcore.files import read_regular, write_atomically
from megacpp_mcore.patching import PatchError
from megacpp_mcore.patching.manifest import ABSENT, FOLDER, is_digest, is_target, sha256

LEDGER = f"{FOLDER}/state.json"
UNREADABLE = "unreadable"  # stands for the sha256 of what is no file or cannot be read


@dataclass(frozen=True)
class Kept:
    """What the ledger knows of a patched file: both digests, and the mode of the original."""

    before: str
    after: str
    mode: int


@dataclass
class Entry:
    """The ledger's record of one package.

    patches: ids in order. rows: path -> its original line in RECORD, None when it had none.
    """

    version: str
    patches: list[str] = field(default_factory=list)
    files: dict[str, Kept] = field(default_factory=dict)
    rows: dict[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path, file in self.files.items():
            _check(path, is_target(path), file.before, file.after)


@dataclass(frozen=True)
class Ledger:
    """What was applied in one site. packages: name -> Entry."""

    packages: dict[str, Entry]


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
        known = self.path == LEDGER if self.package == "" else is_target(self.path)
        if self.package and not self.patched:
            known = re.fullmatch(r"[^/\\\s]+\.dist-info/RECORD", self.path)
        known = known and re.fullmatch(r"\d+(\.old)?", self.staged)
        _check(self.path, known, self.before, self.original, self.after)


def _check(path: str, known: Any, *digests: str) -> None:
    """Refuse what a damaged or planted file could lead out of the site by."""
    if not (known and all(map(is_digest, digests))):
        raise ValueError(f"{path!r} is not a file that the lane writes")


@dataclass
class Journal:
    """A run that may be unfinished. versions: package -> the installed version that it changes."""

    operation: str
    pid: int
    started: str
    versions: dict[str, str]
    actions: list[Action]


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
        ledger = self._read(self.site / LEDGER, Ledger)
        return ledger.packages if ledger else {}

    def read_journal(self) -> Journal | None:
        """The unfinished run's journal, or None. Raises PatchError when it is damaged."""
        return self._read(self.journal, Journal)

    def check(self) -> None:
        """Raises PatchError where a link, or another kind of file, stands for a file or folder of
        the store: it would lead our writes and removals elsewhere."""
        folders = {self.path, self.stage, self.path / "pristine"}
        for path in (*folders, self._lock, self.journal, self.site / LEDGER):
            try:
                mode = os.lstat(path).st_mode  # once: another run may be making it
            except (FileNotFoundError, NotADirectoryError):
                continue
            is_own = stat.S_ISDIR if path in folders else stat.S_ISREG
            if not is_own(mode):
                kind = "folder" if path in folders else "regular file"
                raise PatchError(f"{path} is no {kind}, so the lane did not make it: delete it")

    def _read(self, path: Path, kind: Any) -> Any:
        """The table in a file of the store as a `kind`, None without one; else refused."""
        self.check()
        try:
            table = json.loads(read_regular(path))
            if (schema := table.pop("schema")) != 1:
                raise ValueError(f"schema {schema} is not known")
            return _typed(table, kind)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PatchError(
                f"{path}: cannot be read ({error}); reinstall the patched packages, then delete "
                f"{self.path}"
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
        kept = self.path / "pristine" / sha256(data)
        kept.parent.mkdir(exist_ok=True)
        if self.original(kept.name) is None:
            write_atomically(kept, data)

    def clean(self) -> None:
        """Remove what no applied patch needs; the whole folder when none is applied.

        Needs the lock. Does nothing while a journal is there. The lock goes last: whoever waits for
        it finds a new one (see `locked`).
        """
        if self.journal.exists():
            return
        try:
            shutil.rmtree(self.stage, ignore_errors=True)
            ledger = self.ledger()
            kept = {file.before for entry in ledger.values() for file in entry.files.values()}
            for path in [*self.path.glob("pristine/*"), *self.path.glob("*.tmp")]:
                if path.name not in kept:
                    path.unlink()
            if not ledger:
                shutil.rmtree(self.path / "pristine", ignore_errors=True)
                self._lock.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # whoever waited has made a new lock
                    self.path.rmdir()
        except OSError as error:
            raise PatchError(
                f"the files are as asked, but {self.path} could not be tidied: {error}"
            ) from error

    @contextlib.contextmanager
    def locked(self, wait: float) -> Iterator[None]:
        """Hold the site's lock. Waits up to `wait` seconds, then refuses naming the holder."""
        self.check()
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
        try:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            return None
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the file, or the folder, between our steps.
            if os.stat(self._lock).st_ino == os.fstat(descriptor).st_ino:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return descriptor
        os.close(descriptor)
        return None

    def holder(self) -> str | None:
        """Who works on this site now, as "pid N on HOST"; None when nobody does."""
        try:
            with open(self._lock) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._holder_text()
        except OSError:
            pass
        return None

    def _holder_text(self) -> str:
        try:
            return self._lock.read_text() or "pid not yet written"
        except OSError:
            return "it has just ended"


def _typed(value: Any, kind: Any) -> Any:
    """A value of JSON as a dataclass, list[...], dict[str, ...], a union or a plain type.

    Raises TypeError or KeyError for anything else, at any depth.
    """
    of, hints = get_origin(kind), get_args(kind)
    allowed = hints if of is UnionType else (dict if is_dataclass(kind) else of or kind,)
    if type(value) not in allowed:
        raise TypeError(f"{value!r} is not of type {allowed[0].__name__}")
    if of is list:
        return [_typed(each, hints[0]) for each in value]
    if of is dict:
        return {key: _typed(each, hints[1]) for key, each in value.items()}
    if is_dataclass(kind):
        types = kind.__annotations__
        return kind(**{key: _typed(each, types[key]) for key, each in value.items()})
    return value


def ledger_bytes(ledger: Mapping[str, Entry]) -> bytes | None:
    """The ledger's file; None when no package has a patch applied."""
    packages = {name: asdict(entry) for name, entry in ledger.items() if entry.patches}
    text = json.dumps({"schema": 1, "packages": packages}, indent=1, sort_keys=True)
    return f"{text}\n".encode() if packages else None


def digest(path: Path) -> str:
    """The sha256 of a file, "absent" when there is none, "unreadable" for a folder, a FIFO, ..."""
    try:
        return sha256(read_regular(path))
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT
    except OSError:
        return UNREADABLE
