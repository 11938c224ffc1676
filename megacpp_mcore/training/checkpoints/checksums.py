"""`checksums.json` in a checkpoint's folder: the size and CRC-32 of every other file in it.

It is written before `metadata.json`, which Megatron writes last, and verified before a load. It
finds damage (a truncated file, a bad disk), not forgery.
"""

import json
import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.files import read_regular, write_atomically

NAME = "checksums.json"
_BLOCK = 4 << 20
_POLYNOMIAL = 0xEDB88320  # CRC-32's, without x^32; the highest bit is the coefficient of 1
_THREADS = 8  # files read at once: a rank 0 verifies the shards of all ranks


class DamagedError(MegacppError):
    """A file of a checkpoint that is not what was written."""


def write(checkpoint: Path, known: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the checksums of the files in `checkpoint`.

    known: file name -> {"bytes", "crc32"} of those that need not be read again.
    """
    names = (p.name for p in checkpoint.iterdir() if p.is_file() and not p.name.startswith(".sum-"))
    listed = {name: known.get(name) or of_file(checkpoint / name) for name in names if name != NAME}
    listed |= known
    write_atomically(checkpoint / NAME, json.dumps(dict(sorted(listed.items())), indent=0))


def add(checkpoint: Path, name: str) -> None:
    """Add one file to the checksums of `checkpoint`."""
    write(checkpoint, (read(checkpoint) or {}) | {name: of_file(checkpoint / name)})


def read(checkpoint: Path) -> dict[str, dict[str, Any]] | None:
    """file name -> {"bytes", "crc32"}; None for a checkpoint that was saved without checksums.

    Raises DamagedError when the list itself is damaged.
    """
    path = checkpoint / NAME
    try:
        listed = json.loads(read_regular(path))
        for name, entry in listed.items():
            plain = name not in (".", "..") and "/" not in name
            if not (plain and type(entry["bytes"]) is int and isinstance(entry["crc32"], str)):
                raise ValueError(f"its entry {name!r} is not a file's size and CRC-32")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from error
    return listed


def of_file(path: Path) -> dict[str, Any]:
    """{"bytes", "crc32"} of a file. Raises OSError."""
    crc, size = 0, 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return {"bytes": size, "crc32": f"{crc:08x}"}


def joined(first: int, second: int, length: int) -> int:
    """The CRC-32 of two pieces one after the other. length: bytes of the second."""
    return _product(_behind(length), first) ^ second


@lru_cache(256)
def _behind(length: int) -> int:
    """x^(8 length), modulo CRC-32's polynomial: the factor of what has `length` bytes behind it."""
    power, square = 1 << 31, 1 << 23  # 1, and x^8
    while length:
        if length & 1:
            power = _product(square, power)
        square = _product(square, square)
        length >>= 1
    return power


def _product(a: int, b: int) -> int:
    """Of two polynomials over bits, modulo CRC-32's."""
    product = 0
    while a:
        if a & 1 << 31:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def missing(checkpoint: Path) -> list[str]:
    """The listed files that are not there; none without a (readable) list."""
    try:
        listed = read(checkpoint) or {}
    except DamagedError:
        return []  # `verify` names it
    return [name for name in listed if not (checkpoint / name).is_file()]


def verify(checkpoint: Path, advance: Callable[[int], object] = lambda size: None) -> bool:
    """Compare every file with its checksum. Returns False when there are no checksums.

    advance: is told the bytes read since the last call.

    Raises DamagedError, which names the first file that differs.
    """
    listed = read(checkpoint)
    if listed is None:
        return False
    with ThreadPoolExecutor(_THREADS) as pool:
        wrong = pool.map(lambda name: _wrong(checkpoint / name, listed[name]), listed)
        for entry, reason in zip(listed.values(), wrong, strict=True):
            if reason:
                raise DamagedError(reason)
            advance(entry["bytes"])
    return True


def _wrong(path: Path, written: Mapping[str, Any]) -> str | None:
    if (size := _size(path)) is None:
        return f"{path} is missing"
    if size != written["bytes"]:
        return f"{path} is damaged: it has {size} bytes, {written['bytes']} were written"
    try:
        found = of_file(path)["crc32"]
    except OSError as error:
        return f"{path} cannot be read: {error}"
    if found != written["crc32"]:
        return f"{path} is damaged: its CRC-32 is {found}, {written['crc32']} was written"
    return None


def _size(path: Path) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None
