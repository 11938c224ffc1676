"""Which backend the planner reckons with: the one that is named, or that an H200 would have."""

from typing import ClassVar

from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import moe_dispatch
from megacpp_mcore.surfaces.backend import REFERENCE
from megacpp_mcore.surfaces.moe_experts import FUSED, GROUPED_MM
from megacpp_mcore.surfaces.registry import REGISTRY


class _Last:
    """Backends of the recipe that was asked for last: a layout's are asked for once for each of
    its stages and layers."""

    recipe: Recipe | None = None
    served: ClassVar[dict[str, str]] = {}


def serving(recipe: Recipe, surface: str) -> str:
    """The backend of `surface` that the recipe names; for `auto` the one that the catalog has as
    chosen on the pinned stack, or where the recipe rules that out the next in order."""
    if _Last.recipe is not recipe:
        _Last.recipe, _Last.served = recipe, {}
    if surface not in _Last.served:
        _Last.served[surface] = _serving(recipe, surface)
    return _Last.served[surface]


def _serving(recipe: Recipe, surface: str) -> str:
    named = recipe.backends.get(surface, "auto")
    if named != "auto":
        return named
    found = REGISTRY[surface]
    workload = found.workload(recipe, "cuda")
    in_order = sorted(found.backends, key=lambda backend: backend.role != "chosen")
    return next(
        backend.name
        for backend in in_order
        if workload is None or not (backend.ruled_out and backend.ruled_out(recipe, workload))
    )


def gathers_tokens(recipe: Recipe) -> bool:
    """Whether the experts take tokens where they are: no permuted copy is kept, and a weight
    gradient is added to the main gradient by its product. As `layers.moe` decides it."""
    p, moe = recipe.parallel, recipe.moe
    local = p.expert_model_parallel_size == p.tensor_model_parallel_size == 1
    return (
        serving(recipe, "moe_experts") == FUSED
        and local
        and (p.expert_tensor_parallel_size or 1) == 1
        and serving(recipe, moe_dispatch.NAME) == moe_dispatch.UNMOVED
        and moe.moe_expert_capacity_factor is None
        and not moe.moe_shared_expert_overlap
    )


def layer_backend(recipe: Recipe, letter: str) -> str | None:
    """Which of the measured kinds of a layer the recipe's is; None: there is one kind.

    Those without a receipt of their own count as the layer that copies between its operators.
    """
    if letter == "E":
        return FUSED if gathers_tokens(recipe) else GROUPED_MM
    surface = {"M": "mamba3_core", "R": "m2rnn_core"}.get(letter)
    return surface and serving(recipe, surface)


def passes_rate(letter: str, backend: str | None) -> str:
    """Name of the rate: how often a layer moves the bytes that it keeps."""
    return "_".join(filter(None, ("passes", letter, backend)))


PASSES_OF_OTHERS = passes_rate("M", REFERENCE)  # of a letter without a receipt
