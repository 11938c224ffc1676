"""An exported folder as the checkpoint that a recipe's run goes on from."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megacpp_mcore.files import write_atomically
from megacpp_mcore.inference import export
from megacpp_mcore.inference.loading import built, without_extra_state
from megacpp_mcore.inference.names import Names
from megacpp_mcore.inference.recipe import on_one_device
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.training.checkpoints import folder


def import_model(
    source: Path, recipe: Recipe, out: Path, blocks: Mapping[int, Path] | None = None
) -> Path:
    """Make a checkpoint of iteration 0 that has an export's weights. Returns its folder.

    A recipe for the CPU: `out` becomes a run's folder, which `megacpp train --out` with --resume
    goes on in, with a fresh optimizer. A recipe for GPUs: `out` becomes a folder of checkpoints
    with weights alone, for checkpoint.load with checkpoint.finetune. blocks: layer -> weights of
    its package's module, in the place of the export's (`export.with_blocks`).

    Raises ExportError when the export's model is not the recipe's, or `out` is not empty.
    """
    config, tensors = export.read(source)
    if different := export.differences(config, recipe.to_dict()):
        raise export.ExportError(
            f"{source} is not recipe {recipe.name}'s model: {'; '.join(different)}"
        )
    tensors = export.with_blocks(config, tensors, blocks or {})
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise export.ExportError(f"{out} is there already and not an empty folder")
    try:
        if recipe.launch.device == "cpu":
            from megacpp_mcore.training.cpu.train import begin_with

            return begin_with(recipe, out, lambda model: _fill(model, tensors))
        return _weights_alone(recipe, out, config["dtype"], tensors)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)  # it was empty
        raise


def _fill(model: Any, tensors: Mapping[str, Tensor]) -> None:
    model.load_state_dict(Names(model).own(tensors), strict=False)


def _weights_alone(
    recipe: Recipe, out: Path, dtype: str, tensors: Mapping[str, Tensor]
) -> Path:  # fmt: skip
    """A checkpoint of Megatron's format, of any layout, without optimizer and random states."""
    from megatron.core import dist_checkpointing

    from megacpp_mcore.training.checkpoints import writer
    from megacpp_mcore.training.cpu.megatron_setup import quiet

    final = folder.path_of(out, 0)
    partial = folder.being_written(final)
    alone = on_one_device(recipe.name, recipe.to_dict(), device="cpu", mtp=True)
    with built(alone, dtype) as model:
        _fill(model, tensors)
        writer.install()
        writer.keep_no_process(asynchronous=False)
        partial.mkdir(parents=True)
        state = {"model": without_extra_state(model.sharded_state_dict())}
        with quiet():
            dist_checkpointing.save(
                state | {"iteration": 0, "checkpoint_version": 3.0}, str(partial)
            )
        folder.replace(partial, final)
    write_atomically(out / folder.TRACKER, "0")
    # Which recipe they are of, for people.
    write_atomically(out / "imported.json", json.dumps({"recipe": recipe.request}) + "\n")
    return final
