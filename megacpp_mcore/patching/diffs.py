"""Unified diffs, read and applied exactly: no fuzz, no moved hunk, no repair.

Each diff of a chain is written against the file with every earlier patch of the lane in it. When an
earlier one is left out (`compose`), the later one's lines are found by identity, not by searching
for similar text: a line that any patch wrote or removed stays in one list, marked with both.
"""

import difflib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megacpp_mcore.patching import DependencyError, PatchError

_SECTION = re.compile(rb"^(?=diff --git )", re.MULTILINE)
_GIT_HEADER = re.compile(r"diff --git a/(\S+) b/\1\n")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_REFUSED = re.compile(
    r"^(old mode|new mode|rename|copy|similarity|dissimilarity|deleted|binary).*",
    re.MULTILINE | re.IGNORECASE,
)


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


# the patches of the lane that touch one file: (patch id, its diff, ...), in order
Chain = Sequence[tuple[str, FileDiff]]


def split_lines(data: bytes) -> list[bytes]:
    """Lines with their `\\n`, which alone ends a line: bytes.splitlines splits at `\\r` too."""
    return [line for line in re.split(rb"(?<=\n)", data) if line]


def header_and_body(data: bytes) -> tuple[str, bytes]:
    """The text above the first `diff --git` line of a patch file, and the rest of the file."""
    header, *body = _SECTION.split(data, maxsplit=1)
    return header.decode("utf-8", "replace").strip(), b"".join(body)


def parse(data: bytes, name: str) -> tuple[FileDiff, ...]:
    """The file diffs of a `git diff`. `name` is the patch's, for messages.

    Raises PatchError for anything but changes to the lines of text files: an empty or malformed
    diff, text that belongs to no hunk, renames, modes, deletions, binary files.
    """
    parsed = tuple(_file_diff(section, name) for section in _SECTION.split(data)[1:])
    if not parsed:
        raise PatchError(f"{name}: holds no `diff --git` section")
    if len({diff.path for diff in parsed}) != len(parsed):
        raise PatchError(f"{name}: a file has more than one section")
    return parsed


def _file_diff(section: bytes, name: str) -> FileDiff:
    # Latin-1 maps each byte to one character and back: encodings survive as they are.
    info, *hunks = re.split("^(?=@@ )", section.decode("latin-1"), flags=re.MULTILINE)
    git_header = _GIT_HEADER.match(info)
    if git_header is None:
        raise PatchError(f"{name}: a section does not start with `diff --git a/PATH b/PATH`")
    path = git_header[1]
    if refused := _REFUSED.search(info):
        raise PatchError(
            f"{name}: {path}: {refused[0]}: the lane carries changed lines of text files only, no "
            f"renames, modes, deletions or binary files"
        )
    creates = "\nnew file mode" in info
    source = "/dev/null" if creates else f"a/{path}"
    if not hunks or not info.endswith(f"\n--- {source}\n+++ b/{path}\n"):
        raise PatchError(f"{name}: {path}: no `--- {source}`, `+++ b/{path}` and hunk follow it")
    numbered = enumerate(hunks, 1)
    return FileDiff(path, creates, tuple(_hunk(*each, f"{name}: {path}") for each in numbered))


def _hunk(number: int, text: str, where: str) -> Hunk:
    where = f"{where}: hunk {number}"
    head, *body = split_lines(text.encode("latin-1"))
    stated = _HUNK.match(head.decode("latin-1"))
    if stated is None:
        raise PatchError(f"{where}: cannot read its header {head!r}")
    start, source_count, target_start, target_count = (int(n or 1) for n in stated.groups())
    lines: list[tuple[str, bytes]] = []
    for line in body:
        kind, data = chr(line[0]), line[1:]
        if kind in " -+":
            lines.append((kind, data))
        elif kind == "\\" and lines and lines[-1][1].endswith(b"\n"):
            lines[-1] = (lines[-1][0], lines[-1][1][:-1])
        else:
            raise PatchError(
                f"{where}: Hunk diff line expected, found {line!r}: lines that do not start with "
                f"' ', '-' or '+' belong to no hunk"
            )
    hunk = Hunk(number, start, target_start, tuple(lines))
    if (len(hunk.source), len(hunk.target)) != (source_count, target_count):
        raise PatchError(
            f"{where}: its header's counts do not match its lines: some belong to no hunk, or the "
            f"hunk is shorter than expected"
        )
    if hunk.source == hunk.target:
        raise PatchError(f"{where}: changes nothing")
    if not hunk.source and start != 0:
        raise PatchError(
            f"{where}: has no context line, so nothing says that its place is right; make the diff "
            f"with `git diff -U3`"
        )
    return hunk


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


@dataclass(slots=True, eq=False)
class _Line:
    """A line of a file, with the patch that wrote it and the one that removed it."""

    data: bytes
    origin: str = ""
    removed_by: str = ""

    def is_in(self, chosen: Collection[str]) -> bool:
        return (not self.origin or self.origin in chosen) and self.removed_by not in chosen


def compose(pristine: bytes | None, chain: Chain, chosen: Collection[str]) -> bytes | None:
    """The file's bytes with the `chosen` patches of `chain`; None when it does not exist.

    Raises DependencyError when a chosen patch builds on lines of one not chosen, and PatchError
    when the chain itself does not apply to `pristine`.
    """
    weave = [_Line(data) for data in split_lines(pristine or b"")]
    exists = ours_exist = pristine is not None
    where = ""
    for patch, diff, *_ in chain:
        where = f"{patch}: {diff.path}"
        if diff.creates == exists:
            known = "must not exist" if exists else "does not exist"
            raise PatchError(f"{where}: the file {known} here")
        exists, ours_exist = True, ours_exist or patch in chosen
        _weave_in(weave, patch, diff, chosen)
    ours = [line.data for line in weave if line.is_in(chosen)]
    if not all(data.endswith(b"\n") for data in ours[:-1]):
        raise PatchError(f"{where}: a line without newline would not be the last one")
    return b"".join(ours) if ours_exist else None


def _weave_in(weave: list[_Line], patch: str, diff: FileDiff, chosen: Collection[str]) -> None:
    """Add a patch to the lines of every version so far. Raises as `compose` does."""
    standing = [line for line in weave if not line.removed_by]
    data = [line.data for line in standing]
    place = 0  # in `weave`, behind the last line seen
    for hunk in diff.hunks:
        at = check_hunk(hunk, data, f"{patch}: {diff.path}")
        where = f"{patch}: {diff.path}: hunk {hunk.number}"
        block = standing[at : at + len(hunk.source)]
        first, last = (weave.index(block[end]) for end in (0, -1)) if block else (place, place - 1)
        if first < place:
            raise PatchError(f"{where} overlaps the one before it")
        for line in weave[first : last + 1] if patch in chosen else ():
            if line.is_in(chosen) == bool(line.removed_by):
                needs = line.removed_by or line.origin
                raise DependencyError(
                    f"{where} builds on lines that patch {needs!r} changes: it needs it. Patches "
                    f"that share lines go on and off together: apply with --only {needs} as well, "
                    f"or revert both",
                    needs,
                )
        for kind, text in hunk.lines:
            place = weave.index(block[0]) if block else place
            if kind == "+":
                weave.insert(place, _Line(text, patch))
            else:
                block.pop(0).removed_by = patch if kind == "-" else ""
            place += 1


def closure(files: Sequence[tuple[bytes | None, Chain]], patch: str) -> set[str]:
    """`patch` and the earlier ones without which it does not apply to its `files`, each of which is
    (its pristine bytes, its chain)."""
    chosen = {patch}
    while True:
        try:
            for pristine, chain in files:
                compose(pristine, chain, chosen)
            return chosen
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
