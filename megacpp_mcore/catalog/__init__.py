"""The kernel catalog: what each backend is for, and which one would serve here and now.

The rows are data (`megacpp_mcore.catalog.rows`); what can serve is asked of dispatch, with the
problems that a recipe's layers would ask about. No torch at import.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from megacpp_mcore import dispatch
from megacpp_mcore.catalog.rows import ROWS, Row
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces.backend import Backend, Problem
from megacpp_mcore.surfaces.registry import REGISTRY


class CatalogError(MegacppError):
    """A surface that neither dispatch nor the catalog knows."""


def surfaces() -> tuple[str, ...]:
    """Every surface with a backend or a row."""
    return tuple(dict.fromkeys([*REGISTRY, *(row.surface for row in ROWS)]))


def here_and_now(recipe: Recipe, device: str, surface: str | None = None) -> list[dict[str, Any]]:
    """What would serve each surface of `recipe` on `device`: one dict a backend, ready for JSON.

    Keys are the row's, and: serves (it is the one that would), usable (it could; None when the
    recipe's model does not have the surface), requested, reason (why it serves, or why not),
    recipe, problem (device, dtype, sizes; None as for usable). Raises CatalogError for an unknown
    surface, DispatchError for a MEGACPP_BACKENDS that cannot be read.
    """
    if surface is not None and surface not in surfaces():
        raise CatalogError(f"unknown surface {surface!r}; the surfaces are {', '.join(surfaces())}")
    answers = []
    for name in [surface] if surface else surfaces():
        requested, problem = dispatch.AUTO, None
        if name in REGISTRY:
            requested = dispatch.requested(name, recipe.backends)
            problem = REGISTRY[name].problem(recipe, device)
        shown = _shown(problem)
        for row, verdict in _verdicts(name, recipe, problem, requested):
            common = {"requested": requested, "recipe": recipe.name, "problem": shown}
            answers.append({**asdict(row), **verdict, **common})
    return answers


def _verdicts(
    surface: str, recipe: Recipe, problem: Problem | None, requested: str
) -> Iterator[tuple[Row, dict[str, Any]]]:
    known = {row.backend: row for row in ROWS if row.surface == surface}
    registered = dispatch.choices(surface)[1:] if surface in REGISTRY else ()
    if problem is None:
        for backend in registered:
            reason = f"recipe {recipe.name} has no layer with this surface"
            yield known.pop(backend), _verdict(False, None, reason)
    else:
        for backend, verdict in _asked(surface, recipe, problem, requested):
            yield known.pop(backend), verdict
    for row in known.values():
        yield row, _verdict(False, False, row.not_carried)


def _asked(
    surface: str, recipe: Recipe, problem: Problem, requested: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        decision = dispatch.choose(surface, problem, recipe.backends)
    except dispatch.DispatchError:
        decision = None
    verdicts = dispatch.verdicts(surface, problem)
    for backend in REGISTRY[surface].backends:
        why_not = verdicts[backend.name]
        serves = decision is not None and backend.name == decision.observed
        reason = decision.reason if serves else why_not or _unneeded(backend, decision, requested)
        yield backend.name, _verdict(serves, why_not is None, reason)


def _unneeded(backend: Backend, decision: dispatch.Decision | None, requested: str) -> str:
    if decision is None:
        return f"can serve, but {requested} is named, which cannot"
    if requested == dispatch.AUTO and backend.by_name:
        return "can serve where it is named"
    if requested == dispatch.AUTO:
        return f"can serve; {decision.observed} comes first"
    return f"can serve; {requested} is named"


def _verdict(serves: bool, usable: bool | None, reason: str | None) -> dict[str, Any]:
    return {"serves": serves, "usable": usable, "reason": reason}


def _shown(problem: Problem | None) -> dict[str, Any] | None:
    if problem is None:
        return None
    return {"device": problem.device, "dtype": problem.dtype, **dict(problem.sizes)}
