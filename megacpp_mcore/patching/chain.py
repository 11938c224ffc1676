"""What a file becomes when some of the patches that touch it are applied, in the lane's order.

Each diff is written against the file with every earlier patch of the lane in it. When an earlier
one is left out, the later one's lines are found by identity, not by searching for similar text:
each line keeps its identity through the whole chain, so the block that a hunk names in the full
file is the same lines in the chosen one, or the hunk depends on a patch that was left out.
"""

from collections.abc import Collection, Sequence

from megacpp_mcore.patching import diffs
from megacpp_mcore.patching.diffs import FileDiff, Hunk
from megacpp_mcore.patching.errors import DependencyError, PatchError

# the patches of the lane that touch one file: (patch id, its diff), in order
Chain = Sequence[tuple[str, FileDiff]]


class _Line:
    """One line of one file, with the patch that wrote it and the patch that removed it."""

    __slots__ = ("data", "origin", "removed_by")

    def __init__(self, data: bytes, origin: str | None) -> None:
        self.data = data
        self.origin = origin
        self.removed_by: str | None = None


def compose(pristine: bytes | None, chain: Chain, chosen: Collection[str]) -> bytes | None:
    """The file's bytes with the `chosen` patches of `chain`; None when it does not exist.

    Raises DependencyError when a chosen patch builds on lines of one not chosen, and PatchError
    when the chain itself does not apply to `pristine`.
    """
    full = [_Line(data, None) for data in diffs.split_lines(pristine or b"")]
    ours = list(full)
    exists = ours_exists = pristine is not None
    where = ""
    for patch, diff in chain:
        where = f"{patch}: {diff.path}"
        if diff.creates == exists:
            raise PatchError(
                f"{where}: the file {'must not exist' if exists else 'does not exist'} here"
            )
        exists = True
        edits = _edits(patch, diff, full)
        if patch in chosen:
            ours_exists = True
            for hunk, old, new in reversed(edits):
                index = _index(old, ours, f"{where}: hunk {hunk.number}")
                ours[index : index + len(old)] = new
        for _, old, new in reversed(edits):
            index = full.index(old[0]) if old else 0
            full[index : index + len(old)] = new
            for line in set(old).difference(new):
                line.removed_by = patch
    return diffs.join_lines([line.data for line in ours], where) if ours_exists else None


def _edits(
    patch: str, diff: FileDiff, full: list[_Line]
) -> list[tuple[Hunk, list[_Line], list[_Line]]]:
    """Per hunk: the lines it replaces in the full file, and those it puts there."""
    data = [line.data for line in full]
    edits = []
    done = 0
    for hunk in diff.hunks:
        index = diffs.check_hunk(hunk, data, f"{patch}: {diff.path}")
        if index < done:
            raise PatchError(f"{patch}: {diff.path}: hunk {hunk.number} overlaps the one before it")
        done = index + len(hunk.source)
        old = full[index:done]
        kept = iter(old)
        new = []
        for kind, text in hunk.lines:
            line = _Line(text, patch) if kind == "+" else next(kept)
            if kind != "-":
                new.append(line)
        edits.append((hunk, old, new))
    return edits


def _index(old: list[_Line], ours: list[_Line], where: str) -> int:
    """Where the lines `old` stand in `ours`, one after the other."""
    if not old:
        return 0
    for line in old:
        if line not in ours:
            raise _depends(where, line.origin)
    index = ours.index(old[0])
    for offset, line in enumerate(old):
        found = ours[index + offset]
        if found is not line:
            raise _depends(where, found.removed_by)
    return index


def _depends(where: str, needs: str | None) -> DependencyError:
    error = DependencyError(f"{where} builds on lines that patch {needs!r} changes: it needs it")
    error.needs = needs or ""
    return error


def closure(pristine: bytes | None, chain: Chain, ids: Collection[str]) -> frozenset[str]:
    """`ids` and the earlier patches of `chain` without which they do not apply to this file."""
    chosen = set(ids)
    while True:
        try:
            compose(pristine, chain, chosen)
        except DependencyError as error:
            if not error.needs or error.needs in chosen:
                raise
            chosen.add(error.needs)
        else:
            return frozenset(chosen)
