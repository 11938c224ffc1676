"""Atomic writes that survive a power loss, reads of regular files only, and content hashes.

Imports neither torch nor anything else of the package.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import uuid
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO


def cache_folder(*parts: str) -> Path:
    """A folder for files that may be deleted at any time: `megacpp-mcore/PARTS` in XDG_CACHE_HOME,
    or in ~/.cache. It may not exist."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root, "megacpp-mcore", *parts)


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
    """Write a file in one step, as `written_atomically` does. content: text is written as UTF-8."""
    with written_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def written_atomically(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A file to write into, which replaces `path` when the block ends: a temporary file in the same
    folder is flushed and renamed, then the folder is flushed.

    The file's mode follows the umask. Raises OSError, also where `path` is a device or a FIFO, or a
    link to one, which it would replace; what was at `path` is then still there, whole, and the
    temporary file is gone. A process that is killed may leave a temporary file, `.NAME.*.tmp`: see
    `remove_temporaries`.
    """
    path = Path(path)
    if not path.name:  # "", "." or "/"
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(
            errno.EINVAL, "it is not a regular file, and would be replaced by one", os.fspath(path)
        )
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def remove_temporaries(path: Path) -> None:
    """Delete what killed processes have left of their writes of `path`, which none writes now."""
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        left.unlink()


def read_regular(path: str | os.PathLike, most: int = 1 << 26) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises OSError, also for a FIFO or a device (which would block, or never end), for a larger
    file, and for a name that no file can have.
    """
    try:
        # a FIFO opens at once, without a writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL
        raise OSError(errno.EINVAL, str(error), repr(path)) from error
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        if status.st_size > most:
            raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, at most {most} are read")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most + 1)
    finally:
        os.close(descriptor)


def locked(path: str | os.PathLike) -> FileIO:
    """The file `path`, which is made, with an exclusive lock until it is closed. Its content stays.

    Raises BlockingIOError while another process has the lock, and OSError for a link (to somebody's
    file), a FIFO or a device, a name that no file can have, and a file system without locks.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except ValueError as error:  # a NUL
        raise OSError(errno.EINVAL, str(error), repr(path)) from error
    file = open(descriptor, "rb+", buffering=0)  # noqa: SIM115 (the caller closes it)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    return file


def sync(path: str | os.PathLike) -> None:
    """Flush a file to the disk; of a folder, the renames and removals in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: str | os.PathLike) -> str:
    """Hex sha256 of a file."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def content_sha256(content: dict[str, Any]) -> str:
    """Hex sha256 of plain data, a recipe's: as ASCII JSON with sorted keys and no spaces."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
