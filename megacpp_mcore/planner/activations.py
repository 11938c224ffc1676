"""What one layer keeps for its backward pass, a token and rank, from its shapes.

The terms are the tensors that `layers/`, its kernels and Megatron's modules save, those of no size
worth counting left out.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from megacpp_mcore.hybrid.block_settings import RecomputeSettings
from megacpp_mcore.hybrid.plan import Layer
from megacpp_mcore.planner import PlanError
from megacpp_mcore.planner.backends import Serving
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces.backend import REFERENCE

_BF16, _FP32 = 2, 4


@dataclass(frozen=True)
class Sizes:
    """What a recipe makes of one rank.

    tokens: of a micro batch. cut: ranks that share a sequence between tensor-parallel regions.
    expert_dp: ranks that hold the same experts. serving: its backends.
    """

    tokens: int
    tp: int
    cut: int
    ep: int
    etp: int
    dp: int
    expert_dp: int
    serving: Serving = field(compare=False)

    @classmethod
    def of(cls, recipe: Recipe) -> "Sizes":
        p = recipe.parallel
        tp, pp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
        etp = p.expert_tensor_parallel_size or tp
        ep = p.expert_model_parallel_size
        tokens = recipe.schedule.micro_batch_size * recipe.model.seq_length
        return cls(
            tokens // p.context_parallel_size, tp, tp if p.sequence_parallel else 1, ep, etp,
            recipe.data_parallel_size * p.context_parallel_size,
            recipe.world_size // (pp * ep * etp), Serving(recipe),
        )  # fmt: skip


_Asked = RecomputeSettings | None  # None: nothing is recomputed


def bytes_per_token(recipe: Recipe, sizes: Sizes, layer: Layer, *, recompute: bool = True) -> float:
    """What a layer keeps a token of the micro batch, on one rank.

    recompute: count what the recipe recomputes as not kept.
    """
    hidden = recipe.model.hidden_size * _BF16 / sizes.cut
    if recompute and recipe.parallel.recompute_granularity == "full":
        return hidden
    asked = recipe.recompute if recompute else None
    normed = 0 if asked and asked.layernorm and layer.letter != "M" else hidden
    kept = _KEPT.get((layer.letter, layer.symbol))
    if kept is None:
        raise PlanError(
            f"what a layer {layer.letter} ({layer.symbol}) keeps is not known: the planner knows "
            + ", ".join(f"{letter} ({symbol})" for letter, symbol in _KEPT)
        )
    inner = kept(recipe, sizes, asked)
    return hidden + normed + _FP32 / sizes.cut + inner


def _mla(recipe: Recipe, sizes: Sizes, asked: _Asked) -> float:
    a = recipe.attention
    heads = recipe.model.num_attention_heads / sizes.tp
    latents = _BF16 * ((a.q_lora_rank or 0) + a.kv_lora_rank) / sizes.cut
    qkv = _BF16 * heads * (2 * (a.qk_head_dim + a.qk_pos_emb_head_dim) + a.v_head_dim)
    out = heads * (_BF16 * a.v_head_dim + _FP32)  # and the log-sum-exp of each head
    again = asked and {"up_proj"} & set(asked.attention)
    return latents + out + (0 if again else qkv)


def _gqa(recipe: Recipe, sizes: Sizes, asked: _Asked) -> float:
    a, heads = recipe.attention, recipe.model.num_attention_heads
    dim = a.kv_channels or recipe.model.hidden_size // heads
    groups = a.num_query_groups or 1
    return (_BF16 * dim * (2 * heads + 2 * groups) + _FP32 * heads) / sizes.tp


def _dsa(recipe: Recipe, sizes: Sizes, asked: _Asked) -> float:
    """Absorbed: queries and outputs in the space of the latent, which all heads share as k and v.

    The indexer's scores are a row of the sequence a token.
    """
    a, heads = recipe.attention, recipe.model.num_attention_heads / sizes.tp
    latent = a.kv_lora_rank + a.qk_pos_emb_head_dim
    queries = heads * (a.qk_head_dim + a.qk_pos_emb_head_dim + latent)
    outputs = heads * (a.kv_lora_rank + a.v_head_dim)
    return _BF16 * (queries + outputs + latent) + _FP32 * recipe.model.seq_length


def _experts(recipe: Recipe, sizes: Sizes, asked: _Asked) -> float:
    """Rows are as many as if every expert got the same number of tokens."""
    moe, parts = recipe.moe, set(asked.moe) if asked else set()
    if "layer" in parts:
        return 0.0
    gates = 2 if recipe.model.swiglu else 1
    shared = (moe.moe_shared_expert_intermediate_size or 0) / sizes.tp
    found = routed_rows(recipe, sizes, parts)
    found += 0 if "shared_experts" in parts else _BF16 * (gates + 1) * shared
    return found + 4 * _FP32 * (moe.num_experts or 0) / sizes.cut  # logits, scores, maps


def routed_rows(recipe: Recipe, sizes: Sizes, parts: set[str]) -> float:
    """Bytes a token of the rows that experts get. parts: of recompute.moe."""
    moe = recipe.moe
    if "layer" in parts:
        return 0.0
    rows = moe.moe_router_topk * sizes.etp / sizes.cut
    width = _BF16 * (moe.moe_ffn_hidden_size or 0) / sizes.etp
    one = _BF16 * recipe.model.hidden_size + _FP32  # a permuted token and its weight
    gates = 2 if recipe.model.swiglu else 1
    if sizes.serving.gathers_tokens:
        return rows * (3 * _FP32 + (0 if "experts" in parts else gates * width))
    if "experts" not in parts:
        one += gates * width
        one += 0 if "act" in parts else width
    return rows * one


def _mamba3(recipe: Recipe, sizes: Sizes, asked: _Asked) -> float:
    m = recipe.mamba3
    heads, dim, state = (m.mamba_num_heads or 0) / sizes.tp, m.mamba_head_dim, m.mamba_state_dim
    groups = max(m.mamba_num_groups / sizes.tp, 1)
    rank = m.mimo_rank if m.variant == "mimo" else 1
    angles = m.angles(state)
    inner = heads * dim
    projected = _BF16 * (2 * inner + 2 * groups * rank * state + 3 * heads + angles)
    out = _BF16 * inner
    if asked and asked.mamba3 == "mixer":
        return 0.0
    if asked and asked.mamba3 == "core":
        return projected + out
    rotated = 2 * _BF16 * heads * rank * state
    states = _BF16 * inner * state / m.chunk_size
    if m.variant == "siso" and sizes.serving["mamba3_core"] != REFERENCE:
        # B and C normed; dt, A dt and two factors; q and k rotated, and the angles
        steps = 2 * _BF16 * groups * state + 4 * _FP32 * heads + _FP32 * heads * angles
        return projected + steps + rotated + states + 2 * out
    norms = 2 * groups * rank * state * (_FP32 + _BF16)  # B and C before, q and k after
    steps = 12 * _FP32 * heads  # softplus, decay, dt, A, their sums and scales
    rotated += 2 * _BF16 * heads * angles
    return projected + norms + steps + rotated + states + 2 * out


def _m2rnn(recipe: Recipe, sizes: Sizes, asked: _Asked) -> float:
    r = recipe.m2rnn
    heads = r.heads(recipe.model.hidden_size) / sizes.tp
    values, keys = heads * r.v_head_dim, 2 * r.k_head_dim
    channels = values + keys / sizes.tp
    out = _BF16 * values
    if asked and asked.m2rnn == "mixer":
        return 0.0
    if asked and asked.m2rnn == "core":
        return _BF16 * (channels + values + heads) + out
    convolved = channels * (2 * _FP32 + _BF16) + _BF16 * keys
    states = _BF16 * heads * r.k_head_dim * r.v_head_dim / r.chunk_size
    return convolved + 5 * _FP32 * heads + states + 6 * _FP32 * values + out


def _deltanet(recipe: Recipe, sizes: Sizes, asked: _Asked) -> float:
    a = recipe.attention
    keys = a.linear_num_key_heads * a.linear_key_head_dim / sizes.tp
    values = a.linear_num_value_heads * a.linear_value_head_dim / sizes.tp
    heads = a.linear_num_value_heads / sizes.tp
    states = _BF16 * values * a.linear_key_head_dim / 64  # flash-linear-attention's chunks
    return _BF16 * (2 * (2 * keys + values) + 3 * values) + 4 * _FP32 * heads + states


_KEPT: dict[tuple[str, str], Callable[[Recipe, Sizes, _Asked], float]] = {
    ("A", "+"): _mla,
    ("A", "*"): _gqa,
    ("A", "D"): _dsa,
    ("E", "E"): _experts,
    ("M", "M"): _mamba3,
    ("R", "G"): _m2rnn,
    ("D", "G"): _deltanet,
}
