"""`megacpp train --gpus N`: the ranks of one machine, each with `megacpp_mcore.pretrain`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megacpp_mcore import receipts
from megacpp_mcore.hybrid import letters
from megacpp_mcore.recipe import Recipe, load_recipe, patch_needs
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.training.gpu.launch import OUT, YARDSTICK, LaunchError, recipe_words
from megacpp_mcore.training.gpu.packages import check_packages
from megacpp_mcore.training.gpu.ranks import run_ranks
from megacpp_mcore.training.gpu.resume import TRACKER, newest

_REFUSED = 2  # the status of a rank that has said why it does not begin


def run(
    name_or_path: str, overrides: Sequence[str], gpus: int, out: str | None, *,
    yardstick: bool = False, resume: bool = False,
) -> int:  # fmt: skip
    """Train a recipe on `gpus` GPUs of this machine. Returns the first failed rank's exit status.

    yardstick: Megatron's own blocks in place of ours, with the same sizes, data, words and loop.
    Megatron has none like M and R; its Mamba-2 stands in both places. resume: go on from the last
    complete checkpoint in checkpoint.load, or begin.

    Raises LaunchError when the machine has fewer GPUs, the recipe is for several machines, or the
    folder it loads from holds a checkpoint and resume is not asked for; RecipeError as
    `load_recipe`; MissingPackageError and MissingPatchError before any rank is started. What takes
    an import of the packages to know, the ranks check themselves before they build anything.
    """
    if gpus < 1:
        raise LaunchError(f"--gpus {gpus}: at least 1 is needed")
    overrides = [*overrides, f"launch.nproc_per_node={gpus}"]
    recipe = load_recipe(name_or_path, overrides)
    if yardstick:
        recipe = load_recipe(name_or_path, [*overrides, *_on_megatrons_letters(recipe)])
    folder = Path(out or f"runs/{recipe.name}{'-yardstick' * yardstick}")
    _check(recipe, gpus, resume)
    check_packages(recipe, yardstick=yardstick)
    patch_needs.check(recipe)
    words = [*recipe_words(recipe), OUT, str(folder), *([YARDSTICK] if yardstick else [])]
    ended = run_ranks("megacpp_mcore.pretrain", words + lower(recipe).argv, gpus)
    if ended.reason is not None and ended.status != _REFUSED:
        print(f"megacpp: {ended.reason}. {_what_now(recipe)}", file=sys.stderr)
        _mark(folder / "receipt.json", ended.reason)
    return ended.status


def _on_megatrons_letters(recipe: Recipe) -> list[str]:
    """The overrides that put M in the place of every letter of which Megatron has no block."""
    table = str.maketrans(dict.fromkeys(letters.without_megatrons_block(), "M"))
    patterns = {"model.pattern": recipe.model.pattern, "mtp.pattern": recipe.mtp.pattern}
    return [f"{key}={pattern.upper().translate(table)}" for key, pattern in patterns.items()]


def _mark(path: Path, reason: str) -> None:
    """The receipt of a rank that could not write its own end, which SIGKILL leaves no time for."""
    if not path.exists():
        return
    receipt = receipts.read(path)
    if receipt["result"]["status"] == "running":
        receipt["result"] |= {"status": "failed", "reason": reason}
        receipts.write(path, receipt)


def _what_now(recipe: Recipe) -> str:
    if checkpoint := newest(recipe.checkpoint.load):
        return f"The last complete checkpoint is {checkpoint}: go on from it with --resume"
    return "There is no complete checkpoint to go on from"


def _check(recipe: Recipe, gpus: int, resume: bool) -> None:
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
    if resume and not load:
        raise LaunchError("--resume: the recipe names no checkpoint.load to go on from")
    # A run that was killed as it saved its first has it complete, and no tracker yet.
    held = load and ((Path(load) / TRACKER).is_file() or newest(load))
    if held and not resume:
        raise LaunchError(
            f"{load} holds a checkpoint, which Megatron would go on from: say --resume to go on, "
            "or set checkpoint.load and checkpoint.save to another folder"
        )
