"""The half-built files of a dataset, kept so that an interrupted build goes on where it was.

FOLDER/part.bin has tokens, part.len the length of each document, part.kind its file's suffix,
part.seen the digests of what dedup has seen, progress.json how much of each counts. Anything
after that is cut off on resuming.
"""

import contextlib
import itertools
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from megacpp_mcore.files import read_regular, write_atomically
from megacpp_mcore.training.data.files import DataError, are_counts, is_count
from megacpp_mcore.training.data.text import Position

_SEEN = 16  # bytes of a digest
_COMMIT_TOKENS = 1 << 24  # between two commits
# keys of progress.json that are no count -> whether a value can be theirs
_GOOD = {
    "plan": lambda value: isinstance(value, str),
    "split": lambda value: value is None or is_count(value),
    "skipped": are_counts,
}


class Partial:
    """Appends documents; `commit` makes them count. Use as a context: it closes the files."""

    def __init__(self, folder: Path, plan: str) -> None:
        """Open `folder`, or begin it. Raises DataError when it is of another plan, or damaged."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._plan = plan
        progress = self._progress()
        self.position = Position(
            progress["file"], progress["documents"], progress["text_bytes"], progress["split"],
            Counter(progress["skipped"]),
        )  # fmt: skip
        self.tokens = progress["tokens"]
        self._bin = self._cut("part.bin", 2 * self.tokens)
        self._len = self._cut("part.len", 4 * self.position.documents)
        self._seen = self._cut("part.seen", _SEEN * progress["seen"])
        self._kind = self._cut("part.kind", progress["kind_bytes"])
        self.position.kinds = self._kinds()
        data = (folder / "part.seen").read_bytes()
        self.position.seen = dict.fromkeys(
            data[at : at + _SEEN] for at in range(0, len(data), _SEEN)
        )
        self._written_kinds, self._written_seen = progress["documents"], progress["seen"]
        self._uncommitted = 0
        if not self._is_consistent(progress):
            raise self._damaged("its parts do not agree")

    def __enter__(self) -> "Partial":
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self._bin, self._len, self._seen, self._kind):
            with contextlib.suppress(OSError):
                file.close()

    def append(self, documents: list[np.ndarray]) -> None:
        for tokens in documents:
            self._bin.write(tokens.tobytes())
            self._len.write(np.int32(tokens.size).tobytes())
            self.tokens += tokens.size
            self._uncommitted += tokens.size

    def commit(self, *, now: bool = False) -> None:
        """Make what was appended count, every so many tokens, or now. Not within a batch, whose
        files the position has in part."""
        if self._uncommitted < _COMMIT_TOKENS and not now:
            return
        at = self.position
        new = len(at.seen) - self._written_seen
        for digest in [*itertools.islice(reversed(at.seen), new)][::-1]:
            self._seen.write(digest)
        for kind in at.kinds[self._written_kinds :]:
            self._kind.write(json.dumps(kind).encode() + b"\n")
        self._written_seen, self._written_kinds = len(at.seen), len(at.kinds)
        self._uncommitted = 0
        for file in (self._bin, self._len, self._seen, self._kind):
            file.flush()
            os.fsync(file.fileno())
        progress = {
            "plan": self._plan, "tokens": self.tokens, "seen": len(at.seen), "file": at.file,
            "documents": at.documents, "text_bytes": at.text_bytes, "split": at.split,
            "skipped": dict(at.skipped), "kind_bytes": self._kind.tell(),
        }  # fmt: skip
        write_atomically(self.folder / "progress.json", json.dumps(progress))

    def lengths(self) -> np.ndarray:
        """int32, tokens of every document so far."""
        self._len.flush()
        return np.fromfile(self.folder / "part.len", np.int32)

    def _kinds(self) -> list[str]:
        try:
            with open(self.folder / "part.kind", "rb") as file:
                return [sys.intern(json.loads(line)) for line in file]
        except (ValueError, TypeError, RecursionError) as error:
            raise self._damaged(error) from error

    def _is_consistent(self, progress: dict[str, Any]) -> bool:
        at = self.position
        return (
            len(at.kinds) == at.documents <= at.file
            and len(at.seen) == progress["seen"]
            and int(self.lengths().sum(dtype=np.int64)) == self.tokens
        )

    def _damaged(self, why: object) -> DataError:
        return DataError(f"{self.folder} is damaged ({why}): delete it to begin anew")

    def _progress(self) -> dict[str, Any]:
        none = {"plan": self._plan, "tokens": 0, "seen": 0, "file": 0, "documents": 0,
                "text_bytes": 0, "split": None, "skipped": {}, "kind_bytes": 0}  # fmt: skip
        path = self.folder / "progress.json"
        if not path.exists():
            return none
        try:
            progress = json.loads(read_regular(path))
            if not isinstance(progress, dict) or set(progress) != set(none):
                raise ValueError("other keys")
            for key, value in progress.items():
                if not _GOOD.get(key, is_count)(value):
                    raise ValueError(f"{key} is {value!r}")
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise self._damaged(f"{path.name}: {error}") from error
        if progress["plan"] != self._plan:
            raise DataError(
                f"{self.folder} is of a build of other files or with other options: delete it to "
                "begin anew, or name another --out"
            )
        return progress

    def _cut(self, name: str, size: int) -> Any:
        """The file, cut to what counts of it, open to be appended to."""
        path = self.folder / name
        path.touch()
        if path.stat().st_size < size:
            raise self._damaged(f"{name} is shorter than progress.json says")
        os.truncate(path, size)
        return open(path, "ab")
