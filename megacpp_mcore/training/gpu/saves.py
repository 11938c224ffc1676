"""Hooks around Megatron's saves and loads: one checkpoint replaces another only when it is
complete, old ones are deleted, and what was loaded is of the iteration that its name says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.training import checkpointing, get_args, training
from megatron.training.async_utils import is_empty_async_queue

from megacpp_mcore.training.checkpoints import folder
from megacpp_mcore.training.gpu import resume


class Saves:
    """The saves of a run, on every rank. keep: how many complete checkpoints stay; None: all."""

    def __init__(self, keep: int | None) -> None:
        self._keep = keep
        self._unfinished = False

    def save(self, call: Callable, iteration: int) -> Any:
        """Let `call` save the checkpoint of `iteration`, or with async_save begin to."""
        if get_args().async_save:
            # At most one save is under way, so a kill loses the running interval at most.
            training.maybe_finalize_async_save(blocking=True)
        place = _place()
        if place and torch.distributed.get_rank() == 0:
            folder.set_aside(folder.path_of(place, iteration))
        torch.distributed.barrier()
        done = call()
        self._unfinished = True
        self.tidy()
        return done

    def tidy(self) -> None:
        """Delete what the last save has made superfluous, as soon as that is complete."""
        if not self._unfinished or not is_empty_async_queue():
            return
        self._unfinished = False
        place = _place()
        if place and torch.distributed.get_rank() == 0:
            folder.sweep(place)
            if self._keep is not None:
                folder.prune(place, self._keep)


def _place() -> Path | None:
    """The folder that the run saves into, if its checkpoints are folders there."""
    args = get_args()
    return Path(args.save) if args.save and args.ckpt_format == "torch_dist" else None


def check_what_was_loaded() -> None:
    """Raises ResumeError when a checkpoint in `iter_N` was not of iteration N."""
    args, named = get_args(), checkpointing.get_loaded_iteration()
    if args.load and named and named > 0 and not args.finetune:
        resume.check_iteration(folder.path_of(Path(args.load), named), args.iteration)
