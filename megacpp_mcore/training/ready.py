"""Whether a recipe that Megatron accepts would train: what the run itself refuses later, asked
before anything is started. Imports neither torch nor Megatron."""

import os
from collections.abc import Callable

from megacpp_mcore import dispatch
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.recipe import Recipe, patch_needs
from megacpp_mcore.surfaces.workload import current_device
from megacpp_mcore.training.cpu import support
from megacpp_mcore.training.data.blend import check_data, prefixes
from megacpp_mcore.training.data.files import DataError, paths
from megacpp_mcore.training.packages import check_backends, check_packages

_Check = Callable[[Recipe], None]


def verdict(recipe: Recipe) -> tuple[list[str], list[str]]:
    """(refusals, notes): why the recipe would not train, and what it needs that is not here.

    A recipe for GPUs is for another machine where there is none: its packages and patches are then
    notes. So are datasets that are not built yet; one that is there must fit.
    """
    here = recipe.launch.device == "cpu" or current_device() == "cuda"
    of_the_machine: list[_Check] = [check_packages, patch_needs.check]
    if here:
        of_the_machine.append(check_backends)
    refusals: list[str] = []
    notes: list[str] = []
    lane = support.check if recipe.launch.device == "cpu" else dispatch.check_read
    _ask(lane, recipe, refusals)
    for check in of_the_machine:
        _ask(check, recipe, refusals if here else notes)

    def check_datasets(recipe: Recipe) -> None:
        missing = [prefix for prefix in prefixes(recipe) if not os.path.exists(paths(prefix)[1])]
        if missing:
            there = ", ".join(missing)
            notes.append(f"no dataset yet at {there}: megacpp data build SRC --out PREFIX")
        else:
            check_data(recipe)

    _ask(check_datasets, recipe, refusals)
    return refusals, notes


def _ask(check: _Check, recipe: Recipe, said: list[str]) -> None:
    try:
        check(recipe)
    except (MegacppError, DataError) as error:
        said.append(str(error))
