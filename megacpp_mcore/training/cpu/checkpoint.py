"""Checkpoints of the CPU lane, written atomically through megatron.core.dist_checkpointing.

DIR/iter_0000100/ is one checkpoint, named as Megatron names it. It is written as DIR/.tmp-... and
renamed once it is synced to disk, so an incomplete one never has a checkpoint's name: see
`megacpp_mcore.training.checkpoints.folder`. DIR/latest_checkpointed_iteration.txt names the newest
complete one.
"""

import json
import shutil
from collections.abc import Callable, Mapping
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
from megacpp_mcore.files import read_regular, sync, write_atomically
from megacpp_mcore.recipe.changes import MAY_CHANGE, refused_changes
from megacpp_mcore.stack import unpickling
from megacpp_mcore.training.checkpoints import checksums, folder, writer
from megacpp_mcore.training.cpu.megatron_setup import quiet
from megacpp_mcore.training.cpu.step import Trainer

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


def save(directory: Path, trainer: Trainer, progress: Progress, keep: int | None = None) -> Path:
    """Write the checkpoint of `progress.iteration`. Returns its folder.

    keep: how many of the newest checkpoints stay; None: all. One of the same iteration is replaced
    atomically. Raises CheckpointWriteError when it cannot be written; what was there before is
    then untouched.
    """
    final = folder.path_of(directory, progress.iteration)
    partial = folder.being_written(final)
    writer.install()
    writer.keep_no_process(asynchronous=False)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        folder.sweep(directory)
        _check_space(directory, trainer)
        partial.mkdir()
        with quiet():
            dist_checkpointing.save(_sharded_state(trainer), str(partial))
        (partial / PROGRESS).write_text(json.dumps(asdict(progress)))
        checksums.add(partial, PROGRESS)
        _sync(partial)
        folder.replace(partial, final)
        write_atomically(directory / folder.TRACKER, f"{progress.iteration}\n")
        if keep is not None:
            folder.prune(directory, keep)
    except _ANY_FAILURE as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointWriteError(
            f"the checkpoint {final} could not be written: {unpickling.why(error)}; the last good "
            f"one is {latest(directory) or 'none'}"
        ) from error
    return final


def recover(directory: Path) -> list[str]:
    """As `folder.recover`, for checkpoints of this lane."""
    return folder.recover(directory, needs=(PROGRESS,))


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint in `directory`, or None.

    Found by looking at the folders. The tracker file is for Megatron's tools only: a run may be
    killed between the rename and the update of the tracker.
    """
    found = folder.complete(directory)
    return folder.path_of(directory, found[-1]) if found else None


def load(
    checkpoint: Path, trainer: Trainer, current: Progress,
    digest_of: Callable[[Mapping[str, Any]], str], *, verify: bool = True,
) -> Progress:  # fmt: skip
    """Load `checkpoint` into the trainer. Returns the progress saved with it.

    current: of the run that is resumed. digest_of: a recipe of the same data, but perhaps of
    another length -> the digest of its order of samples now. verify: compare its files with their
    checksums first.

    Raises CheckpointError when the checkpoint cannot be read, or was made with another recipe (the
    differing keys are named; those of `recipe.changes.MAY_CHANGE` may differ) or other data; the
    trainer must then not be used.
    """
    if verify:
        try:
            checksums.verify(checkpoint)
        except checksums.DamagedError as error:
            raise CheckpointError(f"{error}; {folder.advice(checkpoint)}") from error
    progress = _read_progress(checkpoint)
    if progress.iteration != folder.iteration_of(checkpoint):
        raise CheckpointError(
            f"{checkpoint} is of iteration {progress.iteration}, by its {PROGRESS}: somebody "
            f"renamed it; {folder.advice(checkpoint)}"
        )
    if refused := refused_changes(progress.recipe, current.recipe, layout=False):
        raise CheckpointError(
            f"{checkpoint} was trained with another recipe: {refused}. Use the same recipe (only "
            f"{', '.join(MAY_CHANGE)} may change), or another --out"
        )
    if progress.data_digest != digest_of(progress.recipe):
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
        raise CheckpointError(
            f"{checkpoint} cannot be loaded: {unpickling.why(error)}; {folder.advice(checkpoint)}"
        ) from error
    return progress


def _read_progress(checkpoint: Path) -> Progress:
    """The progress saved with a checkpoint. Raises CheckpointError for what `save` never writes."""
    path = checkpoint / PROGRESS
    try:
        progress = Progress(**json.loads(read_regular(path)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    for name, kind in (("iteration", int), ("consumed_samples", int), ("data_digest", str)):
        if type(value := getattr(progress, name)) is not kind:
            raise CheckpointError(f"{path} cannot be read: {name} is {value!r}")
    schedule = progress.recipe.get("schedule") if isinstance(progress.recipe, dict) else None
    if not isinstance(schedule, dict):
        raise CheckpointError(f"{path} cannot be read: recipe is {progress.recipe!r}")
    done, samples = progress.iteration, progress.consumed_samples
    length, size = schedule.get("train_iters"), schedule.get("global_batch_size")
    if not (type(length) is type(size) is int and done <= length > 0 and samples == done * size):
        raise CheckpointError(
            f"{path} cannot be read: no run is at iteration {done} with consumed_samples "
            f"{samples}, train_iters {length!r} and global_batch_size {size!r}"
        )
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
    # the schedule is the recipe's, which may be longer now; its position is the checkpoint's
    trainer.scheduler.step(increment=state["scheduler"]["num_steps"])
    torch.set_rng_state(state["rng"])


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
