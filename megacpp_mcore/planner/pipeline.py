"""What a model and a pipeline stage of it have: layers, their cost, micro batches at once."""

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from megacpp_mcore.hybrid import letters
from megacpp_mcore.hybrid.flops import count
from megacpp_mcore.hybrid.letters.letter import Planning
from megacpp_mcore.hybrid.plan import Layer
from megacpp_mcore.planner import PlanError
from megacpp_mcore.recipe import Recipe


@dataclass(frozen=True)
class Cost:
    """flops: a token's, forward and backward, of each time a layer runs; of all heads, or all
    projections of MTP, together. parameters: of one layer, on all ranks."""

    flops: float
    parameters: float


def costs(recipe: Recipe, keys: float | None = None) -> dict[str, Cost]:
    """Costs by the names of `hybrid.flops`, whose `keys` it is; means where a letter's layers
    differ.

    A layer that all depths of MTP share is counted there once, with the operations of all depths.
    """
    return _costs(_Model.of(recipe, keys))


@dataclass(frozen=True)
class _Model:
    """What costs depend on: they are counted once for all layouts and stages of a model."""

    sizes: tuple[Any, ...]
    recipe: Recipe = field(compare=False)

    @classmethod
    def of(cls, recipe: Recipe, keys: float | None) -> "_Model":
        layers = tuple(
            (layer.letter, layer.symbol, layer.mtp_depth) for layer in recipe.plan.layers
        )
        sections = (
            recipe.model,
            recipe.attention,
            recipe.moe,
            recipe.mamba3,
            recipe.m2rnn,
            recipe.mtp,
        )
        return cls((keys, layers, recipe.padded_vocab_size, *sections), recipe)


@functools.lru_cache(maxsize=64)
def _costs(model: _Model) -> dict[str, Cost]:
    recipe = model.recipe
    parts = count(recipe, keys=model.sizes[0]).parts
    runs = Counter(name_of(layer) for layer in recipe.plan.layers)
    flops: Counter[str] = Counter()
    parameters: Counter[str] = Counter()
    layers = Counter({part.name: 0 for part in parts})
    for part in parts:
        flops[part.name] += part.layers * (part.forward + part.backward)
        parameters[part.name] += part.layers * part.parameters
        layers[part.name] += part.layers
    return {
        name: Cost(flops[name] / (runs[name] or 1), parameters[name] / number)
        for name, number in layers.items()
    }


def name_of(layer: Layer) -> str:
    """The layer's name in `costs`."""
    return ("MTP " if layer.mtp_depth else "") + layer.letter


def planned_of(layer: Layer) -> Planning:
    """What the layer's entry in the table of block letters says for the planner.

    Raises PlanError where it says nothing.
    """
    entry = letters.find(layer.letter)
    planned = entry and entry.slot(layer.symbol).planned
    if planned is None:
        raise PlanError(
            f"what a layer {layer.letter} ({layer.symbol}) keeps for its backward pass is not "
            "known: give the Slot of its BlockLetter planned=Planning(kept=...), a function "
            "(recipe, sizes, recompute) -> bytes a token and rank; docs/extending.md has the steps"
        )
    return planned


def layers_of(recipe: Recipe, stage: int) -> list[Layer]:
    """The layers of a stage, in all its virtual stages; MTP's are on the last."""
    return [layer for layer in recipe.plan.layers if layer.stage == stage]


def kinds_of(recipe: Recipe, stage: int) -> list[tuple[Layer, int]]:
    """One layer of each kind that a stage has, with how many there are. MTP's are apart."""
    first: dict[tuple, Layer] = {}
    numbers: dict[tuple, int] = {}
    for layer in layers_of(recipe, stage):
        kind = layer.letter, layer.symbol, layer.mtp_depth is None
        first.setdefault(kind, layer)
        numbers[kind] = numbers.get(kind, 0) + 1
    return [(first[kind], number) for kind, number in numbers.items()]


def is_last(recipe: Recipe, stage: int) -> bool:
    return stage == recipe.parallel.pipeline_model_parallel_size - 1


def micro_batches(recipe: Recipe) -> int:
    """A step's, on each data-parallel rank."""
    s = recipe.schedule
    return s.global_batch_size // (s.micro_batch_size * recipe.data_parallel_size)


def held_at_once(recipe: Recipe, stage: int) -> float:
    """Micro batches whose activations a stage holds at most, in whole stages.

    Forward and backward passes alternate (1F1B, Megatron's schedules.py): a stage starts as many as
    there are stages from it to the last. Interleaved, it starts 2 a later stage and a pipeline's
    length for each virtual stage but the last, each of 1 / vpp of its layers.
    """
    pp, vpp, batches = recipe.plan.pp, recipe.plan.vpp, micro_batches(recipe)
    later_stages = pp - stage - 1
    if vpp == 1:
        return min(batches, later_stages + 1)
    return min(batches * vpp, 2 * later_stages + (vpp - 1) * pp + 1) / vpp
