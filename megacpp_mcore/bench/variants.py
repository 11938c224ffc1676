"""One layer or model built in several ways: with other backends in it, and with other keys of its
recipe's `precision` and `recompute`."""

import contextlib
import math
import os
from abc import abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from megacpp_mcore import dispatch
from megacpp_mcore.bench import BenchError, load_for_bench
from megacpp_mcore.bench.clock import Clock
from megacpp_mcore.bench.runner import Contender, Target
from megacpp_mcore.kernels.regions import Distance
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.recipe.lowering import lower

_SECTIONS = ("precision", "recompute")  # how a model is computed; any other would be another model


@dataclass(frozen=True)
class Variant:
    """backends: `surface=backend,...`, before those that the recipe has."""

    recipe: Recipe
    backends: str = ""


def variant_of(recipe: Recipe, text: str) -> Variant:
    """The recipe as `text` says: `surface=backend,...`, where `precision.KEY=VALUE` and
    `recompute.KEY=VALUE` are keys of the recipe.

    Raises DispatchError for a surface or a backend that does not exist, BenchError for a key of
    another section or for what no bench has, RecipeError for one that the recipe does not have or
    cannot have so.
    """
    parts = text.split(",")
    keys = [part.strip() for part in parts if "." in part.partition("=")[0]]
    for key in keys:
        if (section := key.partition(".")[0]) not in _SECTIONS:
            raise BenchError(
                f"--against {key}: section {section!r} of the recipe cannot differ here; "
                f"{' and '.join(_SECTIONS)} can, and backends as SURFACE=BACKEND"
            )
    backends = ",".join(part for part in parts if part.strip() not in keys)
    dispatch.forced_backends(backends, "--against")
    if not keys:
        return Variant(recipe, backends)
    return Variant(load_for_bench(recipe.source, [*recipe.overrides, *keys]), backends)


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


def build(variant: Variant) -> tuple[torch.nn.Module, Namespace]:
    """The variant's model, and Megatron's args of it."""
    from megacpp_mcore.training.cpu import megatron_setup as setup

    with serving(variant.backends):
        args = setup.megatron_args(lower(variant.recipe).argv)
        return setup.build_model(args, variant.recipe), args


class Built(Contender):
    """A variant that is built. trained: the module whose weights all of them share."""

    trained: torch.nn.Module

    def take(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Take the values of `weights`; False, and nothing done, where its own parameters are not
        of the same names and shapes."""
        return take_weights(self.trained, weights)

    def weights(self) -> dict[str, torch.Tensor]:
        """Its parameters, as `take` has them."""
        return dict(self.trained.named_parameters())


class VariantTarget(Target):
    """A recipe unchanged, under `own_name`, and as each of `against` says: what `variant_of` takes,
    of which the first is the baseline. Raises as `variant_of`."""

    def __init__(
        self, surface: str, own_name: str, recipe: Recipe, against: Sequence[str], seconds: float
    ) -> None:
        super().__init__(recipe, surface, seconds, baseline=next(iter(against), own_name))
        self.variants = {own_name: Variant(recipe)} | {text: self.variant(text) for text in against}

    def variant(self, text: str) -> Variant:
        """What one of `against` says."""
        return variant_of(self.recipe, text)

    @abstractmethod
    def make(self, name: str, variant: Variant) -> Built:
        """Build one."""

    def build(self, clock: Clock, say: Callable[[str], None]) -> None:
        """Build each variant, and give it the baseline's weights.

        Raises DispatchError for a backend that is unknown or cannot serve, and what building the
        model raises.
        """
        self.clock, self.say, self.built, decisions = clock, say, {}, {}
        for name, variant in self.variants.items():
            say(f"{name}: building {variant.recipe.plan.megatron_pattern} on {clock.device}")
            dispatch.forget()
            self.built[name] = self.make(name, variant)
            decisions |= dict.fromkeys(dispatch.decisions())
        self.backends = [asdict(decision) for decision in decisions]
        self.first = self.built[self.baseline]
        weights = self.first.weights()
        others = [made for made in self.built.values() if made is not self.first]
        # one of other parameters than the baseline's is not compared with it
        self.compared = [made for made in others if made.take(weights)]

    def judge(self, contender: Contender, what: str, far: Distance) -> None:
        """Keep how far `contender` is from the baseline, and say so where it is too far."""
        if math.isfinite(far.error):  # a receipt has no infinity: then `wrong` says it
            contender.error, contender.tolerance = far.error, far.bound
        if not far.share <= 1:
            self.wrong.append(
                f"{contender.name}: {what} {far.where} is {far.error:.2e} from {self.baseline}, "
                f"allowed {far.bound:.2e}"
            )

    def ready(self, phase: str) -> Sequence[Contender]:
        return list(self.built.values())


def take_weights(own: torch.nn.Module, others: Mapping[str, torch.Tensor]) -> bool:
    """`copy_weights` into the parameters of a module."""
    return copy_weights(dict(own.named_parameters()), others)


def copy_weights(own: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    """Give `own` the values of `others`; False, and nothing done, where they are not of the same
    names and shapes."""
    if {n: p.shape for n, p in own.items()} != {n: p.shape for n, p in others.items()}:
        return False
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(others[name])
    return True
