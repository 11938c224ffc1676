"""E: mixture of experts."""

from typing import TYPE_CHECKING

from megacpp_mcore.hybrid.letters.letter import BlockLetter, Cost, Slot, norm_parameters

if TYPE_CHECKING:
    from megacpp_mcore.hybrid.plan import Layer
    from megacpp_mcore.recipe import Recipe


def _cost(recipe: "Recipe", layer: "Layer", keys: float) -> Cost:
    moe, hidden = recipe.moe, recipe.model.hidden_size
    matrices = 3 if recipe.model.swiglu else 2
    one = matrices * hidden * (moe.moe_ffn_hidden_size or 0)
    shared = matrices * hidden * (moe.moe_shared_expert_intermediate_size or 0)
    gate = hidden if shared and moe.moe_shared_expert_gate else 0
    experts = moe.num_experts or 0
    router = hidden * experts
    met = router + moe.moe_router_topk * one + shared + gate
    return Cost(met, norm_parameters(recipe), idle=(experts - moe.moe_router_topk) * one)


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
        ),
    ),
    packed_documents="",
    split_sequence="",
    recompute="moe",
)
