"""`megacpp bench`: how fast an operator's backends, one layer or a whole model are here.

`runner.run` is the bench; `operator`, `layer` and `model` say how to build and call what is timed.
It runs in one process on one device, the model unsharded, and returns a bench receipt
(`megacpp_mcore.receipts`), which `megacpp report` shows and compares.
"""

from collections.abc import Sequence

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.recipe import Recipe, load_recipe
from megacpp_mcore.recipe.source import split_override
from megacpp_mcore.training.one_rank import one_rank


class BenchError(MegacppError):
    """A bench that cannot be made as asked."""


class BenchFailure(BenchError):
    """A bench in which a backend failed or was wrong, or that timed nothing."""

    exit_status = 1


def load_for_bench(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe for one process: one micro batch a step, no parallelism, no multi-host dispatcher.

    Calls are eager and there is no main gradient: a captured step and gradients that are
    accumulated inside the products are parts of Megatron's loop.

    Raises RecipeError as `load_recipe` does, and BenchError for an override that asks for what a
    bench has not.
    """
    asked = load_recipe(name, overrides)
    ours = one_rank(asked)
    if asked.launch.device == "cuda":
        ours.append("precision.gradient_accumulation_fusion=false")
    recipe = load_recipe(name, [*ours, *overrides])
    _check_kept(recipe, load_recipe(name, [*overrides, *ours]), overrides, ours)
    return recipe


def _check_kept(
    recipe: Recipe, one_process: Recipe, overrides: Sequence[str], ours: Sequence[str]
) -> None:
    """Refuse an override that would be in the receipt, but not in what is timed."""
    fixed = dict(map(split_override, ours))
    for key, text in dict(map(split_override, overrides)).items():
        section, _, name = key.partition(".")
        if key not in fixed or section not in ("parallel", "launch", "precision"):
            continue  # sizes and backends may be asked for
        asked, kept = (getattr(getattr(r, section), name) for r in (recipe, one_process))
        if asked != kept:
            raise BenchError(
                f"{key}={text}: a bench runs in one process, eagerly and without main gradients, "
                f"with {key}={fixed[key]}; leave it out"
            )
