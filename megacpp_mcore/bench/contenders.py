"""Backends inside a layer or a model, built one beside the other: what `--against` names of it."""

import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence

import torch

from megacpp_mcore import dispatch
from megacpp_mcore.lowering import lower
from megacpp_mcore.recipe import ENVIRONMENT_VARIABLE, Recipe


def contenders(as_it_is: str, against: Sequence[str]) -> dict[str, str]:
    """Name -> `surface=backend,...`: the subject as its recipe has it, under the name `as_it_is`,
    and those of `against`.

    Raises DispatchError for a surface or a backend that does not exist.
    """
    for text in against:
        dispatch.forced_backends(text)
    return {as_it_is: ""} | {text: text for text in against}


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


def build(recipe: Recipe, requests: str) -> tuple[torch.nn.Module, Namespace]:
    """The model of `recipe` with the backends of `requests`, and Megatron's args of it."""
    from megacpp_mcore.training import megatron_setup as setup

    lowered = lower(recipe)
    with serving(requests):
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
