"""What a token costs: operations and parameters of every layer of a recipe, from its sizes alone.

The model FLOPs of the field (PaLM, arXiv 2204.02311, appendix B; Megatron's own
`num_floating_point_operations`, which leaves out MLA and DSA): what the mathematics needs, with any
kernel. Recomputation, padding and dropped tokens are not counted.

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

A letter's own operations and parameters are counted in its file in `hybrid/letters`. Nothing here
imports torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megacpp_mcore.hybrid import letters
from megacpp_mcore.hybrid.letters.letter import Cost, CostOf, norm_parameters
from megacpp_mcore.hybrid.plan import Layer

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe

FORMULA = (
    "megacpp_mcore.hybrid.flops: products of every layer and head, 3 times the forward pass, "
    "causal attention over (S + 1) / 2 keys; nothing elementwise, nothing that is recomputed"
)

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


def training_flops(recipe: "Recipe", *, mamba2: bool = False) -> float:
    """Operations a token of training, for a receipt.

    Where documents are packed the pairs that attention sees depend on the data: they are left out,
    which makes the figure a lower bound.
    """
    keys = 0.0 if recipe.data.dataloader_inter_document_masking else None
    return count(recipe, keys=keys, mamba2=mamba2).training


def count(recipe: "Recipe", *, keys: float | None = None, mamba2: bool = False) -> Count:
    """Count `recipe`. keys: the mean number of keys a query sees, where documents are packed;
    None: whole rows. mamba2: M is Megatron's Mamba-2, as in the yardstick."""
    if keys is None:
        keys = (recipe.model.seq_length + 1) / 2

    def layers(prefix: str, found: Sequence[Layer]) -> list[Part]:
        kinds: dict[tuple[str, Cost], int] = {}
        for layer in found:
            cost = _cost_of(layer, mamba2)(recipe, layer, keys)
            kinds[layer.letter, cost] = kinds.get((layer.letter, cost), 0) + 1
        return [_part(prefix + letter, cost, number) for (letter, cost), number in kinds.items()]

    parts = [_part("embedding", Cost(0, recipe.padded_vocab_size * recipe.model.hidden_size))]
    parts += layers("", recipe.plan.main_layers)
    tied = not recipe.model.untie_embeddings_and_output_weights
    head = recipe.model.vocab_size * recipe.model.hidden_size
    padding = recipe.padded_vocab_size * recipe.model.hidden_size - head
    rest = padding + norm_parameters(recipe) - tied * (head + padding)
    parts.append(_part("head", Cost(head, rest)))
    if depths := recipe.mtp.mtp_num_layers:
        inner = layers("MTP ", recipe.plan.mtp_layers)
        hidden = recipe.model.hidden_size
        frame = Cost(2 * hidden * hidden, 3 * norm_parameters(recipe))
        frame = _part("MTP projection", frame, depths)
        again = _part("MTP head", Cost(head, -head), depths)  # the weight is the main head's
        if recipe.mtp.mtp_use_repeated_layer:
            inner, frame = [_shared(part, depths) for part in inner], _shared(frame, depths)
        parts += [*inner, frame, again]
    return Count(tuple(parts))


def _cost_of(layer: Layer, mamba2: bool) -> CostOf:
    slot = letters.get(layer.letter).slot(layer.symbol)
    return slot.native_cost or slot.cost if mamba2 else slot.cost


def _part(name: str, cost: Cost, layers: int = 1) -> Part:
    forward = 2 * cost.weights + cost.mixing
    parameters = cost.weights + cost.others + cost.idle
    backward = 2 * forward - cost.detached
    return Part(name, layers, forward, backward, parameters, parameters - cost.idle)


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
