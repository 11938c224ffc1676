"""Text files as byte-level tokens: one document per file."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from megacpp_mcore.training.data.files import DataError
from megacpp_mcore.training.data.sources import SourceFile, describe_sources, find_files

BYTE_VOCAB_SIZE = 257
BYTE_EOD_ID = 256
DEFAULT_SEED = 1234

# Megatron's .idx stores the length of a sequence as an int32.
MAX_DOCUMENT_TOKENS = 2**31 - 1


def byte_tokens(text: bytes) -> np.ndarray:
    """uint16 [len(text) + 1]: the bytes as tokens 0..255, then the end of document, 256.

    Raises DataError for a document longer than an `.idx` can describe.
    """
    if len(text) + 1 > MAX_DOCUMENT_TOKENS:
        raise DataError(
            f"a document of {len(text)} bytes is too long: an .idx stores its length "
            f"as an int32; split it"
        )
    tokens = np.empty(len(text) + 1, np.uint16)
    tokens[:-1] = np.frombuffer(text, np.uint8)
    tokens[-1] = BYTE_EOD_ID
    return tokens


class TextFiles:
    """The files of some folders, in a pseudo-random order determined by `seed`.

    Megatron's `--split` splits the corpus by position; in path order, the held-out part would be
    a few subfolders only. Files are therefore ordered by sha256(seed, source, path), which is the
    same on every machine and does not change when files are added.

    Any file without a NUL byte is text, valid UTF-8 or not, and its bytes are its tokens. Files
    with a NUL byte count as binary; they are left out and counted, as are empty files.
    """

    vocab_size = BYTE_VOCAB_SIZE
    eod_id = BYTE_EOD_ID
    unit = "B"

    def __init__(
        self,
        sources: Sequence[str | os.PathLike],
        include: Sequence[str] = (),
        seed: int = DEFAULT_SEED,
    ) -> None:
        """Scan `sources` (see `find_files`). Raises DataError, also for Parquet shards in them."""
        files, self._passed_over = find_files(sources, include)
        shards = [file.path for file in files if file.path.suffix == ".parquet"]
        if shards:
            raise DataError(
                f"{shards[0]} is a Parquet shard ({len(shards)} among the sources): name its "
                f"column with --text-column or --tokens-column, or leave it out with --include"
            )
        self.seed = seed
        self._sources = describe_sources(sources)
        self._files = sorted(files, key=self._order)
        self.paths = [file.path for file in files]
        self.total = sum(file.size for file in files)
        self.max_tokens = self.total + len(files)
        self.max_documents = len(files)

    def documents(self, advance: Callable[[int], Any]) -> Iterator[np.ndarray]:
        """Each document as uint16 tokens; `advance` gets the bytes read since the last call.

        `skipped` and `kinds` are complete at the end.
        """
        self.skipped = self._passed_over.copy()
        self.kinds: list[str] = []  # the suffix of each document's file
        for file in self._files:
            try:
                text = file.path.read_bytes()
            except OSError as error:
                raise DataError(f"cannot read {file.path}: {error.strerror}") from error
            if not text:
                self.skipped["empty file"] += 1
            elif b"\0" in text:
                self.skipped["binary file"] += 1
            else:
                self.kinds.append(os.path.splitext(os.fsdecode(file.relative))[1].lower())
                yield byte_tokens(text)
            advance(len(text))

    def describe(self) -> dict[str, Any]:
        """What was read, for the manifest."""
        return {
            "kind": "text",
            "order": "sha256(seed, source, path)",
            "seed": self.seed,
            **self._sources,
        }

    def _order(self, file: SourceFile) -> bytes:
        key = f"{self.seed}\0{file.source}\0".encode() + os.fsencode(file.relative)
        return hashlib.sha256(key).digest()
