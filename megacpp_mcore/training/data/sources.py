"""The files that a build reads: the given files and folders, in a fixed order."""

import importlib.util
import os
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megacpp_mcore.training.data.files import DataError

MAX_NAMES = 20  # keeps the manifest small when a shell has expanded *.parquet


@dataclass(frozen=True, slots=True)  # there may be millions
class SourceFile:
    """One regular file. source: index of the source it is in. relative: its path below `base`."""

    base: str
    source: int
    relative: str
    size: int

    @property
    def path(self) -> Path:
        return Path(self.base, self.relative)


def find_files(
    sources: Sequence[str | os.PathLike], include: Sequence[str] = ()
) -> tuple[list[SourceFile], Counter[str]]:
    """Every regular file of `sources`, sorted by source and path, and counts of what was left out.

    A source is a file, or a folder that is read recursively. Inside a folder, hidden names, linked
    folders, links to nothing and special files (a FIFO would block the build) are left out and
    counted.
    `include` keeps the files whose name matches one of the globs; a glob with a slash is matched
    against the path below the source.

    Raises DataError if there is no source, a source is missing or unreadable, one source is inside
    another (its files would be in the corpus twice), or no file remains.
    """
    if not sources:
        raise DataError("no source was named: give at least one file or folder")
    roots = [Path(source) for source in sources]
    for root in roots:
        try:
            root.stat()
        except OSError as error:
            raise DataError(f"cannot read the source {root}: {error.strerror}") from error
    _refuse_nested(roots)
    passed_over: Counter[str] = Counter()
    files: list[SourceFile] = []
    for position, root in enumerate(roots):
        names = sorted(_walk(root, passed_over)) if root.is_dir() else [root.name]
        base = os.fspath(root if root.is_dir() else root.parent)
        for relative in names:
            if include and not _matches(relative, include):
                continue
            status = _status(os.path.join(base, relative))
            if status is None:
                passed_over["dangling link"] += 1
            elif not stat.S_ISREG(status.st_mode):
                passed_over["not a regular file"] += 1
            else:
                files.append(SourceFile(base, position, relative, status.st_size))
    if not files:
        only = f" matching {' or '.join(include)}" if include else ""
        raise DataError(f"no file{only} in {', '.join(map(str, roots))}")
    return files, passed_over


def describe_sources(sources: Sequence[str | os.PathLike]) -> dict[str, Any]:
    """Number and names of the sources, for the manifest, without paths of this machine."""
    names = [os.path.basename(os.path.abspath(source)) for source in sources]
    return {"sources": len(names), "names": names[:MAX_NAMES]}


def torch_headers() -> Path:
    """The C++ headers of the installed torch package, found without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("--torch-headers: torch is not installed in this environment")
    folder = Path(spec.submodule_search_locations[0]) / "include"
    if not folder.is_dir():
        raise DataError(f"--torch-headers: this torch package ships no headers ({folder})")
    return folder


def _refuse_nested(roots: Sequence[Path]) -> None:
    named: dict[Path, Path] = {}
    for root in roots:
        if (resolved := root.resolve()) in named:
            raise DataError(f"source {root} is source {named[resolved]} again; give it once")
        named[resolved] = root
    for resolved, root in named.items():
        for parent in resolved.parents:
            if parent in named:
                raise DataError(
                    f"source {root} is inside source {named[parent]}: its files would be read twice"
                )


def _walk(root: Path, passed_over: Counter[str]) -> Iterable[str]:
    """Relative paths of everything below `root` that is not a folder."""

    def unreadable(error: OSError) -> None:
        raise DataError(f"cannot read the folder {error.filename}: {error.strerror}") from error

    for folder, folders, names in os.walk(root, onerror=unreadable):
        visible = [name for name in folders if not name.startswith(".")]
        passed_over["hidden"] += len(folders) - len(visible)
        folders[:] = [name for name in visible if not os.path.islink(os.path.join(folder, name))]
        passed_over["linked folder"] += len(visible) - len(folders)
        for name in names:
            if name.startswith("."):
                passed_over["hidden"] += 1
            else:
                yield os.path.relpath(os.path.join(folder, name), root)


def _matches(relative: str, include: Sequence[str]) -> bool:
    name = os.path.basename(relative)
    return any(fnmatchcase(relative if "/" in glob else name, glob) for glob in include)


def _status(path: str) -> os.stat_result | None:
    """The status of the file, or of what a link names; None for a link to nothing."""
    try:
        return os.stat(path)
    except OSError as error:
        if os.path.islink(path):
            return None
        raise DataError(f"cannot read {path}: {error.strerror}") from error
