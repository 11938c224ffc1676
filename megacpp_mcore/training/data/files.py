"""A Megatron `.bin/.idx` pair on disk, fully validated before it is read.

Layout of the `.idx`, little-endian: the magic `MMIDIDX\\0\\0`, version 1 (u64), a dtype code (u8),
the number of sequences n (u64) and of document bounds m (u64), then n lengths in tokens (i32), n
byte offsets into the `.bin` (i64) and m document bounds (i64: 0, ..., n). The `.bin` is the tokens
of all sequences, back to back. `megacpp data build` writes one sequence per document and a manifest
`PREFIX.json`. Pairs from other tools have no manifest, and are read without it.

Megatron only asserts the magic, the version and the last bound. Any other damage would make it
crash or read wrong tokens, so everything is checked here.
"""

import base64
import json
import os
import re
import stat
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.files import read_regular, sha256_file

MANIFEST_SCHEMA = "megacpp-data/1"

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOAT_DTYPES = {6: "float64", 7: "float32"}


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def are_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_count, value.values()))


def _are_folders(value: Any) -> bool:
    """Whether it can be what `build` says of held-out folders; None: none are."""
    if value is None:
        return True
    if not isinstance(value, dict) or not isinstance(value.get("names"), list):
        return False
    counts = {key: number for key, number in value.items() if key != "names"}
    known = set(counts) == {"folders", "documents", "tokens"} and are_counts(counts)
    return known and all(isinstance(name, str) for name in value["names"])


# key -> whether it can be what is there
_MANIFEST_KEYS = {
    "documents": is_count,
    "tokens": is_count,
    "vocab_size": is_count,
    "eod_id": is_count,
    "skipped": are_counts,
    "held_out": _are_folders,
    "bin_sha256": _digest,
    "idx_sha256": _digest,
}
_MANIFEST_MAX_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 24


class DataError(MegacppError):
    """Training data that is missing, damaged, too small, or cannot be built as asked."""


@dataclass(frozen=True)
class TokenFiles:
    """A checked pair.

    `lengths` is int32 [n], the tokens of each sequence; `tokens` maps the `.bin` read-only, one
    integer a token; `manifest` is PREFIX.json, or None where there is none.
    """

    prefix: str
    lengths: np.ndarray
    tokens: np.ndarray
    manifest: dict[str, Any] | None


def paths(prefix: str | os.PathLike) -> tuple[Path, Path, Path]:
    """`(PREFIX.bin, PREFIX.idx, PREFIX.json)`. Raises DataError for a prefix that names a file."""
    text = os.fspath(prefix)
    if not os.path.basename(text) or text.endswith((".bin", ".idx")):
        raise DataError(
            f"{text!r} is not a file prefix: give a path without .bin or .idx, such as data/corpus"
        )
    return Path(text + ".bin"), Path(text + ".idx"), Path(text + ".json")


def read_pair(
    prefix: str | os.PathLike, vocab_size: int | None = None, verify_hashes: bool = False
) -> TokenFiles:
    """Check a pair and open it.

    The `.idx` must be complete and consistent, the `.bin` must have the length that it implies, and
    both must match the manifest if there is one. With `vocab_size` every token is read and must be
    in [0, vocab_size). With `verify_hashes` a manifest is required, the `.bin` is hashed, too, and
    tokens are checked against the manifest's vocabulary if `vocab_size` is None.

    Raises DataError.
    """
    bin_path, idx_path, json_path = paths(prefix)
    missing = [str(path) for path in (bin_path, idx_path) if not _is_file(path)]
    if missing:
        raise DataError(
            f"no dataset at {os.fspath(prefix)}: {' and '.join(missing)} missing; "
            f"build it with: megacpp data build SRC... --out {os.fspath(prefix)}"
        )
    try:
        with open(idx_path, "rb") as stream:
            dtype, lengths = _read_index(stream, idx_path)
        tokens = _map_tokens(bin_path, idx_path, dtype, int(lengths.sum(dtype=np.int64)))
        manifest = read_manifest(json_path) if json_path.exists() else None
        if manifest is not None:
            _check_manifest(manifest, json_path, idx_path, lengths, vocab_size)
        if verify_hashes:
            _check_bin_hash(manifest, bin_path, json_path)
            vocab_size = manifest["vocab_size"] if vocab_size is None else vocab_size
        if vocab_size is not None:
            _check_token_range(tokens, bin_path, vocab_size)
    except OSError as error:
        raise DataError(f"cannot read the dataset at {os.fspath(prefix)}: {error}") from error
    return TokenFiles(os.fspath(prefix), lengths, tokens, manifest)


def write_index(path: Path, lengths: np.ndarray, dtype: np.dtype) -> None:
    """Write an `.idx` of one sequence a document. lengths: int32 [n], tokens of each."""
    offsets = np.zeros(lengths.size, "<i8")
    np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
    code = next(code for code, name in _TOKEN_DTYPES.items() if np.dtype(name) == dtype)
    with open(path, "wb") as file:
        file.write(_HEADER.pack(_MAGIC, 1, code, lengths.size, lengths.size + 1))
        file.write(lengths.astype("<i4"))
        file.write(offsets * dtype.itemsize)
        file.write(np.arange(lengths.size + 1, dtype="<i8"))


def packed_kinds(kinds: Sequence[str]) -> dict[str, Any] | None:
    """The kind of each document as a manifest has it: names, and a compressed index a document.

    None where there are no kinds, more than 255, or so many documents that the manifest would be
    larger than it is read.
    """
    names = sorted(set(kinds))
    if not 0 < len(names) < 256:
        return None
    index = {name: number for number, name in enumerate(names)}
    data = zlib.compress(bytes(index[kind] for kind in kinds), 9)
    text = base64.b64encode(data).decode()
    return {"names": names, "documents": text} if len(text) < _MANIFEST_MAX_BYTES // 2 else None


def kinds_of(pair: TokenFiles) -> list[str] | None:
    """The kind of each document: its file's suffix. None for a pair without them.

    Raises DataError when the manifest's are damaged.
    """
    packed = (pair.manifest or {}).get("kinds")
    if packed is None:
        return None
    try:
        names = [str(name) for name in packed["names"]]
        decoder = zlib.decompressobj()
        count = pair.lengths.size
        index = decoder.decompress(base64.b64decode(packed["documents"], validate=True), count + 1)
        found = [names[number] for number in index]
        if len(found) != count:
            raise ValueError(f"{len(found)} of {count} documents")
    except (LookupError, TypeError, ValueError, zlib.error) as error:
        raise DataError(
            f"{pair.prefix}.json: the kinds of its documents are damaged: {error}"
        ) from (error)
    return found


def _is_file(path: Path) -> bool:
    """Whether there is a regular file. False for a name that no file can have."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_manifest(path: Path) -> dict[str, Any]:
    """PREFIX.json as a dict. Raises DataError when it is not a manifest of this package."""
    other = (
        f"{path} is not a manifest of megacpp data build: move it away to read the pair without "
        f"one, or build the dataset again with --overwrite"
    )
    try:
        manifest = json.loads(read_regular(path, _MANIFEST_MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{other} ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("schema") != MANIFEST_SCHEMA:
        raise DataError(f"{other} (wanted schema {MANIFEST_SCHEMA!r})")
    for key, good in _MANIFEST_KEYS.items():
        if not good(manifest.get(key)):
            raise DataError(f"{other} ({key} is {manifest.get(key)!r})")
    if manifest["eod_id"] >= manifest["vocab_size"]:
        raise DataError(
            f"{other} (eod_id is {manifest['eod_id']}, vocab_size {manifest['vocab_size']})"
        )
    return manifest


def _read_index(stream: BinaryIO, path: Path) -> tuple[np.dtype, np.ndarray]:
    size = os.fstat(stream.fileno()).st_size
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise DataError(f"{path} is truncated: {size} bytes, the header alone is {_HEADER.size}")
    magic, version, code, num_sequences, num_bounds = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise DataError(f"{path} is not a Megatron index: it starts with {magic!r}, not {_MAGIC!r}")
    if version != 1:
        raise DataError(f"{path} has index version {version}; only version 1 can be read")
    if code not in _TOKEN_DTYPES:
        kind = _FLOAT_DTYPES.get(code, "unknown")
        raise DataError(f"{path} has dtype code {code} ({kind}); tokens must be integers")
    if num_sequences < 1 or num_bounds < 2:
        raise DataError(
            f"{path} is empty: {num_sequences} sequences, {max(num_bounds - 1, 0)} documents"
        )
    wanted = _HEADER.size + 12 * num_sequences + 8 * num_bounds
    if size != wanted:
        raise DataError(
            f"{path} is {'truncated' if size < wanted else 'too long'}: {size} bytes, its header "
            f"({num_sequences} sequences, {num_bounds - 1} documents) asks for {wanted}"
        )
    lengths = np.fromfile(stream, "<i4", num_sequences)
    offsets = np.fromfile(stream, "<i8", num_sequences)
    bounds = np.fromfile(stream, "<i8", num_bounds)
    dtype = np.dtype(_TOKEN_DTYPES[code])
    _check_index(path, dtype, lengths, offsets, bounds)
    return dtype, lengths


def _check_index(
    path: Path, dtype: np.dtype, lengths: np.ndarray, offsets: np.ndarray, bounds: np.ndarray
) -> None:
    short = np.flatnonzero(lengths < 1)
    if short.size:
        raise DataError(
            f"{path} is damaged: sequence {short[0]} has length {lengths[short[0]]}, at least 1 "
            f"is needed"
        )
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    wrong = np.flatnonzero(offsets != np.concatenate(([0], ends[:-1])))
    if wrong.size:
        raise DataError(
            f"{path} is damaged: sequence {wrong[0]} starts at byte {offsets[wrong[0]]}, but the "
            f"sequences before it end elsewhere"
        )
    if bounds[0] != 0 or bounds[-1] != lengths.size or (np.diff(bounds) < 0).any():
        raise DataError(
            f"{path} is damaged: the document bounds must rise from 0 to {lengths.size}, the "
            f"number of sequences"
        )


def _map_tokens(bin_path: Path, idx_path: Path, dtype: np.dtype, num_tokens: int) -> np.ndarray:
    size, wanted = bin_path.stat().st_size, num_tokens * dtype.itemsize
    if size != wanted:
        raise DataError(
            f"{bin_path} is {size} bytes, but {idx_path} describes {wanted} ({num_tokens} tokens "
            f"of {dtype.itemsize} bytes): it is {'truncated' if size < wanted else 'too long'}, or "
            f"the two belong to different datasets"
        )
    return np.memmap(bin_path, dtype, "r", shape=(num_tokens,))


def _check_manifest(
    manifest: dict[str, Any],
    json_path: Path,
    idx_path: Path,
    lengths: np.ndarray,
    vocab_size: int | None,
) -> None:
    observed = {
        "documents": lengths.size,
        "tokens": int(lengths.sum(dtype=np.int64)),
        "idx_sha256": sha256_file(idx_path),
    }
    for key, value in observed.items():
        if manifest[key] != value:
            raise DataError(
                f"{json_path} says {key} {manifest[key]}, {idx_path} has {value}: they belong to "
                f"different datasets; build it again with --overwrite"
            )
    if vocab_size is not None and manifest["vocab_size"] > vocab_size:
        raise DataError(
            f"{json_path} says vocab_size {manifest['vocab_size']}, above the {vocab_size} asked "
            f"for: some tokens would have no embedding"
        )


def _check_bin_hash(manifest: dict[str, Any] | None, bin_path: Path, json_path: Path) -> None:
    if manifest is None:
        raise DataError(f"{bin_path} cannot be verified: there is no {json_path} to compare with")
    observed = sha256_file(bin_path)
    if observed != manifest["bin_sha256"]:
        raise DataError(
            f"{bin_path} has sha256 {observed}, {json_path} says {manifest['bin_sha256']}: it was "
            f"changed after it was built; build it again with --overwrite"
        )


def _check_token_range(tokens: np.ndarray, path: Path, vocab_size: int) -> None:
    step = _CHUNK_BYTES // tokens.itemsize
    for start in range(0, tokens.size, step):
        chunk = tokens[start : start + step]
        if chunk.min() < 0 or chunk.max() >= vocab_size:
            where = int(np.flatnonzero((chunk < 0) | (chunk >= vocab_size))[0])
            raise DataError(
                f"{path} has token {chunk[where]} at position {start + where}; the vocabulary is "
                f"0..{vocab_size - 1}"
            )
