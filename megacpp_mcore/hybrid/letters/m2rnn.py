"""R: recurrent M2RNN, in Megatron's `G` slot."""

from typing import TYPE_CHECKING

from megacpp_mcore.hybrid.letters.letter import (
    BF16,
    FP32,
    BlockLetter,
    Cost,
    Planning,
    Slot,
    norm_parameters,
)

if TYPE_CHECKING:
    from megacpp_mcore.hybrid.block_settings import RecomputeSettings
    from megacpp_mcore.hybrid.plan import Layer
    from megacpp_mcore.planner.activations import Sizes
    from megacpp_mcore.planner.rates import Rates
    from megacpp_mcore.recipe import Recipe
    from megacpp_mcore.recipe.refusal import Rules


def _cost(recipe: "Recipe", layer: "Layer", keys: float) -> Cost:
    r, hidden = recipe.m2rnn, recipe.model.hidden_size
    k, v = r.k_head_dim, r.v_head_dim
    heads = r.heads(hidden)
    values, channels = heads * v, 2 * k + heads * v
    rows = channels + values + heads
    # conv with bias; W; A_log, dt_bias; D, norm
    others = channels * (r.conv_kernel + 1) + heads * v * v + 2 * heads + 2 * values
    mixing = heads * k * v * (2 * v + 4) + 2 * r.conv_kernel * channels
    return Cost(hidden * (rows + values), norm_parameters(recipe) + others, mixing)


def _kept(recipe: "Recipe", sizes: "Sizes", recompute: "RecomputeSettings | None") -> float:
    r = recipe.m2rnn
    heads = r.heads(recipe.model.hidden_size) / sizes.tp
    values, keys = heads * r.v_head_dim, 2 * r.k_head_dim
    channels = values + keys / sizes.tp
    out = BF16 * values
    if recompute and recompute.m2rnn == "mixer":
        return 0.0
    if recompute and recompute.m2rnn == "core":
        return BF16 * (channels + values + heads) + out
    convolved = channels * (2 * FP32 + BF16) + BF16 * keys
    states = BF16 * heads * r.k_head_dim * r.v_head_dim / r.chunk_size
    return convolved + 5 * FP32 * heads + states + 6 * FP32 * values + out


def _recurrence(recipe: "Recipe", sizes: "Sizes", rates: "Rates") -> float:
    r = recipe.m2rnn
    heads = r.heads(recipe.model.hidden_size) / sizes.tp
    elements = heads * r.k_head_dim * r.v_head_dim * sizes.tokens
    chain = recipe.model.seq_length * rates["m2rnn_token"]
    return chain + elements * rates["m2rnn_element"]


def _rules(r: "Rules") -> None:
    hidden, tp = r["model.hidden_size"], "parallel.tensor_model_parallel_size"
    width = r["m2rnn.k_head_dim"] + r["m2rnn.v_head_dim"]
    heads = r.recipe.m2rnn.heads(hidden)
    r.refuse(
        heads == 0,
        "m2rnn.num_heads",
        f"is needed: model.hidden_size = {hidden} is less than k_head_dim + v_head_dim = {width}",
    )
    r.refuse(
        heads % r[tp],
        "m2rnn.num_heads",
        f"makes {heads} heads: must be a multiple of {r.text(tp)}",
    )
    r.multiple("m2rnn.k_head_dim", tp)
    r.ordered("m2rnn.dt_min", "m2rnn.dt_max")


R = BlockLetter(
    letter="R",
    title="recurrent M2RNN",
    slots=(
        Slot(
            symbol="G",
            module="megacpp_mcore.layers.m2rnn.M2RNNMixer",
            layer="megacpp_mcore.layers.blocks.m2rnn_layer",
            cost=_cost,
            planned=Planning(
                _kept,
                recurrence=_recurrence,
                surface="m2rnn_core",
                recomputes=("m2rnn.core", "m2rnn.mixer"),
            ),
            exported="m2rnn",
        ),
    ),
    not_native="Megatron has no M2RNN; target native cannot run it",
    rules=_rules,
    packed_documents="",
    split_sequence="M2RNN's state goes from each token to the next, over every cut of the sequence",
    recompute="m2rnn",
)
