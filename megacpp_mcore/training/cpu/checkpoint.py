"""Checkpoints of the CPU lane, written atomically through megatron.core.dist_checkpointing.

DIR/iter_0000100/ is one checkpoint, named as Megatron names it. It is written as DIR/.tmp-... and
renamed once it is synced to disk, so an incomplete one never has a checkpoint's name.
DIR/latest_checkpointed_iteration.txt names the newest complete one.
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from torch.distributed.checkpoint.api import CheckpointException

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.files import sync, write_atomically
from megacpp_mcore.stack import unpickling
from megacpp_mcore.training.cpu.megatron_setup import quiet
from megacpp_mcore.training.cpu.step import Trainer

TRACKER = "latest_checkpointed_iteration.txt"
PROGRESS = "progress.json"
# A damaged file or a full disk raises one of many types (OSError, pickle's, zip's, Megatron's own);
# torch's CheckpointException is a BaseException.
_ANY_FAILURE = (Exception, CheckpointException)


class CheckpointError(MegacppError):
    """A checkpoint that cannot be read, or that was made with another recipe or other data."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint that cannot be written: disk full, no permission."""

    exit_status = 1


@dataclass
class Progress:
    """The progress of a run. recipe: the resolved recipe, section -> key -> value.

    data_digest: digest of the order of training samples (`datasets.order_digest`).
    """

    iteration: int
    consumed_samples: int
    data_digest: str
    recipe: Mapping[str, Any]


def save(directory: Path, trainer: Trainer, progress: Progress) -> Path:
    """Write the checkpoint of `progress.iteration`; older ones stay. Returns its folder.

    Raises CheckpointWriteError when it cannot be written; what was there before is untouched.
    """
    final = directory / f"iter_{progress.iteration:07d}"
    partial = directory / f".tmp-{final.name}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(".tmp-*"):
            shutil.rmtree(leftover)
        _check_space(directory, trainer)
        partial.mkdir()
        with quiet():
            dist_checkpointing.save(_sharded_state(trainer), str(partial))
        (partial / PROGRESS).write_text(json.dumps(asdict(progress)))
        _sync(partial)
        if final.exists():  # saved at the same iteration before the run was resumed
            shutil.rmtree(final)
        partial.rename(final)
        write_atomically(directory / TRACKER, f"{progress.iteration}\n")
    except _ANY_FAILURE as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointWriteError(
            f"the checkpoint {final} could not be written: {_cause(error)}; the last good one is "
            f"{latest(directory) or 'none'}"
        ) from error
    return final


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint in `directory`, or None.

    Found by looking at the folders. The tracker file is for Megatron's tools only: a run may be
    killed between the rename and the update of the tracker.
    """
    if not directory.is_dir():
        return None
    complete = [
        path
        for path in directory.iterdir()
        if re.fullmatch(r"iter_\d{7}", path.name) and (path / "metadata.json").is_file()
    ]
    return max(complete, default=None)


def load(checkpoint: Path, trainer: Trainer, current: Progress) -> Progress:
    """Load `checkpoint` into the trainer. Returns the progress saved with it.

    current: of the run that is resumed. Raises CheckpointError when the checkpoint cannot be read,
    or was made with another recipe (the differing keys are named) or other data; the trainer must
    then not be used.
    """
    try:
        progress = Progress(**json.loads((checkpoint / PROGRESS).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint} cannot be read: {error}") from error
    if changed := _differences(progress.recipe, current.recipe):
        raise CheckpointError(
            f"{checkpoint} was trained with another recipe: {'; '.join(changed)}. Use the same "
            "recipe, or another --out"
        )
    if progress.data_digest != current.data_digest:
        raise CheckpointError(
            f"{checkpoint} was trained on other data than {current.recipe['data']['data_path']} "
            "holds now: the order of samples differs. Restore the data, or use another --out"
        )
    unpickling.install()
    try:
        unpickling.read_index(checkpoint)
        with quiet():
            state = dist_checkpointing.load(_sharded_state(trainer), str(checkpoint))
        _restore(trainer, state)
    except _ANY_FAILURE as error:
        raise CheckpointError(f"{checkpoint} cannot be loaded: {_cause(error)}") from error
    return progress


def _sharded_state(trainer: Trainer) -> dict[str, Any]:
    """Megatron's sharded state dict: what is saved, and the template for loading."""
    model = trainer.model.module.sharded_state_dict()
    optimizer = trainer.optimizer.state_dict()
    parameters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    optim_state_to_sharding_state(
        optimizer, get_param_id_to_sharded_param_map(model, parameters), exclude_keys=("step",)
    )
    # AdamW counts steps per parameter; all counts are equal, so one is saved, unsharded.
    optimizer["step"] = trainer.optimizer.state[parameters[0]]["step"].item()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": trainer.scheduler.state_dict(),
        "rng": torch.get_rng_state(),
    }


def _restore(trainer: Trainer, state: dict[str, Any]) -> None:
    trainer.model.module.load_state_dict(state["model"])
    step = state["optimizer"].pop("step")
    for parameter_state in state["optimizer"]["state"].values():
        parameter_state["step"] = torch.tensor(step)
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"])


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """`section.key was ... and is ...` for every key that differs."""
    changed = []
    for section in sorted(set(saved) | set(current)):
        before, now = saved.get(section), current.get(section)
        if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
            before, now = {"": before}, {"": now}
        changed += [
            f"{section}.{key}".rstrip(".") + f" was {before.get(key)!r} and is {now.get(key)!r}"
            for key in sorted(set(before) | set(now))
            if before.get(key) != now.get(key)
        ]
    return changed


def _cause(error: BaseException) -> str:
    """The first rank's failure, without the tracebacks in torch's message."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".strip().splitlines()[-1]


def _check_space(directory: Path, trainer: Trainer) -> None:
    """Raise OSError if parameters and AdamW's two moments, plus 10 %, do not fit on the disk."""
    needed = int(1.1 * sum(3 * p.numel() * p.element_size() for p in trainer.parameters))
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(f"{needed / 2**20:.0f} MiB are needed, {free / 2**20:.0f} MiB are free")


def _sync(folder: Path) -> None:
    """Flush every file of the checkpoint, then the folder, to the disk."""
    for path in [*folder.iterdir(), folder]:
        sync(path)
