"""Which checkpoint a run resumes from: the last complete one.

Megatron writes DIR/iter_N, and then the tracker DIR/latest_checkpointed_iteration.txt, not
atomically. A run killed in between leaves a folder that the tracker does not name, or an empty
tracker, with which Megatron exits with status 0. `megacpp_mcore.training.checkpoints.folder` says
which checkpoints are complete.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from megacpp_mcore import receipts
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.files import write_atomically
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.recipe.changes import MAY_CHANGE, refused_changes
from megacpp_mcore.training.checkpoints import checksums
from megacpp_mcore.training.checkpoints.folder import (
    TRACKER,
    advice,
    complete,
    incomplete,
    iteration_of,
    path_of,
    recover,
    supersede,
)


class ResumeError(MegacppError):
    """A folder of checkpoints without a complete and whole one to resume from, or another run's."""


def newest(folder: str | None) -> Path | None:
    """The complete checkpoint that a run would resume from, or None."""
    if folder is None:
        return None
    named = _tracked(Path(folder) / TRACKER)
    found = complete(Path(folder))
    if not found:
        return None
    return path_of(Path(folder), named if named in found else found[-1])


def go_back(folder: str, iteration: int, *, verify: bool = True) -> list[str]:
    """Let the next run resume from `iteration`: newer checkpoints lose their names, and the tracker
    names it. Returns what was done. Raises ResumeError, before anything is changed, when it is not
    complete, or as `check` does."""
    _say(recover(Path(folder)))
    if iteration not in (found := complete(Path(folder))):
        raise ResumeError(
            f"--resume-from {iteration}: {folder} has complete checkpoints of iterations "
            f"{', '.join(map(str, found)) or 'none'}"
        )
    check(path_of(Path(folder), iteration), verify=verify)
    said = supersede(Path(folder), iteration)
    write_atomically(Path(folder) / TRACKER, str(iteration))
    return said


def check(checkpoint: Path, *, verify: bool = True) -> None:
    """Refuse a checkpoint that is damaged, or whose index is not plain data.

    verify: compare its files with their checksums. Raises ResumeError, which names the file and the
    newest older checkpoint that is whole. Reads every file: call it on one rank.
    """
    from megacpp_mcore.stack import unpickling  # imports torch

    try:
        if verify and not checksums.verify(checkpoint):
            _say([f"{checkpoint} was saved without checksums: it is not verified"])
        unpickling.read_index(checkpoint)
    except (checksums.DamagedError, ValueError, OSError) as error:
        raise ResumeError(f"{error}; {advice(checkpoint)}") from error


def check_same_run(recipe: Recipe, receipt: Path) -> None:
    """Refuse to resume the run of `receipt`, if there is one, with a recipe that computes something
    else: before a model is built. Raises ResumeError, which names the keys that differ, and
    ReceiptError for a receipt that cannot be read."""
    if not receipt.is_file():
        return
    if refused := refused_changes(receipts.read(receipt)["recipe"]["content"], recipe.to_dict()):
        raise ResumeError(
            f"the run of {receipt} has another recipe: {refused}. Resume with the same (only "
            f"{', '.join(MAY_CHANGE)} may change, where and how it is saved, and the layout: "
            "[parallel], [recompute], [launch], schedule.micro_batch_size and where model.pattern "
            "is cut into pipeline stages), or give another --out"
        )


def check_iteration(checkpoint: Path, iteration: int) -> None:
    """Raises ResumeError when what a checkpoint holds is of another `iteration` than its name."""
    if iteration != iteration_of(checkpoint):
        raise ResumeError(
            f"{checkpoint} is of iteration {iteration}, by what it holds: somebody renamed it; "
            f"{advice(checkpoint)}"
        )


def repair_tracker(folder: str) -> str | None:
    """Make the tracker in `folder` name a complete checkpoint. Returns what was changed, or None.

    A tracker that names a complete checkpoint stays, even if there are newer ones: somebody may
    have set it back. Raises ResumeError if there is a tracker, but no complete checkpoint.
    """
    tracker = Path(folder) / TRACKER
    _say(recover(Path(folder)))
    found = complete(Path(folder))
    _say(
        f"{path} is not complete: no run resumes from it"
        for path in incomplete(Path(folder), found[-1] if found else 0)
    )
    named = _tracked(tracker) if tracker.is_file() else None
    if named == "release" or named in found or (not found and not tracker.is_file()):
        return None
    said = f"named {named}" if isinstance(named, int) else "was empty or not a number"
    if not tracker.is_file():
        said = "was missing"
    if not found:
        raise ResumeError(
            f"{tracker} {said}, and no checkpoint in {folder} is complete: move the folder away "
            "to start from step 0"
        )
    write_atomically(tracker, str(found[-1]))
    return f"{tracker} {said}: resuming from the last complete checkpoint, step {found[-1]}"


def _tracked(tracker: Path) -> int | str | None:
    """The iteration that the tracker names, "release", or None for anything else."""
    try:
        text = tracker.read_text().strip()
    except OSError:
        return None
    if text == "release":
        return text
    return int(text) if re.fullmatch(r"\d+", text) else None


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"megacpp: {line}", file=sys.stderr, flush=True)
