"""A folder of checkpoints: DIR/iter_0000100/ is the one of iteration 100, named as Megatron does.

A checkpoint is complete when it has the two files that are written last, `.metadata` (the index of
its shards) and `metadata.json`, and every file of its checksums. What is removed is renamed first,
so nothing that is half there has a checkpoint's name:
  .tmp-iter_N  is being written (CPU lane)
  .old-iter_N  makes way for another of the same iteration, or is being deleted
`recover` puts a complete one of these back when a kill left no checkpoint in its place.
"""

import itertools
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from megacpp_mcore.files import sync
from megacpp_mcore.training.checkpoints import checksums

TRACKER = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"iter_(\d{7,})")
_BEING_WRITTEN, _ASIDE, _SUPERSEDED = ".tmp-", ".old-", "superseded-"
# what runs write into a checkpoint; .metadata.tmp and what follows, only a killed one leaves
_OWN = re.compile(
    r".*\.distcp|common\.pt|metadata\.json|progress\.json|checksums\.json|\.metadata(\.tmp|\.bck)?"
    r"|\.sum-.*|\.checksums\.json\..*"
)


def path_of(folder: Path, iteration: int) -> Path:
    """The checkpoint of `iteration` in `folder`, whether or not it is there."""
    return folder / f"iter_{iteration:07d}"


def iteration_of(checkpoint: Path) -> int:
    """The iteration in a checkpoint's name."""
    return int(_NAME.fullmatch(checkpoint.name)[1])


def being_written(final: Path) -> Path:
    """Where the checkpoint `final` is written before it gets its name."""
    return final.with_name(_BEING_WRITTEN + final.name)


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint's files are all there; `checksums.verify` says whether they are whole.

    Also for one that has another name while it is written or removed."""
    last = all((checkpoint / name).is_file() for name in (".metadata", "metadata.json"))
    return last and not checksums.missing(checkpoint)


def complete(folder: Path) -> list[int]:
    """The iterations of the complete checkpoints in `folder`, in order."""
    found = (_NAME.fullmatch(path.name) for path in folder.glob("iter_*") if is_complete(path))
    return sorted(int(name[1]) for name in found if name)


def named(folder: Path) -> list[Path]:
    """Everything in `folder` with a name of this module, complete or not."""
    prefixes = "|".join(map(re.escape, (_BEING_WRITTEN, _ASIDE, _SUPERSEDED)))
    form = re.compile(rf"({prefixes})?iter_\d{{7,}}(\.\d+)?")
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    return [folder / name for name in names if form.fullmatch(name)]


def is_unfinished(path: Path) -> bool:
    """Whether a path has the name of a checkpoint that is being written or removed."""
    return path.name.startswith((_BEING_WRITTEN, _ASIDE))


def incomplete(folder: Path, after: int = 0) -> list[Path]:
    """What has the name of a checkpoint newer than `after`, and is not complete."""
    named = (path for path in sorted(folder.glob("iter_*")) if _NAME.fullmatch(path.name))
    return [path for path in named if iteration_of(path) > after and not is_complete(path)]


def recover(folder: Path, needs: tuple[str, ...] = ()) -> list[str]:
    """Give complete checkpoints back the names that a kill took from them. Returns what was done.

    needs: files that a checkpoint which is being written must have, besides Megatron's.
    """
    said = []
    for prefix in (_BEING_WRITTEN, _ASIDE):  # the newer one first
        for path in _prefixed(folder, prefix):
            final = folder / path.name.removeprefix(prefix)
            if is_complete(final) or not _is_whole(path, needs if prefix == _BEING_WRITTEN else ()):
                continue
            if os.path.lexists(final):
                delete(final)
            path.rename(final)
            sync(folder)
            said.append(f"{final} was complete, but a kill left it as {path.name}: it is back")
    return said


def _is_whole(path: Path, needs: tuple[str, ...]) -> bool:
    """Complete by its checksums, contents included: it may not have been synced."""
    try:
        whole = is_complete(path) and checksums.verify(path)
        return whole and set(needs) <= set(checksums.read(path) or {})
    except checksums.DamagedError:
        return False


def set_aside(final: Path) -> None:
    """Take a checkpoint's name from it, if it is there: another of this iteration is written.

    `sweep` deletes it once that is complete; until then `recover` can put it back.
    """
    aside = final.with_name(_ASIDE + final.name)
    if not os.path.lexists(final):
        return
    if aside.exists():
        if is_complete(aside) and not is_complete(final):  # a kill has left both
            delete(final)
            return
        delete(aside)
    final.rename(aside)
    sync(final.parent)


def replace(partial: Path, final: Path) -> None:
    """Give the complete and synced `partial` the name `final`, in the place of what has it."""
    set_aside(final)
    partial.rename(final)
    sync(final.parent)
    sweep(final.parent)


def sweep(folder: Path) -> None:
    """Delete what is half written or half deleted. Call `recover` first in a new process."""
    for prefix in (_BEING_WRITTEN, _ASIDE):
        for path in _prefixed(folder, prefix):
            delete(path)


def is_foreign(checkpoint: Path) -> bool:
    """Whether something in `checkpoint` was not written by a run: another program's, a note."""
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        return True
    return not all(_is_own(path) for path in checkpoint.iterdir())


def _is_own(path: Path) -> bool:
    return bool(_OWN.fullmatch(path.name)) and not path.is_dir()


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint, under any of its names. What no run has written is kept, and said."""
    if not is_foreign(checkpoint):
        shutil.rmtree(checkpoint)
        return
    kept = _superseded(checkpoint)
    checkpoint.rename(kept)
    if kept.is_dir() and not kept.is_symlink():
        for path in filter(_is_own, kept.iterdir()):
            path.unlink()
    said = f"megacpp: {checkpoint} had files that no run wrote: they are in {kept.name} now"
    print(said, file=sys.stderr, flush=True)


def prune(folder: Path, keep: int) -> None:
    """Delete all complete checkpoints but the newest `keep`."""
    for iteration in complete(folder)[:-keep]:
        set_aside(path_of(folder, iteration))
    sweep(folder)


def supersede(folder: Path, iteration: int) -> list[str]:
    """Rename the checkpoints newer than `iteration`, so that a run goes on from it. Returns what
    was done."""
    said = []
    for path in sorted(folder.glob("iter_*")):
        if _NAME.fullmatch(path.name) and iteration_of(path) > iteration:
            new = _superseded(path)
            path.rename(new)
            said.append(f"{path} is newer than iteration {iteration}: it is now {new.name}")
    sync(folder)
    return said


def _superseded(path: Path) -> Path:
    """A free name for a checkpoint that gives its own up."""
    name = re.search(_NAME, path.name)[0]
    others = (f".{n}" if n else "" for n in itertools.count())
    names = (path.with_name(f"{_SUPERSEDED}{name}{more}") for more in others)
    return next(name for name in names if not os.path.lexists(name))


def older_good(checkpoint: Path) -> Path | None:
    """The newest whole checkpoint that is older than `checkpoint`, or None."""
    folder, before = checkpoint.parent, iteration_of(checkpoint)
    for iteration in reversed([number for number in complete(folder) if number < before]):
        try:
            checksums.verify(path_of(folder, iteration))
        except checksums.DamagedError:
            continue
        return path_of(folder, iteration)
    return None


def advice(checkpoint: Path) -> str:
    """What to do about a damaged `checkpoint`, as the end of an error."""
    if good := older_good(checkpoint):
        number = iteration_of(good)
        return f"the older {good} is whole: resume from it with --resume-from {number}"
    return f"there is no older whole checkpoint in {checkpoint.parent}"


def _prefixed(folder: Path, prefix: str) -> Iterator[Path]:
    for entry in sorted(os.listdir(folder)) if folder.is_dir() else ():
        if entry.startswith(prefix) and _NAME.fullmatch(entry.removeprefix(prefix)):
            yield folder / entry
