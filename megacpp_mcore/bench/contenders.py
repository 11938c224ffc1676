"""A layer or a model built another way beside itself: with the backends that `--against` names in
it, and with other keys of its recipe."""

import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megacpp_mcore import bench, dispatch
from megacpp_mcore.recipe import ENVIRONMENT_VARIABLE, Recipe, load_recipe
from megacpp_mcore.recipe.lowering import lower

_SECTIONS = ("precision", "recompute")  # how a model is computed; any other would be another model


@dataclass(frozen=True)
class Contender:
    """backends: `surface=backend,...`, before those that the recipe has."""

    recipe: Recipe
    backends: str = ""


def contenders(recipe: Recipe, as_it_is: str, against: Sequence[str]) -> dict[str, Contender]:
    """The subject as `recipe` has it, under the name `as_it_is`, and those of `against` by their
    own words: `surface=backend,...`, where `precision.KEY=VALUE` and `recompute.KEY=VALUE` are keys
    of the recipe.

    Raises DispatchError for a surface or a backend that does not exist, BenchError for a key of
    another section, RecipeError for one that the recipe does not have or cannot have so.
    """
    return {as_it_is: Contender(recipe)} | {text: _contender(recipe, text) for text in against}


def _contender(recipe: Recipe, text: str) -> Contender:
    parts = text.split(",")
    keys = [part.strip() for part in parts if "." in part.partition("=")[0]]
    for key in keys:
        if (section := key.partition(".")[0]) not in _SECTIONS:
            raise bench.BenchError(
                f"--against {key}: section {section!r} of the recipe cannot differ here; "
                f"{' and '.join(_SECTIONS)} can, and backends as SURFACE=BACKEND"
            )
    backends = ",".join(part for part in parts if part.strip() not in keys)
    dispatch.forced_backends(backends)
    if not keys:
        return Contender(recipe, backends)
    return Contender(load_recipe(recipe.source, [*recipe.overrides, *keys]), backends)


@contextlib.contextmanager
def serving(requests: str) -> Iterator[None]:
    """The backends of `requests` (surface=backend,...), before those that the environment names."""
    before = os.environ.get(dispatch.ENVIRONMENT_VARIABLE)
    merged = {**dispatch.forced_backends(), **dispatch.forced_backends(requests)}
    os.environ[dispatch.ENVIRONMENT_VARIABLE] = ",".join(f"{s}={n}" for s, n in merged.items())
    try:
        yield
    finally:
        del os.environ[dispatch.ENVIRONMENT_VARIABLE]
        if before is not None:
            os.environ[dispatch.ENVIRONMENT_VARIABLE] = before


def build(contender: Contender) -> tuple[torch.nn.Module, Namespace]:
    """The contender's model, and Megatron's args of it."""
    from megacpp_mcore.training.cpu import megatron_setup as setup

    lowered = lower(contender.recipe)
    with serving(contender.backends):
        os.environ[ENVIRONMENT_VARIABLE] = lowered.environment[ENVIRONMENT_VARIABLE]
        # The spec chooses its parts as it is imported, which may have been for another model.
        sys.modules.pop("megacpp_mcore.specs.nam56r", None)
        args = setup.megatron_args(lowered.argv, lowered.environment)
        return setup.build_model(args), args


def take_weights(own: torch.nn.Module, others: Mapping[str, torch.Tensor]) -> bool:
    """Give `own` the values of `others`; False, and nothing done, where its parameters are not of
    the same names and shapes."""
    parameters = dict(own.named_parameters())
    if {n: p.shape for n, p in parameters.items()} != {n: p.shape for n, p in others.items()}:
        return False
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(others[name])
    return True
