"""Compile the CUDA C++ that a recipe's model needs, before the model is built."""

from concurrent.futures import ThreadPoolExecutor

from megacpp_mcore import dispatch
from megacpp_mcore.kernels.nvcc import Library
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces.backend import Backend, Surface, load
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.support import Unbuildable
from megacpp_mcore.surfaces.workload import Workload


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
        compiled = any(backend.builds for backend in surface.backends)
        workload = surface.workload(recipe, recipe.launch.device) if compiled else None
        if workload is None:
            continue
        serving = _serving(name, surface, workload, recipe)
        if serving and serving.builds and (library := load(serving.builds)).reason() is None:
            found[library] = None
    return list(found)


def _serving(name: str, surface: Surface, workload: Workload, recipe: Recipe) -> Backend | None:
    """The backend that will serve; None where it is one after all that are compiled."""
    asked = dispatch.requested(name, recipe.backends)
    last = max(i for i, backend in enumerate(surface.backends) if backend.builds)
    for backend in surface.backends[: last + 1]:
        if asked not in (dispatch.AUTO, backend.name):
            continue
        why_not = backend.supports(workload)
        if isinstance(why_not, Unbuildable):
            dispatch.choose(name, workload, recipe.backends)  # refuses
        if why_not is None and asked == dispatch.AUTO:
            why_not = backend.passed_over(workload)
        if why_not is None:
            return backend
    return None
