"""Which checkpoint a run resumes from: the last complete one.

Megatron writes DIR/iter_N, and then the tracker DIR/latest_checkpointed_iteration.txt, not
atomically. A run killed in between leaves a folder that the tracker does not name, or an empty
tracker, with which Megatron exits with status 0. A checkpoint is complete when it has the two files
that are written last: `.metadata` (of the shards) and `metadata.json`.
"""

import re
from pathlib import Path

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.files import write_atomically

TRACKER = "latest_checkpointed_iteration.txt"


class ResumeError(MegacppError):
    """A folder of checkpoints without a complete one to resume from."""


def complete(folder: Path) -> list[int]:
    """Iterations of the complete checkpoints in `folder` (ckpt_format torch_dist), in order."""
    found = []
    for path in folder.glob("iter_*"):
        number = re.fullmatch(r"iter_(\d{7,})", path.name)
        if number and all((path / name).is_file() for name in (".metadata", "metadata.json")):
            found.append(int(number[1]))
    return sorted(found)


def newest(folder: str | None) -> Path | None:
    """The complete checkpoint that a run would resume from, or None."""
    if folder is None:
        return None
    named = _tracked(Path(folder) / TRACKER)
    found = complete(Path(folder))
    if not found:
        return None
    return Path(folder) / f"iter_{named if named in found else found[-1]:07d}"


def repair_tracker(folder: str) -> str | None:
    """Make the tracker in `folder` name a complete checkpoint. Returns what was changed, or None.

    A tracker that names a complete checkpoint stays, even if there are newer ones: somebody may
    have set it back. Raises ResumeError if there is a tracker, but no complete checkpoint.
    """
    tracker = Path(folder) / TRACKER
    found = complete(Path(folder))
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
