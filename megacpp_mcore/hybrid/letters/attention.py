"""A: attention, as MLA, GQA or DSA (Megatron's `+`, `*` and `D`)."""

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
    from megacpp_mcore.recipe import Recipe

KINDS = {"mla": "+", "gqa": "*", "dsa": "D"}  # attention.kind -> Megatron's symbol

_MEGATRON = "megatron.core.transformer"


def _mla(recipe: "Recipe", layer: "Layer", keys: float) -> Cost:
    a, hidden, heads = recipe.attention, recipe.model.hidden_size, recipe.model.num_attention_heads
    scores = a.qk_head_dim + a.qk_pos_emb_head_dim
    weights, norms = _mla_weights(recipe)
    mixing = 2 * heads * keys * (scores + a.v_head_dim)
    return Cost(weights + heads * a.v_head_dim * hidden, norms, mixing)


def _mla_weights(recipe: "Recipe") -> tuple[int, int]:
    """Parameters of MLA's projections but the last, and of its norms."""
    a, hidden, heads = recipe.attention, recipe.model.hidden_size, recipe.model.num_attention_heads
    scores = a.qk_head_dim + a.qk_pos_emb_head_dim
    q = heads * scores * (hidden if a.q_lora_rank is None else a.q_lora_rank)
    q += hidden * (a.q_lora_rank or 0)
    kv = hidden * (a.kv_lora_rank + a.qk_pos_emb_head_dim)
    kv += a.kv_lora_rank * heads * (a.qk_head_dim + a.v_head_dim)
    width = (a.q_lora_rank or 0) + a.kv_lora_rank
    latents = norm_parameters(recipe, width) if a.qk_layernorm else 0
    return q + kv, norm_parameters(recipe) + latents


def _gqa(recipe: "Recipe", layer: "Layer", keys: float) -> Cost:
    a, hidden, heads = recipe.attention, recipe.model.hidden_size, recipe.model.num_attention_heads
    dim = a.kv_channels or hidden // heads
    groups = a.num_query_groups or 1  # Megatron's own default
    weights = hidden * dim * (heads + 2 * groups) + heads * dim * hidden
    norms = norm_parameters(recipe) + (2 * norm_parameters(recipe, dim) if a.qk_layernorm else 0)
    return Cost(weights, norms, 4 * heads * keys * dim)


def _dsa(recipe: "Recipe", layer: "Layer", keys: float) -> Cost:
    """Absorbed MLA: the up-projections of k and v are products with queries and outputs, not with
    keys and values, and cost the same a token."""
    a, hidden, heads = recipe.attention, recipe.model.hidden_size, recipe.model.num_attention_heads
    weights, norms = _mla_weights(recipe)
    weights += heads * a.v_head_dim * hidden
    latent = 2 * a.kv_lora_rank + a.qk_pos_emb_head_dim
    topk = a.dsa_indexer_topk or 0
    seen = _mean_of_at_most(topk, keys)
    mixing = 2 * heads * seen * latent
    if _reuses_an_index(recipe, layer):
        return Cost(weights, norms, mixing)
    index_heads, dim = a.dsa_indexer_n_heads or 0, a.dsa_indexer_head_dim or 0
    indexer = (a.q_lora_rank or hidden) * index_heads * dim + hidden * (dim + index_heads)
    pairs = 2 * index_heads * dim * keys
    detached = 2 * indexer if a.dsa_indexer_loss_coeff else 2 * (2 * indexer + pairs)
    return Cost(weights + indexer, norms + 2 * dim, mixing + pairs, detached=detached)


def _mean_of_at_most(most: float, keys: float) -> float:
    """The mean of min(keys, most) over a row whose queries see 1 to S keys, `keys` in the mean."""
    row = 2 * keys - 1
    if row <= most:
        return keys
    return (most * (most + 1) / 2 + (row - most) * most) / row


def _reuses_an_index(recipe: "Recipe", layer: "Layer") -> bool:
    """Whether the layer takes the keys that an earlier one chose (Megatron's dsa.py)."""
    offset = max(recipe.attention.dsa_indexer_skip_topk_offset, 1)
    return max(layer.number - offset, 0) % recipe.attention.dsa_indexer_topk_freq != 0


def _mla_kept(recipe: "Recipe", sizes: "Sizes", recompute: "RecomputeSettings | None") -> float:
    a = recipe.attention
    heads = recipe.model.num_attention_heads / sizes.tp
    latents = BF16 * ((a.q_lora_rank or 0) + a.kv_lora_rank) / sizes.cut
    qkv = BF16 * heads * (2 * (a.qk_head_dim + a.qk_pos_emb_head_dim) + a.v_head_dim)
    out = heads * (BF16 * a.v_head_dim + FP32)  # and the log-sum-exp of each head
    recomputed = recompute and "up_proj" in recompute.attention
    return latents + out + (0 if recomputed else qkv)


def _gqa_kept(recipe: "Recipe", sizes: "Sizes", recompute: "RecomputeSettings | None") -> float:
    a, heads = recipe.attention, recipe.model.num_attention_heads
    dim = a.kv_channels or recipe.model.hidden_size // heads
    groups = a.num_query_groups or 1
    return (BF16 * dim * (2 * heads + 2 * groups) + FP32 * heads) / sizes.tp


def _dsa_kept(recipe: "Recipe", sizes: "Sizes", recompute: "RecomputeSettings | None") -> float:
    """Absorbed: queries and outputs in the space of the latent, which all heads share as k and v.

    The indexer's scores are a row of the sequence a token.
    """
    a, heads = recipe.attention, recipe.model.num_attention_heads / sizes.tp
    latent = a.kv_lora_rank + a.qk_pos_emb_head_dim
    queries = heads * (a.qk_head_dim + a.qk_pos_emb_head_dim + latent)
    outputs = heads * (a.kv_lora_rank + a.v_head_dim)
    return BF16 * (queries + outputs + latent) + FP32 * recipe.model.seq_length


def _mla_replicated(recipe: "Recipe") -> int:
    """The norm and the projections to the latents."""
    a = recipe.attention
    down = (a.q_lora_rank or 0) + a.kv_lora_rank + a.qk_pos_emb_head_dim
    return recipe.model.hidden_size * (1 + down)


_CORE, _UP = "attention.core_attn", "attention.up_proj"

A = BlockLetter(
    letter="A",
    title="attention",
    slots=(
        Slot(
            symbol=KINDS["mla"],
            module="megacpp_mcore.layers.mla.MLASelfAttention",
            layer="megacpp_mcore.layers.blocks.mla_layer",
            cost=_mla,
            native=f"{_MEGATRON}.multi_latent_attention.MLASelfAttention",
            planned=Planning(_mla_kept, _mla_replicated, recomputes=(_CORE, _UP)),
            exported="attention",
        ),
        Slot(
            symbol=KINDS["gqa"],
            module="megacpp_mcore.layers.attention.SelfAttention",
            layer="megacpp_mcore.layers.blocks.gqa_layer",
            cost=_gqa,
            native=f"{_MEGATRON}.attention.SelfAttention",
            planned=Planning(_gqa_kept, recomputes=(_CORE,)),
            exported="gqa",
        ),
        Slot(
            symbol=KINDS["dsa"],
            module="megacpp_mcore.layers.mla.AbsorbedMLASelfAttention",
            layer="megacpp_mcore.layers.blocks.dsa_layer",
            cost=_dsa,
            native=f"{_MEGATRON}.experimental_attention_variant.absorbed_mla"
            ".AbsorbedMLASelfAttention",
            planned=Planning(_dsa_kept, _mla_replicated, recomputes=(_CORE, _UP)),
        ),
    ),
    packed_documents="",
    split_sequence="",
)
