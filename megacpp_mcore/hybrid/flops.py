"""What a token costs: operations and parameters of every layer of a recipe, from its sizes alone.

The model FLOPs of the field (PaLM, arXiv 2204.02311, appendix B; Megatron's own
`num_floating_point_operations`, which leaves out MLA and DSA): what the mathematics needs, however
a kernel does it. What is recomputed, padded or thrown away is no work of the model.

- A multiplication and an addition are two operations: a weight of m x n costs 2 m n a token.
- Forward and backward are three times the forward: each product again for the gradients of both of
  its factors. DSA's indexer is the exception: its inputs are detached, and without its loss it has
  no gradient at all. (What that loss compares with, the attention's own scores, is not counted.)
- Causal attention counts the pairs that its mask leaves: (S + 1) / 2 keys a query in a row of S
  tokens. (Megatron has S / 2, too; a figure of all S^2 pairs would be twice as high.) Each pair and
  head is two products, scores over dqk and values over dv: 2 (dqk + dv). DSA: its indexer scores
  all those pairs, its attention sees at most topk keys, in the space of the latents.
- A recurrence counts the products on its state: write and read. Mamba-3 and Mamba-2: 4 H N P R
  (k v^T and S q; the trapezoid's second k v^T folds into the first). M2RNN: H K V (2 V + 4) (h W,
  k v^T and q h). Gated DeltaNet: 6 H dk dv (S k, its correction and S q).
- A depthwise convolution of c channels and width w is 2 w c.
- An expert counts for the tokens routed to it: topk of them a token. MTP: its projection, layers
  and head again at every depth. An embedding is looked up: nothing.
- Not counted: norms, activations, RoPE, softmax, decays, gates, permutations, the loss itself, the
  optimizer. All are elementwise, below one percent at NAM56R's sizes.

Nothing here imports torch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megacpp_mcore.hybrid.plan import Layer
from megacpp_mcore.recipe import Recipe

_MAMBA2_CONV = 4  # Megatron's MambaMixer has no argument for it

# NVIDIA's figures for dense bf16 products, operations a second (data sheets of the SXM cards).
PEAKS = {
    "NVIDIA H200": 989.4e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
}


@dataclass(frozen=True)
class Part:
    """`layers` alike layers, or heads. Of one: operations a token, and parameters.

    backward: operations of the gradients. active: the parameters that a token meets.
    """

    name: str
    layers: int
    forward: float
    backward: float
    parameters: int
    active: int


@dataclass(frozen=True)
class Count:
    """The whole model, MTP included. Operations are a token's, parameters of all ranks together.

    Parameters are those of matrices, norms and recurrences; linear biases (model.add_bias_linear)
    are left out.
    """

    parts: tuple[Part, ...]

    @property
    def forward(self) -> float:
        return sum(part.layers * part.forward for part in self.parts)

    @property
    def training(self) -> float:
        """Forward and backward."""
        return self.forward + sum(part.layers * part.backward for part in self.parts)

    @property
    def parameters(self) -> int:
        return sum(part.layers * part.parameters for part in self.parts)

    @property
    def active(self) -> int:
        return sum(part.layers * part.active for part in self.parts)


@dataclass(frozen=True)
class _Cost:
    """weights: parameters that each token is multiplied with. others: the rest of the parameters.

    mixing: operations a token that no weight has a part in. idle: parameters of experts that the
    token does not meet. detached: operations of the forward pass that one of the two gradients is
    not made for.
    """

    weights: int
    others: int
    mixing: float = 0.0
    idle: int = 0
    detached: float = 0.0

    def part(self, name: str, layers: int = 1) -> Part:
        forward = 2 * self.weights + self.mixing
        parameters = self.weights + self.others + self.idle
        backward = 2 * forward - self.detached
        return Part(name, layers, forward, backward, parameters, parameters - self.idle)


def training_flops(recipe: Recipe, *, mamba2: bool = False) -> float:
    """Operations a token of training, for a receipt.

    Where documents are packed the pairs that attention sees depend on the data: they are left out,
    which makes the figure a lower bound.
    """
    keys = 0.0 if recipe.data.dataloader_inter_document_masking else None
    return count(recipe, keys=keys, mamba2=mamba2).training


def count(recipe: Recipe, *, keys: float | None = None, mamba2: bool = False) -> Count:
    """Count `recipe`. keys: the mean number of keys a query sees, where documents are packed;
    None: whole rows. mamba2: M is Megatron's Mamba-2, as in the yardstick."""
    if keys is None:
        keys = (recipe.model.seq_length + 1) / 2
    costs = _COSTS | {("M", "M"): _mamba2} if mamba2 else _COSTS

    def layers(prefix: str, found: Sequence[Layer], once: bool = False) -> list[Part]:
        """once: all depths share one set of parameters."""
        kinds: dict[tuple[str, _Cost], int] = {}
        for layer in found:
            cost = costs[layer.letter, layer.symbol](recipe, layer, keys)
            kinds[layer.letter, cost] = kinds.get((layer.letter, cost), 0) + 1
        return [cost.part(prefix + letter, number) for (letter, cost), number in kinds.items()]

    parts = [_Cost(0, _vocabulary(recipe) * recipe.model.hidden_size).part("embedding")]
    parts += layers("", recipe.plan.main_layers)
    tied = not recipe.model.untie_embeddings_and_output_weights
    head = recipe.model.vocab_size * recipe.model.hidden_size
    padding = _vocabulary(recipe) * recipe.model.hidden_size - head
    parts.append(_Cost(head, padding + _norm(recipe) - tied * (head + padding)).part("head"))
    if depths := recipe.mtp.mtp_num_layers:
        inner = layers("MTP ", recipe.plan.mtp_layers)
        hidden = recipe.model.hidden_size
        frame = _Cost(2 * hidden * hidden, 3 * _norm(recipe)).part("MTP projection", depths)
        again = _Cost(head, -head).part("MTP head", depths)  # the weight is the main head's
        if recipe.mtp.mtp_use_repeated_layer:
            inner, frame = [_shared(part, depths) for part in inner], _shared(frame, depths)
        parts += [*inner, frame, again]
    return Count(tuple(parts))


def _shared(part: Part, depths: int) -> Part:
    """Layers that every depth runs again with the same parameters, as if one layer did it all."""
    return Part(
        part.name,
        part.layers // depths,
        part.forward * depths,
        part.backward * depths,
        part.parameters,
        part.active,
    )


def _vocabulary(recipe: Recipe) -> int:
    """Rows of the embedding: the vocabulary as Megatron pads it."""
    unit = recipe.model.make_vocab_size_divisible_by * recipe.parallel.tensor_model_parallel_size
    return math.ceil(recipe.model.vocab_size / unit) * unit


def _norm(recipe: Recipe, size: int | None = None) -> int:
    size = recipe.model.hidden_size if size is None else size
    return size * (1 if recipe.model.normalization == "RMSNorm" else 2)


def _mla(recipe: Recipe, layer: Layer, keys: float) -> _Cost:
    a, hidden, heads = recipe.attention, recipe.model.hidden_size, recipe.model.num_attention_heads
    scores = a.qk_head_dim + a.qk_pos_emb_head_dim
    weights, norms = _mla_weights(recipe)
    mixing = 2 * heads * keys * (scores + a.v_head_dim)
    return _Cost(weights + heads * a.v_head_dim * hidden, norms, mixing)


def _mla_weights(recipe: Recipe) -> tuple[int, int]:
    """Parameters of MLA's projections but the last, and of its norms."""
    a, hidden, heads = recipe.attention, recipe.model.hidden_size, recipe.model.num_attention_heads
    scores = a.qk_head_dim + a.qk_pos_emb_head_dim
    q = heads * scores * (hidden if a.q_lora_rank is None else a.q_lora_rank)
    q += hidden * (a.q_lora_rank or 0)
    kv = hidden * (a.kv_lora_rank + a.qk_pos_emb_head_dim)
    kv += a.kv_lora_rank * heads * (a.qk_head_dim + a.v_head_dim)
    latents = _norm(recipe, (a.q_lora_rank or 0) + a.kv_lora_rank) if a.qk_layernorm else 0
    return q + kv, _norm(recipe) + latents


def _gqa(recipe: Recipe, layer: Layer, keys: float) -> _Cost:
    a, hidden, heads = recipe.attention, recipe.model.hidden_size, recipe.model.num_attention_heads
    dim = a.kv_channels or hidden // heads
    groups = a.num_query_groups or 1  # Megatron's own default
    weights = hidden * dim * (heads + 2 * groups) + heads * dim * hidden
    norms = _norm(recipe) + (2 * _norm(recipe, dim) if a.qk_layernorm else 0)
    return _Cost(weights, norms, 4 * heads * keys * dim)


def _dsa(recipe: Recipe, layer: Layer, keys: float) -> _Cost:
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
        return _Cost(weights, norms, mixing)
    index_heads, dim = a.dsa_indexer_n_heads or 0, a.dsa_indexer_head_dim or 0
    indexer = (a.q_lora_rank or hidden) * index_heads * dim + hidden * (dim + index_heads)
    pairs = 2 * index_heads * dim * keys
    detached = 2 * indexer if a.dsa_indexer_loss_coeff else 2 * (2 * indexer + pairs)
    return _Cost(weights + indexer, norms + 2 * dim, mixing + pairs, detached=detached)


def _mean_of_at_most(most: float, keys: float) -> float:
    """The mean of min(keys, most) over a row whose queries see 1 to S keys, `keys` in the mean."""
    row = 2 * keys - 1
    if row <= most:
        return keys
    return (most * (most + 1) / 2 + (row - most) * most) / row


def _reuses_an_index(recipe: Recipe, layer: Layer) -> bool:
    """Whether the layer takes the keys that an earlier one chose (Megatron's dsa.py)."""
    offset = max(recipe.attention.dsa_indexer_skip_topk_offset, 1)
    return max(layer.number - offset, 0) % recipe.attention.dsa_indexer_topk_freq != 0


def _experts(recipe: Recipe, layer: Layer, keys: float) -> _Cost:
    moe, hidden = recipe.moe, recipe.model.hidden_size
    matrices = 3 if recipe.model.swiglu else 2
    one = matrices * hidden * (moe.moe_ffn_hidden_size or recipe.model.ffn_hidden_size or 0)
    shared = matrices * hidden * (moe.moe_shared_expert_intermediate_size or 0)
    gate = hidden if shared and moe.moe_shared_expert_gate else 0
    experts = moe.num_experts or 0
    router = hidden * experts
    met = router + moe.moe_router_topk * one + shared + gate
    return _Cost(met, _norm(recipe), idle=(experts - moe.moe_router_topk) * one)


def _mamba3(recipe: Recipe, layer: Layer, keys: float) -> _Cost:
    m, hidden = recipe.mamba3, recipe.model.hidden_size
    heads, dim, state = m.mamba_num_heads or 0, m.mamba_head_dim, m.mamba_state_dim
    rank = m.mimo_rank if m.variant == "mimo" else 1
    inner, angles = heads * dim, int(state * m.rope_fraction) // 2
    rows = 2 * inner + 2 * m.mamba_num_groups * rank * state + 3 * heads + angles
    others = 2 * heads + 2 * heads * rank * state + 2 * state  # dt_bias, D; B, C: biases and norms
    if m.variant == "mimo":
        others += 3 * inner * rank
    scan = 4 * inner * state * rank
    return _Cost(hidden * (rows + inner), _norm(recipe) + others, scan)


def _mamba2(recipe: Recipe, layer: Layer, keys: float) -> _Cost:
    m, hidden = recipe.mamba3, recipe.model.hidden_size
    dim, state = m.mamba_head_dim, m.mamba_state_dim
    heads = m.mamba_num_heads or 2 * hidden // dim
    inner, channels = heads * dim, heads * dim + 2 * m.mamba_num_groups * state
    rows = inner + channels + heads
    others = channels * (_MAMBA2_CONV + 1) + 3 * heads + inner  # conv; A_log, dt_bias, D; norm
    mixing = 4 * inner * state + 2 * _MAMBA2_CONV * channels
    return _Cost(hidden * (rows + inner), _norm(recipe) + others, mixing)


def _m2rnn(recipe: Recipe, layer: Layer, keys: float) -> _Cost:
    r, hidden = recipe.m2rnn, recipe.model.hidden_size
    k, v = r.k_head_dim, r.v_head_dim
    heads = r.num_heads or hidden // (k + v)
    values, channels = heads * v, 2 * k + heads * v
    rows = channels + values + heads
    # conv with bias; W; A_log, dt_bias; D, norm
    others = channels * (r.conv_kernel + 1) + heads * v * v + 2 * heads + 2 * values
    mixing = heads * k * v * (2 * v + 4) + 2 * r.conv_kernel * channels
    return _Cost(hidden * (rows + values), _norm(recipe) + others, mixing)


def _deltanet(recipe: Recipe, layer: Layer, keys: float) -> _Cost:
    a, hidden = recipe.attention, recipe.model.hidden_size
    dk, dv, heads = a.linear_key_head_dim, a.linear_value_head_dim, a.linear_num_value_heads
    keys_, values = a.linear_num_key_heads * dk, heads * dv
    channels = 2 * keys_ + values
    rows = channels + values + 2 * heads
    others = channels * a.linear_conv_kernel_dim + 2 * heads + _norm(recipe, dv)
    mixing = 6 * heads * dk * dv + 2 * a.linear_conv_kernel_dim * channels
    return _Cost(hidden * (rows + values), _norm(recipe) + others, mixing)


# (letter, Megatron's symbol) -> the cost of one such layer
_COSTS: dict[tuple[str, str], Callable[[Recipe, Layer, float], _Cost]] = {
    ("A", "+"): _mla,
    ("A", "*"): _gqa,
    ("A", "D"): _dsa,
    ("E", "E"): _experts,
    ("M", "M"): _mamba3,
    ("R", "G"): _m2rnn,
    ("D", "G"): _deltanet,
}
