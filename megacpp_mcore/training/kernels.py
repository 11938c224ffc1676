"""Compile the CUDA C++ that a recipe's model needs, before the model is built."""

from concurrent.futures import ThreadPoolExecutor

from megacpp_mcore import dispatch
from megacpp_mcore.kernels.nvcc import Library
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces.backend import load
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.support import Unbuildable


def compile_all(recipe: Recipe) -> None:
    """Compile what is not kept yet, all at once, for this process's GPU.

    The launcher does so before it starts ranks; ranks that torchrun has started wait for the one of
    them that compiles. Raises DispatchError where nvcc is missing and the recipe names no slower
    backend, KernelBuildError for what nvcc, its host compiler or the file system refuses.
    """
    libraries = needed(recipe)
    with ThreadPoolExecutor(max(1, len(libraries))) as pool:
        list(pool.map(Library.load, libraries))


def needed(recipe: Recipe) -> list[Library]:
    """The libraries of the backends that will serve; raises DispatchError as `compile_all`."""
    found = {}
    for name, surface in REGISTRY.items():
        first = surface.backends[0]  # one that is compiled is its surface's first choice
        workload = surface.workload(recipe, recipe.launch.device) if first.builds else None
        asked = dispatch.requested(name, recipe.backends)
        if workload is None or asked not in (dispatch.AUTO, first.name):
            continue
        why_not = first.supports(workload)
        if isinstance(why_not, Unbuildable):
            dispatch.choose(name, workload, recipe.backends)  # refuses
        elif why_not is None and (library := load(first.builds)).reason() is None:
            found[library] = None
    return list(found)
