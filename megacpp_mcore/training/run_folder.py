"""The folder of one run, and the lock that lets only one process write into it."""

import os
import sys
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.files import locked, remove_temporaries
from megacpp_mcore.receipts.html import PAGE
from megacpp_mcore.training.checkpoints import folder

LOCK = ".lock"


class RunFolderError(MegacppError):
    """The folder holds another run, or another process is training in it."""


class RunFolder:
    """OUT with receipt.json, report.html, checkpoints/ and cache/, locked by one process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.receipt = path / "receipt.json"
        self.page = path / PAGE
        self.checkpoints = path / "checkpoints"
        self.cache = path / "cache"
        self._lock: FileIO | None = None

    def claim(
        self, *, resume: bool = False, overwrite: bool = False, resume_from: int | None = None
    ) -> Path | None:
        """Lock the folder. Returns the checkpoint to resume from, or None to start at step 0.

        resume_from: the iteration of that checkpoint; None: the newest. Raises RunFolderError when
        another process trains in it, when it has no complete checkpoint of that iteration, and, to
        start, when it holds a checkpoint that no run on the CPU wrote, or a run and overwrite is
        false.
        """
        # Imported here because it imports Megatron, which GPU runs must check and bridge first.
        from megacpp_mcore.training.cpu import checkpoint

        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = locked(self.path / LOCK)  # until the process ends
        except BlockingIOError:
            raise RunFolderError(
                f"another process is training in {self.path}; wait for it, or choose another --out"
            ) from None
        except (OSError, ValueError) as error:  # ValueError: a NUL in its name
            raise RunFolderError(f"cannot write into {self.path}: {error}") from error
        for path in (self.checkpoints, self.path / "heartbeat"):
            if os.path.lexists(path) and not path.is_dir():
                raise RunFolderError(
                    f"{path} is no folder, where a run writes one: move it away, or choose another "
                    "--out"
                )
        for path in (self.receipt, self.page, self.checkpoints / folder.TRACKER):
            remove_temporaries(path)
        _say(checkpoint.recover(self.checkpoints))
        if resume_from is not None:
            return self._from(resume_from)
        latest = checkpoint.latest(self.checkpoints)
        if resume:
            self._name_incomplete(latest)
            return latest
        if not overwrite:
            self.refuse_a_run()
        if foreign := self._foreign_checkpoints():
            raise RunFolderError(
                f"{foreign[0]} is a checkpoint that no run on the CPU wrote, and none deletes it: "
                "move it away, or choose another --out"
            )
        return None

    def refuse_a_run(self) -> None:
        """Raises RunFolderError when the folder holds a run: neither resume nor overwrite."""
        try:
            holds = folder.complete(self.checkpoints) or self.receipt.exists()
        except OSError as error:  # a name too long, or no right to look
            raise RunFolderError(f"{self.path} cannot be a run's folder: {error}") from error
        if holds:
            raise RunFolderError(
                f"{self.path} already holds a run; continue it with --resume, replace it with "
                "--overwrite, or choose another --out"
            )

    def _from(self, iteration: int) -> Path:
        if iteration not in (found := folder.complete(self.checkpoints)):
            raise RunFolderError(
                f"--resume-from {iteration}: {self.checkpoints} has complete checkpoints of "
                f"iterations {', '.join(map(str, found)) or 'none'}"
            )
        return folder.path_of(self.checkpoints, iteration)

    def go_back(self, iteration: int) -> None:
        """Take their names from checkpoints newer than `iteration`. Call it when that is loaded."""
        _say(folder.supersede(self.checkpoints, iteration))

    def _name_incomplete(self, latest: Path | None) -> None:
        partial = folder.incomplete(self.checkpoints, folder.iteration_of(latest) if latest else 0)
        if partial and latest is None:
            raise RunFolderError(
                f"{partial[-1]} is not complete, and there is no other checkpoint to resume from: "
                "move it away to start at step 1"
            )
        _say(f"{path} is not complete: resuming from the older {latest}" for path in partial)

    def clear(self) -> None:
        """Delete the run that the folder holds: its receipt, page and checkpoints, nothing else.

        Call it when the new run is ready to start.
        """
        self.receipt.unlink(missing_ok=True)
        self.page.unlink(missing_ok=True)
        if self.checkpoints.is_dir():
            (self.checkpoints / folder.TRACKER).unlink(missing_ok=True)
            for path in folder.named(self.checkpoints):
                folder.delete(path)

    def _foreign_checkpoints(self) -> list[Path]:
        """What is named as a checkpoint, and holds what no run of this lane writes."""
        return [
            path
            for path in folder.named(self.checkpoints)
            if folder.is_foreign(path)
            or not (folder.is_unfinished(path) or (path / "progress.json").is_file())
        ]  # fmt: skip

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"megacpp: {line}", file=sys.stderr, flush=True)
