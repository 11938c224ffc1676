"""Unified diffs, read and applied to the byte: no fuzz, no moved hunk, no repair.

`unidiff` parses. Applying is ours, because every tool that offers it searches for a place when the
stated one does not match. Text is handled as Latin-1, which maps each byte to one character and
back, so an encoding, a carriage return or a missing newline at the end survives as it is.

Each diff of a chain is written against the file with every earlier patch of the lane in it. When an
earlier one is left out (`compose`), the later one's lines are found by identity, not by searching
for similar text: a line that any patch wrote or removed stays in one list, marked with both.
"""

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from unidiff import PatchSet
from unidiff.errors import UnidiffParseError

from megacpp_mcore.patching import DependencyError, PatchError

_FIRST_FILE = re.compile(rb"^diff --git ", re.MULTILINE)
_GIT_HEADER = re.compile(r"^diff --git a/(?P<path>\S+) b/(?P=path)$")
_REFUSED_INFO = ("old mode", "new mode", "rename", "copy", "similarity", "dissimilarity", "deleted")


@dataclass(frozen=True)
class Hunk:
    """One hunk. `lines` are (" " | "-" | "+", the line's bytes with its newline) in diff order.

    start: first line of the source block, counted from 1; 0 for a file that has no line before.
    """

    number: int
    start: int
    target_start: int
    lines: tuple[tuple[str, bytes], ...]

    @property
    def source(self) -> tuple[bytes, ...]:
        return tuple(data for kind, data in self.lines if kind != "+")

    @property
    def target(self) -> tuple[bytes, ...]:
        return tuple(data for kind, data in self.lines if kind != "-")


@dataclass(frozen=True)
class FileDiff:
    """What one patch does to one file; `creates` when the file must not exist before."""

    path: str
    creates: bool
    hunks: tuple[Hunk, ...]


# the patches of the lane that touch one file: (patch id, its diff), in order
Chain = Sequence[tuple[str, FileDiff]]


def split_lines(data: bytes) -> list[bytes]:
    """Lines with their `\\n`; the last has none when the file does not end with one.

    bytes.splitlines would also split at a lone carriage return, which diff does not.
    """
    return [line for line in re.split(rb"(?<=\n)", data) if line]


def header_of(data: bytes) -> str:
    """The text above the first `diff --git` line of a patch file."""
    first = _FIRST_FILE.search(data)
    return data[: first.start() if first else len(data)].decode("utf-8", "replace").strip()


def body_of(data: bytes) -> bytes:
    """A patch file without its header text."""
    first = _FIRST_FILE.search(data)
    return data[first.start() :] if first else b""


def parse(data: bytes, name: str) -> tuple[FileDiff, ...]:
    """The file diffs of a `git diff`. `name` is the patch's, for messages.

    Raises PatchError for anything but changes to the lines of text files: an empty or malformed
    diff, text that belongs to no hunk, renames, modes, deletions, binary files.
    """
    text = body_of(data).decode("latin-1")
    try:
        patch_set = PatchSet(text)
    except UnidiffParseError as error:
        raise PatchError(f"{name}: not a unified diff: {error}".rstrip()) from error
    if not patch_set:
        raise PatchError(f"{name}: holds no `diff --git` section")
    parsed = tuple(_file_diff(file, text, name) for file in patch_set)
    # unidiff drops lines that belong to no hunk, for example when a hunk's header counts too few.
    counted = sum(
        len(file.patch_info or ()) + 2 + sum(1 + len(hunk) for hunk in file) for file in patch_set
    )
    if counted != len(split_lines(text.encode("latin-1"))):
        raise PatchError(
            f"{name}: some lines belong to no hunk: a hunk header's counts do not match its lines, "
            "or text follows the last hunk"
        )
    paths = [diff.path for diff in parsed]
    if len(set(paths)) != len(paths):
        raise PatchError(f"{name}: a file has more than one section")
    return parsed


def _file_diff(file, text: str, name: str) -> FileDiff:
    info = [line.rstrip("\n") for line in file.patch_info or ()]
    git_header = _GIT_HEADER.match(info[0]) if info else None
    if git_header is None:
        raise PatchError(f"{name}: a section does not start with `diff --git a/PATH b/PATH`")
    path = git_header["path"]
    refused = [line for line in info[1:] if line.startswith(_REFUSED_INFO)]
    if refused or file.is_binary_file:
        raise PatchError(
            f"{name}: {path}: {refused[0] if refused else 'binary'}: the lane carries only changed "
            "lines of text files"
        )
    creates = any(line.startswith("new file mode") for line in info)
    source = "/dev/null" if creates else f"a/{path}"
    if f"\n--- {source}\n+++ b/{path}\n@@ " not in text:
        raise PatchError(f"{name}: {path}: no `--- {source}`, `+++ b/{path}` and hunk follow it")
    hunks = tuple(_hunk(hunk, number, f"{name}: {path}") for number, hunk in enumerate(file, 1))
    return FileDiff(path, creates, hunks)


def _hunk(hunk, number: int, where: str) -> Hunk:
    lines: list[tuple[str, bytes]] = []
    for line in hunk:
        if line.line_type in (" ", "-", "+"):
            lines.append((line.line_type, line.value.encode("latin-1")))
        elif line.line_type == "\\" and lines and lines[-1][1].endswith(b"\n"):
            kind, data = lines[-1]
            lines[-1] = (kind, data[:-1])
        else:
            raise PatchError(f"{where}: hunk {number}: cannot read {str(line).rstrip()!r}")
    parsed = Hunk(number, hunk.source_start, hunk.target_start, tuple(lines))
    if parsed.source == parsed.target:
        raise PatchError(f"{where}: hunk {number} changes nothing")
    if not parsed.source and parsed.start != 0:
        raise PatchError(
            f"{where}: hunk {number} has no context line, so nothing says that its place is right; "
            "make the diff with `git diff -U3`"
        )
    return parsed


def reverse(diff: FileDiff) -> FileDiff:
    """The diff that undoes `diff`; of a created file, one that leaves it empty."""
    swap = {" ": " ", "-": "+", "+": "-"}
    hunks = tuple(
        Hunk(hunk.number, hunk.target_start, hunk.start, tuple((swap[k], d) for k, d in hunk.lines))
        for hunk in diff.hunks
    )
    return FileDiff(diff.path, False, hunks)


def apply(diff: FileDiff, before: bytes | None, name: str) -> bytes:
    """`before` (None: no such file) with every hunk applied at its stated line.

    Raises PatchError when a hunk does not match exactly, or a file exists that should not.
    """
    return compose(before, [(name, diff)], {name})


def compose(pristine: bytes | None, chain: Chain, chosen: Collection[str]) -> bytes | None:
    """The file's bytes with the `chosen` patches of `chain`; None when it does not exist.

    Raises DependencyError when a chosen patch builds on lines of one not chosen, and PatchError
    when the chain itself does not apply to `pristine`.
    """
    lines = [_Line(data) for data in split_lines(pristine or b"")]
    exists = chosen_exists = pristine is not None
    where = ""
    for patch, diff in chain:
        where = f"{patch}: {diff.path}"
        if diff.creates == exists:
            known = "must not exist" if exists else "does not exist"
            raise PatchError(f"{where}: the file {known} here")
        exists, chosen_exists = True, chosen_exists or patch in chosen
        there = [at for at, line in enumerate(lines) if line.removed_by is None]
        data = [lines[at].data for at in there]
        for hunk, index in reversed([*_places(diff, data, where)]):
            block = there[index : index + len(hunk.source)]
            start, end = (block[0], block[-1] + 1) if block else (0, 0)
            if patch in chosen:
                _check_dependencies(lines[start:end], chosen, f"{where}: hunk {hunk.number}")
            lines[start:end] = _edited(hunk, patch, lines[start:end])
    ours = [line.data for line in lines if line.is_with(chosen)]
    if not all(line.endswith(b"\n") for line in ours[:-1]):
        raise PatchError(f"{where}: a line without newline would not be the last one")
    return b"".join(ours) if chosen_exists else None


@dataclass(eq=False, slots=True)
class _Line:
    """A line of any state of a file, with the patch that wrote it and the one that removed it."""

    data: bytes
    origin: str | None = None
    removed_by: str | None = None

    def is_with(self, chosen: Collection[str]) -> bool:
        """Whether the line is in the file that has the patches `chosen`."""
        return (self.origin is None or self.origin in chosen) and self.removed_by not in chosen


def _places(diff: FileDiff, lines: list[bytes], where: str) -> Iterator[tuple[Hunk, int]]:
    """Each hunk with the index of its source block in `lines`, which is where it says."""
    done = 0
    for hunk in diff.hunks:
        index = check_hunk(hunk, lines, where)
        if index < done:
            raise PatchError(f"{where}: hunk {hunk.number} overlaps the one before it")
        done = index + len(hunk.source)
        yield hunk, index


def _edited(hunk: Hunk, patch: str, lines: Sequence[_Line]) -> list[_Line]:
    """The lines of a hunk's block with the hunk in them; lines removed earlier stay in place."""
    rest, result = iter(lines), []
    for kind, data in hunk.lines:
        if kind == "+":
            result.append(_Line(data, patch))
            continue
        for line in rest:
            result.append(line)
            if line.removed_by is None:
                break
        if kind == "-":
            result[-1].removed_by = patch
    return result


def _check_dependencies(block: Sequence[_Line], chosen: Collection[str], where: str) -> None:
    """Refuse a block that is not the same, line by line, with all patches so far and the chosen."""
    for line in sorted(block, key=lambda line: line.removed_by is not None):
        if line.is_with(chosen) != (line.removed_by is None):
            needs = line.removed_by or line.origin
            text = f"{where} builds on lines that patch {needs!r} changes: it needs it"
            error = DependencyError(text)
            error.needs = needs
            raise error


def closure(pristine: bytes | None, chain: Chain, ids: Collection[str]) -> frozenset[str]:
    """`ids` and the earlier patches of `chain` without which they do not apply to this file."""
    chosen = set(ids)
    while True:
        try:
            compose(pristine, chain, chosen)
            return frozenset(chosen)
        except DependencyError as error:
            chosen.add(error.needs)


def check_hunk(hunk: Hunk, lines: list[bytes], where: str) -> int:
    """The index in `lines` where the hunk's source block stands, exactly as its header states.

    Raises PatchError naming `where`, the hunk, the line, what was expected and what was found.
    """
    index = hunk.start - 1 if hunk.source else 0
    if not hunk.source and lines:
        raise PatchError(
            f"{where}: hunk {hunk.number}: expected an empty file, found {len(lines)} lines"
        )
    for offset, expected in enumerate(hunk.source):
        at = index + offset
        found = lines[at] if 0 <= at < len(lines) else None
        if found != expected:
            shown = "the end of the file" if found is None else repr(found.decode("latin-1"))
            raise PatchError(
                f"{where}: hunk {hunk.number}, line {at + 1}: "
                f"expected {expected.decode('latin-1')!r}, found {shown}"
            )
    return index


def make(path: str, before: bytes | None, after: bytes) -> bytes:
    """The `git diff` section that turns `before` (None: no such file) into `after`.

    Empty when both are equal. Raises PatchError for a path with white space in it.
    """
    if re.search(r"\s", path):
        raise PatchError(f"{path!r}: a path with white space cannot be in the lane")
    if before == after:
        return b""
    old, new = ([line.decode("latin-1") for line in split_lines(d or b"")] for d in (before, after))
    source = "/dev/null" if before is None else f"a/{path}"
    created = "new file mode 100644\n" if before is None else ""
    text = f"diff --git a/{path} b/{path}\n{created}"
    for line in difflib.unified_diff(old, new, source, f"b/{path}", n=3):
        text += line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
    return text.encode("latin-1")
