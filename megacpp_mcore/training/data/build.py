"""Write a corpus as a Megatron `.bin/.idx` pair with a manifest, atomically."""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megacpp_mcore.files import sha256_file, sync
from megacpp_mcore.terminal import Progress
from megacpp_mcore.training.data.files import (
    MANIFEST_SCHEMA,
    DataError,
    packed_kinds,
    paths,
    write_index,
)
from megacpp_mcore.training.data.resumable import Partial
from megacpp_mcore.training.data.sources import MAX_NAMES
from megacpp_mcore.training.data.text import TextFiles

_DTYPE = np.uint16
_IDX_BYTES_A_DOCUMENT = 20
_FREE_SPACE_MARGIN = 1 << 20


class DocumentSource(Protocol):
    """What `build` reads: `TextFiles` or `ParquetShards`."""

    vocab_size: int
    eod_id: int
    paths: Iterable[Path]
    total: int  # work to do, in `unit`, for the progress bar
    unit: str
    max_tokens: int | None  # None if unknown before reading
    max_documents: int
    skipped: Counter[str]  # what was left out and how often; complete when `documents` ends

    def documents(self, advance: Callable[[int], Any]) -> Iterator[np.ndarray]:
        """Each document as a non-empty uint16 array; `advance` is told the work done."""

    def describe(self) -> dict[str, Any]:
        """What was read, for the manifest, without absolute paths."""


def build(
    source: DocumentSource, prefix: str | os.PathLike, overwrite: bool = False,
    quiet: bool = False, resume: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Write PREFIX.bin, PREFIX.idx and PREFIX.json, and return the manifest (what the .json holds).

    One sequence per document, uint16 tokens. The same input gives the same bytes. The files are
    written and synced in a hidden folder next to PREFIX, and moved into place at the end, the
    `.idx` last; with `overwrite` the old `.idx` is removed first. If the build is interrupted,
    PREFIX is the old dataset, the new one, or has no `.idx`. Only SIGKILL leaves the hidden folder
    behind. Progress is told on stderr, unless `quiet`. With `resume`
    (of TextFiles) the folder, `.PREFIX.partial`, stays, and the next build with `resume` of the
    same files and options goes on from it.

    Raises DataError if PREFIX exists and `overwrite` is false; if PREFIX would replace one of its
    sources, or has an index cache of an earlier dataset; if there is no document or not enough disk
    space; and for what the source refuses.
    """
    targets = paths(prefix)
    _check_targets(prefix, targets, source, overwrite)
    folder = targets[0].parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_free_space(folder, source)
        if resume:
            hidden = targets[0].with_name(f".{targets[0].stem}.partial")
            written = paths(hidden / "part")
            manifest = _write_resumable(source, hidden, written, quiet)
            _move_into_place(written, targets, overwrite)
            shutil.rmtree(hidden)
            return manifest
        with tempfile.TemporaryDirectory(prefix=f".{targets[0].stem}.", dir=folder) as hidden:
            written = paths(Path(hidden) / "part")
            manifest = _write(source, written, quiet)
            _move_into_place(written, targets, overwrite)
    except OSError as error:
        raise DataError(_os_error(error, prefix)) from error
    return manifest


def _check_targets(
    prefix: str | os.PathLike,
    targets: tuple[Path, Path, Path],
    source: DocumentSource,
    overwrite: bool,
) -> None:
    existing = [str(path) for path in targets if path.exists()]
    if existing and not overwrite:
        raise DataError(
            f"{', '.join(existing)} exists: name another --out, or give --overwrite to replace it"
        )
    replaced = {os.path.abspath(path) for path in targets}
    for path in source.paths:
        if os.path.abspath(path) in replaced:
            raise DataError(f"--out {os.fspath(prefix)} would replace {path}, one of its sources")
    cache = Path(os.fspath(prefix), "cache", "GPTDataset_indices")
    if cache.exists():
        raise DataError(
            f"{cache} holds index files that Megatron made from an earlier dataset of this name, "
            f"and would use them for the new one: remove that folder first"
        )


def _check_free_space(folder: Path, source: DocumentSource) -> None:
    if source.max_tokens is None:
        return
    needed = (
        source.max_tokens * np.dtype(_DTYPE).itemsize
        + source.max_documents * _IDX_BYTES_A_DOCUMENT
        + _FREE_SPACE_MARGIN
    )
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DataError(
            f"not enough room in {folder}: {needed / 2**20:.1f} MiB needed, {free / 2**20:.1f} MiB "
            f"free; nothing was written"
        )


def _write(source: DocumentSource, written: tuple[Path, Path, Path], quiet: bool) -> dict[str, Any]:
    digest, lengths = hashlib.sha256(), array("i")
    with open(written[0], "wb") as file, _progress(source, quiet) as progress:
        for tokens in source.documents(progress.advance):
            file.write(tokens)
            digest.update(tokens)
            lengths.append(tokens.size)
    return _finish(source, written, np.array(lengths, np.int32), digest.hexdigest())


def _write_resumable(
    source: TextFiles, hidden: Path, written: tuple[Path, Path, Path], quiet: bool
) -> dict[str, Any]:
    """As `_write`, going on from what `hidden` holds."""
    with Partial(hidden, source.plan()) as partial:
        source.begin_at(partial.position)
        with _progress(source, quiet, source.progress()) as progress:
            for documents in source.batches(progress.advance):
                partial.append(documents)
                partial.commit()
        partial.commit(now=True)
        lengths = partial.lengths()
    return _finish(source, written, lengths, sha256_file(written[0]))


def _finish(
    source: DocumentSource, written: tuple[Path, Path, Path], lengths: np.ndarray, bin_sha256: str
) -> dict[str, Any]:
    """The index of the written tokens and the manifest, which is returned."""
    if not lengths.size:
        raise DataError(f"the sources hold no document (left out: {_listed(source.skipped)})")
    write_index(written[1], lengths, np.dtype(_DTYPE))
    return _manifest(source, written, lengths, bin_sha256)


def _manifest(
    source: DocumentSource, written: tuple[Path, Path, Path], lengths: np.ndarray, bin_sha256: str
) -> dict[str, Any]:  # fmt: skip
    """The manifest, also written and synced with the pair."""
    manifest = {
        "schema": MANIFEST_SCHEMA,
        "documents": lengths.size,
        "tokens": int(lengths.sum(dtype=np.int64)),
        "vocab_size": source.vocab_size,
        "eod_id": source.eod_id,
        "dtype": np.dtype(_DTYPE).name,
        "bin_sha256": bin_sha256,
        "idx_sha256": sha256_file(written[1]),
        "skipped": dict(sorted((+source.skipped).items())),
        "source": source.describe(),
    }
    if isinstance(source, TextFiles):
        manifest["text_bytes"] = source.at.text_bytes
        if kinds := packed_kinds(source.at.kinds):
            manifest["kinds"] = kinds
        if split := source.split():
            manifest["split"] = split
            manifest["held_out"] = _held_out(source, lengths)
        if tokenizer := source.options.tokenizer:
            manifest["tokenizer"] = {"sha256": tokenizer.sha256}
    written[2].write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for path in written:
        sync(path)
    return manifest


def _held_out(source: TextFiles, lengths: np.ndarray) -> dict[str, Any]:
    """The folders that are held out, and how much of the dataset is theirs."""
    theirs, names = lengths[source.at.split :], source.held_out_folders
    return {"folders": len(names), "names": names[:MAX_NAMES], "documents": theirs.size,
            "tokens": int(theirs.sum(dtype=np.int64))}  # fmt: skip


def _progress(source: DocumentSource, quiet: bool, done: int = 0) -> Progress:
    return Progress("data build", source.total, source.unit, done=done, quiet=quiet)


def _move_into_place(
    written: tuple[Path, Path, Path], targets: tuple[Path, Path, Path], overwrite: bool
) -> None:
    bin_path, idx_path, json_path = targets
    if overwrite:
        idx_path.unlink(missing_ok=True)
    else:
        # Claim the name: of two concurrent builds that both found it free, one fails here.
        os.close(os.open(bin_path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    os.replace(written[0], bin_path)
    os.replace(written[2], json_path)
    sync(bin_path.parent)
    os.replace(written[1], idx_path)
    sync(bin_path.parent)


def _os_error(error: OSError, prefix: str | os.PathLike) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"disk full while writing {os.fspath(prefix)} ({error.strerror}): the temporary files "
            f"were removed and no dataset was written; free some room or name another --out"
        )
    return f"cannot write {os.fspath(prefix)}: {error}"


def _listed(skipped: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted((+skipped).items())) or "nothing"
