"""D: Megatron's gated DeltaNet, in its `G` slot."""

from typing import TYPE_CHECKING

from megacpp_mcore.hybrid.letters.letter import (
    BF16,
    FP32,
    BlockLetter,
    Cost,
    Planning,
    Slot,
    Spec,
    norm_parameters,
)

if TYPE_CHECKING:
    from megacpp_mcore.hybrid.block_settings import RecomputeSettings
    from megacpp_mcore.hybrid.plan import Layer
    from megacpp_mcore.planner.activations import Sizes
    from megacpp_mcore.recipe import Recipe
    from megacpp_mcore.recipe.refusal import Rules

_MODULE = "megatron.core.ssm.gated_delta_net.GatedDeltaNet"
_CHUNK = 64  # flash-linear-attention's


def _cost(recipe: "Recipe", layer: "Layer", keys: float) -> Cost:
    a, hidden = recipe.attention, recipe.model.hidden_size
    dk, dv, heads = a.linear_key_head_dim, a.linear_value_head_dim, a.linear_num_value_heads
    keys_, values = a.linear_num_key_heads * dk, heads * dv
    channels = 2 * keys_ + values
    rows = channels + values + 2 * heads
    others = channels * a.linear_conv_kernel_dim + 2 * heads + norm_parameters(recipe, dv)
    mixing = 6 * heads * dk * dv + 2 * a.linear_conv_kernel_dim * channels
    return Cost(hidden * (rows + values), norm_parameters(recipe) + others, mixing)


def _kept(recipe: "Recipe", sizes: "Sizes", recompute: "RecomputeSettings | None") -> float:
    a = recipe.attention
    keys = a.linear_num_key_heads * a.linear_key_head_dim / sizes.tp
    values = a.linear_num_value_heads * a.linear_value_head_dim / sizes.tp
    heads = a.linear_num_value_heads / sizes.tp
    states = BF16 * values * a.linear_key_head_dim / _CHUNK
    return BF16 * (2 * (2 * keys + values) + 3 * values) + 4 * FP32 * heads + states


def _rules(r: "Rules") -> None:
    r.multiple("attention.linear_num_value_heads", "attention.linear_num_key_heads")
    ranks = r["parallel.tensor_model_parallel_size"] * r["parallel.context_parallel_size"]
    for key in ("attention.linear_num_key_heads", "attention.linear_num_value_heads"):
        r.multiple(key, f"tensor x context parallel size = {ranks}", ranks)


D = BlockLetter(
    letter="D",
    title="DeltaNet",
    slots=(
        Slot(
            symbol="G",
            module=_MODULE,
            layer="megacpp_mcore.layers.blocks.deltanet_layer",
            cost=_cost,
            native=_MODULE,
            planned=Planning(_kept),
        ),
    ),
    spec=Spec("megacpp_mcore.specs.nam56r", "nam56r_deltanet_stack_spec"),
    rules=_rules,
    packed_documents="",
    split_sequence="",
    packages=(("fla", "flash-linear-attention"),),
)
