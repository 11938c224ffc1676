"""The lane's own folder in a site: what was applied, the original bytes, the lock.

`<site>/.megacpp_patches/` exists while a patch is applied or a run is unfinished:
`state.json` (the ledger), `pristine/<sha256>` (original files), `lock`, and during a run
`journal.json` and `stage/`. Nothing in it is believed without comparing digests.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megacpp_mcore.patching.errors import PatchError
from megacpp_mcore.patching.manifest import ABSENT, sha256

FOLDER = ".megacpp_patches"
LEDGER = f"{FOLDER}/state.json"


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


class Store:
    """The folder of one site."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self.path = site / FOLDER
        self.journal = self.path / "journal.json"
        self.stage = self.path / "stage"
        self._lock = self.path / "lock"

    def ledger(self) -> dict[str, Entry]:
        """package -> Entry; empty when nothing is applied. Raises PatchError when damaged."""
        path = self.site / LEDGER
        try:
            table = json.loads(path.read_bytes())
            if table["schema"] != 1:
                raise ValueError(f"schema {table['schema']} is not known")
            return {name: Entry(**entry) for name, entry in table["packages"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PatchError(
                f"{path}: cannot be read ({error}); reinstall the patched packages, then delete "
                f"{self.path}"
            ) from error

    def unfinished(self) -> bool:
        """Whether a run has left something to finish or to clean."""
        leftover = self.path.is_dir() and not (self.site / LEDGER).exists()
        return leftover or self.journal.exists() or self.stage.exists()

    def original(self, digest: str) -> bytes | None:
        """The original file with this digest, or None when it is not kept or is damaged."""
        if digest == ABSENT:
            return None
        try:
            data = (self.path / "pristine" / digest).read_bytes()
        except OSError:
            return None
        return data if sha256(data) == digest else None

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
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.path / "pristine"):
                if name not in kept:
                    os.unlink(self.path / "pristine" / name)
        for leftover in self.path.glob("*.tmp"):
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
        try:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            return None  # the last holder has just removed the folder
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the file between our open and our lock.
            if os.stat(self._lock).st_ino == os.fstat(descriptor).st_ino:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)
        return None

    def holder(self) -> str | None:
        """Who works on this site now, as "pid N on HOST"; None when nobody does."""
        try:
            descriptor = os.open(self._lock, os.O_RDONLY)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._holder_text()
        finally:
            os.close(descriptor)
        return None

    def _holder_text(self) -> str:
        try:
            return self._lock.read_text() or "pid not yet written"
        except OSError:
            return "it has just ended"


def ledger_bytes(ledger: Mapping[str, Entry]) -> bytes | None:
    """The ledger's file; None when no package has a patch applied."""
    packages = {name: asdict(entry) for name, entry in ledger.items() if entry.patches}
    if not packages:
        return None
    return (
        json.dumps({"schema": 1, "packages": packages}, indent=1, sort_keys=True) + "\n"
    ).encode()


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
