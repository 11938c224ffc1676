"""Text files as tokens: one document per file."""

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megacpp_mcore.training.data.files import DataError
from megacpp_mcore.training.data.filters import is_generated, without_licence
from megacpp_mcore.training.data.held_out import nearest
from megacpp_mcore.training.data.sources import SourceFile, describe_sources, find_files
from megacpp_mcore.training.data.tokenizer import TextTokenizer, check_size

BYTE_VOCAB_SIZE = 257
BYTE_EOD_ID = 256
DEFAULT_SEED = 1234

_BATCH_BYTES = 4 << 20  # of text that is tokenised at once
_BATCH_FILES = 1024

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


@dataclass(frozen=True)
class TextOptions:
    """How files become documents.

    tokenizer: None: a byte is a token. dedup: a file with the content of an earlier one is left
    out. drop_generated, strip_licence: see `filters`. held_out: the share of the bytes whose
    folders come last, to be held out whole; None: files are ordered one by one.
    """

    tokenizer: TextTokenizer | None = None
    dedup: bool = False
    drop_generated: bool = False
    strip_licence: bool = False
    held_out: float | None = None

    def describe(self) -> dict[str, Any]:
        """What is not the default, for the manifest."""
        found: dict[str, Any] = {
            name: True
            for name in ("dedup", "drop_generated", "strip_licence")
            if getattr(self, name)
        }
        return found | ({} if self.held_out is None else {"held_out": self.held_out})


@dataclass
class Position:
    """How far a build has come. file: files done; text_bytes: of the documents; split: documents
    before the held-out folders, None until they are reached; seen: digests, with dedup; kinds: the
    suffix of each document's file."""

    file: int = 0
    documents: int = 0
    text_bytes: int = 0
    split: int | None = None
    skipped: Counter[str] = field(default_factory=Counter)
    seen: dict[bytes, None] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)


class TextFiles:
    """The files of some folders, in a pseudo-random order determined by `seed`.

    Megatron's `--split` splits the corpus by position; in path order, the held-out part would be
    a few subfolders only. Files are therefore ordered by sha256(seed, source, path), which is the
    same on every machine and does not change when files are added. With `held_out` their first
    folders are ordered so, and the files within each, and those whose share of the bytes is
    nearest to it come last: a split falls between two folders (a folder of checkouts: between two
    repositories). held_out_folders: their names.

    Any file without a NUL byte is text; without a tokenizer its bytes are its tokens, valid UTF-8
    or not, with one only UTF-8 is taken. What is left out is counted.
    """

    unit = "B"

    def __init__(
        self,
        sources: Sequence[str | os.PathLike],
        include: Sequence[str] = (),
        seed: int = DEFAULT_SEED,
        options: TextOptions | None = None,
    ) -> None:
        """Scan `sources` (see `find_files`). Raises DataError, also for Parquet shards in them."""
        files, self._passed_over = find_files(sources, include)
        shards = [file.path for file in files if file.relative.endswith(".parquet")]
        if shards:
            raise DataError(
                f"{shards[0]} is a Parquet shard ({len(shards)} among the sources): name its "
                f"column with --text-column or --tokens-column, or leave it out with --include"
            )
        self.seed, self.options = seed, options or TextOptions()
        tokenizer = self.options.tokenizer
        self.vocab_size = tokenizer.vocab_size if tokenizer else BYTE_VOCAB_SIZE
        self.eod_id = tokenizer.eod_id if tokenizer else BYTE_EOD_ID
        self._sources = describe_sources(sources)
        by_folder = self.options.held_out is not None
        self._files = sorted(files, key=self._order_in_folders if by_folder else self._order)
        self._boundary, self.held_out_folders = self._hold_out() if by_folder else (None, [])
        self.total = sum(file.size for file in files)
        self.max_tokens = self.total + len(files)
        self.max_documents = len(files)
        self.begin_at(Position())

    def begin_at(self, position: Position) -> None:
        """Go on from there. earlier_bytes: the text_bytes of an earlier build that was resumed."""
        self.at, self.earlier_bytes = position, position.text_bytes

    @property
    def paths(self) -> list[Path]:
        """The files, in the order in which they are read."""
        return [file.path for file in self._files]

    @property
    def skipped(self) -> Counter[str]:
        """What was left out and how often; complete when `documents` ends."""
        return self._passed_over + self.at.skipped

    def documents(self, advance: Callable[[int], Any]) -> Iterator[np.ndarray]:
        """Each document as uint16 tokens; `advance` gets the bytes read since the last call."""
        self.begin_at(Position())
        for batch in self.batches(advance):
            yield from batch

    def texts(
        self, most: int, advance: Callable[[int], object] = lambda size: None
    ) -> Iterator[bytes]:
        """The texts of the first files in order, without binary ones, until `most` bytes. advance:
        is told the bytes read since the last call."""
        read = 0
        for file in self._files:
            if read >= most:
                return
            text = self._read(file)
            read += len(text)
            advance(len(text))
            if b"\0" not in text:
                yield text

    def batches(self, advance: Callable[[int], Any]) -> Iterator[list[np.ndarray]]:
        """The documents from `at` on, some MiB at a time; `at` is the index after each one."""
        at = self.at
        while at.file < len(self._files):
            texts, end, size = self._read_batch(at)
            documents = self._tokens(texts, at)
            at.file, at.documents = end, at.documents + len(documents)
            yield documents
            advance(size)

    def _read_batch(self, at: Position) -> tuple[list[tuple[SourceFile, bytes]], int, int]:
        """The next files: those kept, with their text; the index after them; their bytes.

        A batch does not reach over the boundary of the held-out folders.
        """
        texts, size, index = [], 0, at.file
        if index == self._boundary:
            at.split = at.documents
        while index < len(self._files) and size < _BATCH_BYTES and index - at.file < _BATCH_FILES:
            if index == self._boundary and index != at.file:
                break
            text = self._read(self._files[index])
            size += len(text)
            if reason := self._left_out(text, at):
                at.skipped[reason] += 1
            else:
                text = without_licence(text) if self.options.strip_licence else text
                texts.append((self._files[index], text))
            index += 1
        return texts, index, size

    @staticmethod
    def _read(file: SourceFile) -> bytes:
        try:
            return file.path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {file.path}: {error.strerror}") from error

    def _left_out(self, text: bytes, at: Position) -> str | None:
        if not text:
            return "empty file"
        if b"\0" in text:
            return "binary file"
        if self.options.drop_generated and is_generated(text):
            return "generated file"
        if self.options.dedup:
            digest = hashlib.sha256(text).digest()[:16]
            if digest in at.seen:
                return "duplicate"
            at.seen[digest] = None
        return None

    def _tokens(self, texts: list[tuple[SourceFile, bytes]], at: Position) -> list[np.ndarray]:
        if self.options.tokenizer is None:
            documents = [byte_tokens(text) for _, text in texts]
        else:
            documents = self.options.tokenizer.documents([text for _, text in texts])
        kept = []
        for (file, text), tokens in zip(texts, documents, strict=True):
            if tokens is None:
                at.skipped["not UTF-8"] += 1
            elif tokens.size == 1:  # a licence alone
                at.skipped["empty file"] += 1
            else:
                check_size(tokens, MAX_DOCUMENT_TOKENS)
                at.text_bytes += len(text)
                at.kinds.append(sys.intern(os.path.splitext(file.relative)[1].lower()))
                kept.append(tokens)
        return kept

    def progress(self) -> int:
        """Bytes of the files that are done."""
        return sum(file.size for file in self._files[: self.at.file])

    def split(self) -> str | None:
        """The value of data.split at which the held-out folders begin, when all is read."""
        if self.at.split is None:
            return None
        return f"{self.at.split},{self.at.documents - self.at.split},0"

    def describe(self) -> dict[str, Any]:
        """What was read, for the manifest."""
        order = "sha256(seed, source, path)"
        if self._boundary is not None:
            order = "held-out folders last, sha256(seed, source, first folder), then " + order
        return {"kind": "text", "order": order, "seed": self.seed, **self._sources,
                **self.options.describe()}  # fmt: skip

    def plan(self) -> str:
        """Hex digest of what the build will read and how, to resume only the same one."""
        digest = hashlib.sha256(repr(self.describe()).encode())
        if self.options.tokenizer:
            digest.update(self.options.tokenizer.sha256.encode())
        for file in self._files:
            status = file.path.stat()
            digest.update(repr((str(file.path), status.st_size, status.st_mtime_ns)).encode())
        return digest.hexdigest()

    def _order(self, file: SourceFile) -> bytes:
        key = f"{self.seed}\0{file.source}\0".encode() + os.fsencode(file.relative)
        return hashlib.sha256(key).digest()

    def _order_in_folders(self, file: SourceFile) -> tuple[bytes, bytes]:
        key = f"{self.seed}\0folder\0".encode() + os.fsencode(repr(_folder(file)))
        return hashlib.sha256(key).digest(), self._order(file)

    def _hold_out(self) -> tuple[int, list[str]]:
        """Put the files of the folders that are held out last; the index of the first of them, and
        the folders' names."""
        sizes: dict[tuple[int, str], int] = {}
        for file in self._files:
            sizes[_folder(file)] = sizes.get(_folder(file), 0) + file.size
        folders = [folder for folder, size in sizes.items() if size]
        if len(folders) < 2:
            name = (folders or [*sizes])[0][1] or "the source itself"
            raise DataError(f"all files are in one folder, {name}: a split by folder needs two")
        chosen = nearest([sizes[folder] for folder in folders], self.options.held_out)
        last = {folders[index] for index in chosen}
        self._files.sort(key=lambda file: _folder(file) in last)  # else the order stays
        names = [folder[1] or "." for folder in folders if folder in last]
        return sum(_folder(file) not in last for file in self._files), names


def _folder(file: SourceFile) -> tuple[int, str]:
    """The first folder of a file below its source: in a folder of checkouts, its repository."""
    first, slash, _ = file.relative.partition("/")
    return file.source, first if slash else ""
