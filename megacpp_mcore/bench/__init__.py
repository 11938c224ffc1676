"""`megacpp bench`: how fast an operator's backends, one layer or a whole model are here.

`runner.run` is the bench; `operator`, `layer` and `model` say how to build and call what is timed.
It runs in one process on one device, the model unsharded, and returns a bench receipt
(`megacpp_mcore.receipts`), which `megacpp report` shows and compares.
"""

from collections.abc import Sequence

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.recipe import Recipe, load_recipe
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

    Raises RecipeError as `load_recipe` does.
    """
    asked = load_recipe(name, overrides)
    ours = one_rank(asked)
    if asked.launch.device == "cuda":
        ours.append("precision.gradient_accumulation_fusion=false")
    return load_recipe(name, [*ours, *overrides])
