"""The gates of the bench at NAM56R's full size, on every backend that serves there: what is right
passes, and the chosen backend's values, made wrong, are refused."""

from dataclasses import replace

import pytest
import torch
from wrong_results import mutated

from megacpp_mcore.bench import load_for_bench
from megacpp_mcore.bench.clock import clock_for
from megacpp_mcore.bench.layer import LayerTarget, layer_overrides
from megacpp_mcore.bench.operator import OperatorTarget
from megacpp_mcore.kernels import parity
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.workload import current_device
from megacpp_mcore.training.cpu.megatron_setup import quiet, single_process

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
RECIPE = "nam56r"
PACKED, GQA = "data.dataloader_inter_document_masking=true", "attention.kind=gqa"
MIMO = ("mamba3.variant=mimo", "mamba3.mimo_rank=4")
# What the recipe itself has no operator for, and its other forms.
WORDS = {"rope_qk": (GQA,)}
MORE = [
    ("core_attention", (PACKED,)), ("core_attention", (GQA,)), ("mla_rope", (PACKED,)),
    ("mla_up", (PACKED,)), ("rope_qk", (GQA, PACKED)), ("mamba3_scan", MIMO),
]  # fmt: skip
OPERATORS = [
    *((name, WORDS.get(name, ())) for name, surface in REGISTRY.items() if surface.case), *MORE
]  # fmt: skip
# Each value adds up a rounding of every later token (mamba3.case.random_walk_bound): of 4096, half
# of what the gradient's values usually are may be rounding, and a twentieth cannot be told from it.
# Other floors are of some regions or columns alone, or smaller than that: the rest is judged.
WITHIN_ROUNDINGS = {("mamba3_scan", "dangles"), ("mamba3_scan", "ddt")}
# What a test may take; attention in float64 has a row's scores at a time.
GIB, ATTENTION_GIB = 24, 48
LAYERS = {
    "A": "core_attention=sdpa_flash,mla_rope=megatron",
    "E": "moe_experts=grouped_mm,router_gating=reference",
    "M": "mamba3_core=reference",
    "R": "m2rnn_core=reference",
}


def named(operator):
    return "-".join([operator[0], *(word.partition("=")[2] for word in operator[1])])


def built(target):
    """The target with every contender compared; none may be wrong. Says how near each came."""
    device = current_device()
    with quiet(), single_process(target.recipe.schedule.seed, device):
        target.build(clock_for(device), print)
    assert target.wrong == []
    return target


@pytest.mark.parametrize("operator", OPERATORS, ids=named)
def test_an_operators_backends_are_right_and_wrong_values_refused(operator, memory_to_itself):
    surface, words = operator
    memory_to_itself(ATTENTION_GIB if surface == "core_attention" else GIB)
    target = built(OperatorTarget(surface, load_for_bench(RECIPE, words)))
    for backend in target.entered:
        verdict = backend.reason or f"{backend.worst.share:.2f} of the bound, {backend.worst}"
        print(f"{backend.name}: {verdict}")
    case, dtype, truth = target.case, target.dtype, target.expected
    chosen = next(b for n in target.preferred for b in target.entered if b.name == n)
    values, others = (
        parity.run(case, chosen.bound[i], target.sets[i], truth.directions) for i in (0, 1)
    )
    missed, nearest = [], float("inf")
    for name, value in values.items():
        alone = replace(truth, values={name: truth.values[name]})
        for kind, wrong in mutated(value, others[name]):
            # Other inputs may have the same sum of losses.
            if kind.startswith("stale") and value.numel() == 1:
                continue
            if kind.startswith("scale") and (surface, name) in WITHIN_ROUNDINGS:
                continue
            (error,) = parity.errors(case, values | {name: wrong}, alone, dtype)
            nearest = min(nearest, error.share)
            if not error.share > 1:
                (own,) = parity.errors(case, values, alone, dtype)
                missed.append(f"{kind}: {error.share:.2f} of the bound, {error}; as it was, {own}")
    print(f"{chosen.name} made wrong: {nearest:.1f} of the bound or more")
    assert not missed, "\n".join(missed)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_is_its_references(layer, memory_to_itself):
    memory_to_itself(ATTENTION_GIB if layer == "A" else GIB)
    recipe = load_for_bench(RECIPE, layer_overrides(layer))
    target = built(LayerTarget(recipe, (LAYERS[layer],)))
    (own,) = target.compared
    print(f"{own.name}: {own.error / own.tolerance:.2f} of the bound of {target.baseline}")
