"""The folder of one run, and the lock that lets only one process write into it."""

import fcntl
import shutil
from pathlib import Path
from typing import IO

from megacpp_mcore.errors import MegacppError


class RunFolderError(MegacppError):
    """The folder holds another run, or another process is training in it."""


class RunFolder:
    """OUT with receipt.json, curves.png, checkpoints/ and cache/, locked by one process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.receipt = path / "receipt.json"
        self.curves = path / "curves.png"
        self.checkpoints = path / "checkpoints"
        self.cache = path / "cache"
        self._lock: IO[str] | None = None

    def claim(self, *, resume: bool, overwrite: bool) -> Path | None:
        """Lock the folder. Returns the checkpoint to resume from, or None to start at step 0.

        Raises RunFolderError when another process trains in it, or when it holds a run and both
        resume and overwrite are false.
        """
        # Imported here because it imports Megatron, which GPU runs must check and bridge first.
        from megacpp_mcore.training.cpu import checkpoint

        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")  # noqa: SIM115 (held until the process ends)
        except OSError as error:
            raise RunFolderError(f"cannot write into {self.path}: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFolderError(
                f"another process is training in {self.path}; wait for it, or choose another --out"
            ) from None
        latest = checkpoint.latest(self.checkpoints)
        if resume:
            return latest
        if overwrite:
            shutil.rmtree(self.checkpoints, ignore_errors=True)
            self.receipt.unlink(missing_ok=True)
            self.curves.unlink(missing_ok=True)
        elif latest or self.receipt.exists():
            raise RunFolderError(
                f"{self.path} already holds a run; continue it with --resume, replace it with "
                "--overwrite, or choose another --out"
            )
        return None

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
