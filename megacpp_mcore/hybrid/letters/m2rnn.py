"""R: recurrent M2RNN, in Megatron's `G` slot."""

from typing import TYPE_CHECKING

from megacpp_mcore.hybrid.letters.letter import BlockLetter, Cost, Slot, norm_parameters

if TYPE_CHECKING:
    from megacpp_mcore.hybrid.plan import Layer
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
        f"makes {heads} heads: must be a multiple of {r.told(tp)}",
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
        ),
    ),
    not_native="Megatron has no M2RNN; target native cannot run it",
    rules=_rules,
    packed_documents="",
    split_sequence="M2RNN's state goes from each token to the next, over every cut of the sequence",
    recompute="m2rnn",
)
