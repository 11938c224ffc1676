"""The kernel catalog: what each backend is for, and which one would serve here and now.

The facts stand in the surfaces' modules; what can serve is asked of dispatch, with the workloads
that a recipe's layers would ask about. No torch at import.
"""

from collections.abc import Iterator
from typing import Any

from megacpp_mcore import dispatch
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces.backend import Backend, Surface
from megacpp_mcore.surfaces.figures import FOLDER, Figure
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.workload import Workload

_FACTS = ("role", "removes", "layout", "dtypes", "fallback", "tests", "no_receipt",
          "exit_when", "skips", "before")  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """Every backend, as facts ready for JSON.

    Keys: surface, blocks, backend; what `Backend` says, `receipt` as a path in the repository;
    figures (texts, none where the receipts are not at hand).
    """
    return [_row(s, backend) for s in REGISTRY.values() for backend in s.backends]


def _row(surface: Surface, backend: Backend) -> dict[str, Any]:
    figures = [*backend.figures]
    if backend.receipt and (own := Figure(backend.receipt, backend.name)).is_known():
        figures.insert(0, own)
    facts = {fact: getattr(backend, fact) for fact in _FACTS}
    return {
        "surface": surface.name, "blocks": surface.blocks, "backend": backend.name, **facts,
        "receipt": backend.receipt and f"{FOLDER}/{backend.receipt}",
        "figures": [text for figure in figures if (text := figure.text())],
    }  # fmt: skip


def here_and_now(recipe: Recipe, device: str, surface: str | None = None) -> list[dict[str, Any]]:
    """What would serve each surface of `recipe` on `device`: one dict a backend, ready for JSON.

    Keys are those of `rows`, and: serves (it is the one that would), usable (it could; None when
    the recipe's model does not have the surface), requested, reason (why it serves, or why not),
    recipe, problem (the workload's device, dtype, sizes; None as for usable). Raises
    DispatchError for an unknown surface, and for a MEGACPP_BACKENDS that cannot be read.
    """
    answers = []
    for name in [surface] if surface else REGISTRY:
        requested = dispatch.requested(name, recipe.backends)
        workload = REGISTRY[name].workload(recipe, device)
        verdicts = dict(_verdicts(name, recipe, workload, requested))
        common = {"requested": requested, "recipe": recipe.name, "problem": _shown(workload)}
        for backend in REGISTRY[name].backends:
            answers.append({**_row(REGISTRY[name], backend), **verdicts[backend.name], **common})
    return answers


def _verdicts(
    surface: str, recipe: Recipe, workload: Workload | None, requested: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    if workload is None:
        for backend in REGISTRY[surface].backends:
            reason = f"recipe {recipe.name} has no layer with this surface"
            yield backend.name, _verdict(False, None, reason)
        return
    try:
        decision = dispatch.choose(surface, workload, recipe.backends)
    except dispatch.DispatchError:
        decision = None
    verdicts = dispatch.verdicts(surface, workload)
    for backend in REGISTRY[surface].backends:
        why_not = verdicts[backend.name]
        serves = decision is not None and backend.name == decision.observed
        passed = backend.passed_over(workload) is not None
        reason = decision.reason if serves else why_not or _unneeded(passed, decision, requested)
        yield backend.name, _verdict(serves, why_not is None, reason)


def _unneeded(passed: bool, decision: dispatch.Decision | None, requested: str) -> str:
    if decision is None:
        return f"can serve, but {requested} is named, which cannot"
    if requested == dispatch.AUTO and passed:
        return "can serve where it is named"
    if requested == dispatch.AUTO:
        return f"can serve; {decision.observed} comes first"
    return f"can serve; {requested} is named"


def _verdict(serves: bool, usable: bool | None, reason: str | None) -> dict[str, Any]:
    return {"serves": serves, "usable": usable, "reason": reason}


def _shown(workload: Workload | None) -> dict[str, Any] | None:
    if workload is None:
        return None
    return {"device": workload.device, "dtype": workload.dtype, **dict(workload.sizes)}
