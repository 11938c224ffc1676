"""`megacpp train --gpus N`: torchrun on this machine with `megacpp_mcore.pretrain`."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megacpp_mcore.lowering import lower
from megacpp_mcore.recipe import Recipe, load_recipe
from megacpp_mcore.training.gpu_launch import OUT, YARDSTICK, LaunchError, recipe_words

_TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's, in a folder that holds a checkpoint


def run(
    name_or_path: str, overrides: Sequence[str], gpus: int, out: str | None,
    yardstick: bool = False,
) -> int:  # fmt: skip
    """Train a recipe on `gpus` GPUs of this machine. Returns torchrun's exit status.

    yardstick: Megatron's own blocks in place of ours, with the same sizes, data, words and loop.
    Megatron has none like M and R; its Mamba-2 stands in both places.

    Raises LaunchError when the machine has fewer GPUs, the recipe is for several machines, or the
    folder it loads from holds a checkpoint already; RecipeError as `load_recipe`.
    """
    if gpus < 1:
        raise LaunchError(f"--gpus {gpus}: at least 1 is needed")
    overrides = [*overrides, f"launch.nproc_per_node={gpus}"]
    recipe = load_recipe(name_or_path, overrides)
    if yardstick:
        recipe = load_recipe(name_or_path, [*overrides, *_without_r(recipe)])
        out = out or f"runs/{recipe.name}-yardstick"
    _check(recipe, gpus)
    words = recipe_words(recipe) + ([OUT, out] if out else []) + ([YARDSTICK] if yardstick else [])
    words += lower(recipe).argv
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(gpus), "-m", "megacpp_mcore.pretrain", *words,
    ]  # fmt: skip
    # Ctrl-C reaches torchrun too, which ends its ranks and then itself.
    saved = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return subprocess.Popen(command, preexec_fn=_heed_interrupts).wait()
    finally:
        signal.signal(signal.SIGINT, saved)


def _heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _without_r(recipe: Recipe) -> list[str]:
    patterns = {"model.pattern": recipe.model.pattern, "mtp.pattern": recipe.mtp.pattern}
    return [f"{key}={pattern.upper().replace('R', 'M')}" for key, pattern in patterns.items()]


def _check(recipe: Recipe, gpus: int) -> None:
    if recipe.launch.device != "cuda":
        raise LaunchError(
            f'recipe {recipe.name} has launch.device = "{recipe.launch.device}": train it without '
            "--gpus"
        )
    if recipe.launch.nnodes != 1:
        raise LaunchError(
            f"recipe {recipe.name} is for launch.nnodes = {recipe.launch.nnodes} machines: start "
            "torchrun on each with the words of `megacpp recipe args`"
        )
    import torch

    found = torch.cuda.device_count()
    if found < gpus:
        raise LaunchError(f"--gpus {gpus}: torch sees {found} CUDA devices on this machine")
    load = recipe.checkpoint.load
    if load and (Path(load) / _TRACKER).is_file():
        raise LaunchError(
            f"{load} holds a checkpoint, which Megatron would go on from: set checkpoint.load and "
            "checkpoint.save to another folder"
        )
