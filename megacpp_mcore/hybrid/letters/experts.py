"""E: mixture of experts."""

import math
from typing import TYPE_CHECKING

from megacpp_mcore.hybrid.letters.letter import (
    BF16,
    FP32,
    BlockLetter,
    Cost,
    Experts,
    Planning,
    Slot,
    norm_parameters,
)
from megacpp_mcore.surfaces import moe_dispatch

if TYPE_CHECKING:
    from megacpp_mcore.hybrid.block_settings import RecomputeSettings
    from megacpp_mcore.hybrid.plan import Layer
    from megacpp_mcore.planner.activations import Sizes
    from megacpp_mcore.recipe import Recipe


def _cost(recipe: "Recipe", layer: "Layer", keys: float) -> Cost:
    moe, hidden = recipe.moe, recipe.model.hidden_size
    one = _expert_parameters(recipe)
    shared = _matrices(recipe) * hidden * (moe.moe_shared_expert_intermediate_size or 0)
    gate = hidden if shared and moe.moe_shared_expert_gate else 0
    experts = moe.num_experts or 0
    router = hidden * experts
    met = router + moe.moe_router_topk * one + shared + gate
    return Cost(met, norm_parameters(recipe), idle=(experts - moe.moe_router_topk) * one)


def _matrices(recipe: "Recipe") -> int:
    return 3 if recipe.model.swiglu else 2


def _expert_parameters(recipe: "Recipe") -> int:
    """Parameters of one routed expert."""
    return _matrices(recipe) * recipe.model.hidden_size * (recipe.moe.moe_ffn_hidden_size or 0)


def _routed_parameters(recipe: "Recipe") -> int:
    return (recipe.moe.num_experts or 0) * _expert_parameters(recipe)


def _routed_flops(recipe: "Recipe") -> float:
    return 6 * recipe.moe.moe_router_topk * _expert_parameters(recipe)


def _kept(recipe: "Recipe", sizes: "Sizes", recompute: "RecomputeSettings | None") -> float:
    """Rows are as many as if every expert got the same number of tokens."""
    moe, parts = recipe.moe, set(recompute.moe) if recompute else set()
    if "layer" in parts:
        return 0.0
    gates = 2 if recipe.model.swiglu else 1
    shared = (moe.moe_shared_expert_intermediate_size or 0) / sizes.tp
    found = routed_rows(recipe, sizes, recompute)
    found += 0 if "shared_experts" in parts else BF16 * (gates + 1) * shared
    return found + 4 * FP32 * (moe.num_experts or 0) / sizes.cut  # logits, scores, maps


def routed_rows(recipe: "Recipe", sizes: "Sizes", recompute: "RecomputeSettings | None") -> float:
    """Bytes a token of the rows that experts get, where a layer is not recomputed as a whole."""
    moe, parts = recipe.moe, set(recompute.moe) if recompute else set()
    rows = moe.moe_router_topk * sizes.etp / sizes.cut
    width = BF16 * (moe.moe_ffn_hidden_size or 0) / sizes.etp
    one = BF16 * recipe.model.hidden_size + FP32  # a permuted token and its weight
    gates = 2 if recipe.model.swiglu else 1
    if sizes.serving.gathers_tokens:
        return rows * (3 * FP32 + (0 if "experts" in parts else gates * width))
    if "experts" not in parts:
        one += gates * width
        one += 0 if "act" in parts else width
    return rows * one


def share_that_arrives(recipe: "Recipe", sizes: "Sizes") -> float:
    """Of the tokens of all ranks that exchange them, those that a rank's experts get: all of them
    by all-gather, otherwise those with one of its experts, every choice being as likely."""
    if sizes.serving[moe_dispatch.NAME] == moe_dispatch.ALLGATHER:
        return 1.0
    experts, topk = recipe.moe.num_experts or 0, recipe.moe.moe_router_topk
    return 1 - math.comb(experts - experts // sizes.ep, topk) / math.comb(experts, topk)


def _exchanged(
    recipe: "Recipe", sizes: "Sizes", recompute: "RecomputeSettings", skew: float
) -> float:
    """Experts that take tokens in their order keep those that arrive, and have as many rows as if
    each of these had chosen as many of them as it can: the host knows no number."""
    ranks, topk = sizes.ep * sizes.etp, recipe.moe.moe_router_topk
    if ranks == 1 or "layer" in recompute.moe:
        return 0.0
    rows = routed_rows(recipe, sizes, recompute)
    if not sizes.serving.gathers_tokens:
        return skew * rows if sizes.ep > 1 else 0.0
    share, local = share_that_arrives(recipe, sizes), (recipe.moe.num_experts or 0) // sizes.ep
    most = sizes.ep * share * min(topk, local) / topk
    return (most - 1) * rows + share * ranks * BF16 * recipe.model.hidden_size / sizes.cut


def _replicated(recipe: "Recipe") -> int:
    """The norm, the router and the gate of the shared experts."""
    moe = recipe.moe
    return recipe.model.hidden_size * (1 + (moe.num_experts or 0) + moe.moe_shared_expert_gate)


E = BlockLetter(
    letter="E",
    title="mixture of experts",
    slots=(
        Slot(
            symbol="E",
            module="megacpp_mcore.layers.moe.MegacppMoELayer",
            layer="megacpp_mcore.layers.blocks.moe_layer",
            cost=_cost,
            native="megatron.core.transformer.moe.moe_layer.MoELayer",
            planned=Planning(
                _kept,
                _replicated,
                experts=Experts(_routed_parameters, _routed_flops, _exchanged),
                recomputes=("moe.act", "moe.experts", "moe.shared_experts", "moe.layer"),
            ),
            exported="moe",
        ),
    ),
    packed_documents="",
    split_sequence="",
    recompute="moe",
)
