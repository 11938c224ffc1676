"""Bytes that a recipe takes on one GPU, from its shapes alone.

Weights, gradients and optimizer states are those of Megatron's distributed optimizer: an optimizer
state of 12 bytes a parameter (fp32 main parameter, two moments) lies over the data-parallel ranks,
an expert's over those that hold the same experts. What a layer keeps is in `activations`.
"""

from dataclasses import dataclass, field

from megacpp_mcore.hybrid.letters.letter import BF16, FP32
from megacpp_mcore.planner.activations import Sizes, bytes_per_token
from megacpp_mcore.planner.backends import Serving
from megacpp_mcore.planner.pipeline import (
    costs,
    held_at_once,
    is_last,
    kinds_of,
    layers_of,
    name_of,
    planned_of,
)
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces.linear_cross_entropy import MEGATRON
from megacpp_mcore.surfaces.router_gating import FP32_OUTPUT
from megacpp_mcore.surfaces.support import TE

# On Hopper a buffer of cuBLAS is 32 MiB; Transformer Engine's grouped products have four streams.
_WORKSPACE, _GROUPED_STREAMS = 2**25, 4
_HEAD_CHUNK = 2**28  # bytes of logits that the chunked head has at a time, as measured


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU of a pipeline stage. activations: by letter, and of MTP's frame."""

    stage: int
    parameters: int
    weights: float
    gradients: float
    optimizer: float
    workspace: float
    activations: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        kept = sum(self.activations.values())
        return self.weights + self.gradients + self.optimizer + self.workspace + kept


def memory(recipe: Recipe, skew: float) -> Memory:
    """The bytes of the pipeline stage that takes the most.

    skew: by how much the rows of the fullest expert-parallel rank are more than the mean's.
    """
    sizes, stages = Sizes.of(recipe), range(recipe.parallel.pipeline_model_parallel_size)
    found = (memory_of_stage(recipe, sizes, stage, skew) for stage in stages)
    return max(found, key=lambda m: m.total)


def memory_of_stage(recipe: Recipe, sizes: Sizes, stage: int, skew: float) -> Memory:
    dense, experts = parameters(recipe, sizes, stage)
    own = dense + experts
    bf16, state = recipe.precision.bf16, _state_bytes(recipe)
    kept = _activations(recipe, sizes, stage)
    for letter, bytes_more in _exchanged(recipe, sizes, stage, skew).items():
        kept[letter] += bytes_more
    return Memory(
        stage=stage,
        parameters=round(own),
        weights=own * (BF16 if bf16 else FP32),
        gradients=own * summed_bytes(recipe),
        optimizer=state * optimized(recipe, sizes, dense, experts),
        workspace=_workspace(recipe, sizes, stage),
        activations=kept,
    )


def kept_of_stage(recipe: Recipe, stage: int) -> float:
    """Bytes of weights, gradients and optimizer states on a rank of a stage, for any batch."""
    sizes = Sizes.of(recipe)
    dense, experts = parameters(recipe, sizes, stage)
    weights = BF16 if recipe.precision.bf16 else FP32
    own = (dense + experts) * (weights + summed_bytes(recipe))
    return own + _state_bytes(recipe) * optimized(recipe, sizes, dense, experts)


def _state_bytes(recipe: Recipe) -> int:
    """Bytes a parameter of AdamW's two moments and, with bf16 weights, of the fp32 ones."""
    return 3 * FP32 if recipe.precision.bf16 else 2 * FP32


# --- parameters ---


def parameters(recipe: Recipe, sizes: Sizes, stage: int) -> tuple[float, float]:
    """Parameters on a rank of a stage: those of all but the routed experts, and the experts'."""
    parts = costs(recipe)
    last = is_last(recipe, stage)
    tied = not recipe.model.untie_embeddings_and_output_weights
    depths = recipe.mtp.mtp_num_layers
    shared_depths = recipe.mtp.mtp_use_repeated_layer
    dense = experts = 0.0
    for layer in layers_of(recipe, stage):
        if shared_depths and layer.mtp_depth not in (None, 1):
            continue
        planned = planned_of(layer)
        routed = planned.experts.parameters(recipe) if planned.experts else 0
        whole = planned.replicated(recipe) if planned.replicated else recipe.model.hidden_size
        dense += whole + (parts[name_of(layer)].parameters - routed - whole) / sizes.tp
        experts += routed / (sizes.ep * sizes.etp)
    hidden = recipe.model.hidden_size
    # MTP embeds the next tokens again, and a tied head is the embedding
    if stage == 0 or (last and (depths or tied)):
        dense += parts["embedding"].parameters / sizes.tp
    if last:
        dense += hidden + (parts["head"].parameters - hidden) / sizes.tp
        if depths:
            times = 1 if shared_depths else depths
            frame = parts["MTP projection"].parameters
            dense += times * (3 * hidden + (frame - 3 * hidden) / sizes.tp)
    return dense, experts


def optimized(recipe: Recipe, sizes: Sizes, dense: float, experts: float) -> float:
    """How many of a rank's parameters have their optimizer state there."""
    if not recipe.parallel.use_distributed_optimizer:
        return dense + experts
    return dense / sizes.dp + experts / sizes.expert_dp


def summed_bytes(recipe: Recipe) -> int:
    """Bytes of a main gradient, which is summed over micro batches and ranks."""
    return BF16 if recipe.precision.grad_reduce_in_bf16 else FP32


# --- activations ---


def _activations(recipe: Recipe, sizes: Sizes, stage: int) -> dict[str, float]:
    """What the layers keep, by letter, and MTP's frame."""
    kept: dict[str, float] = {}
    in_flight = held_at_once(recipe, stage)
    for layer, number in kinds_of(recipe, stage):
        found = in_flight * number * sizes.tokens * bytes_per_token(recipe, sizes, layer)
        kept[layer.letter] = kept.get(layer.letter, 0.0) + found
    depths = recipe.mtp.mtp_num_layers
    if depths and is_last(recipe, stage):
        # the inputs of both norms of a depth, and the two halves of the projection's input
        hidden = BF16 * recipe.model.hidden_size * sizes.tokens / sizes.cut
        kept["MTP frame"] = 4 * depths * hidden
    return kept


def _exchanged(recipe: Recipe, sizes: Sizes, stage: int, skew: float) -> dict[str, float]:
    """What the layers keep more, by letter, for the tokens of other ranks."""
    if recipe.parallel.recompute_granularity == "full":
        return {}
    found: dict[str, float] = {}
    in_flight = held_at_once(recipe, stage) * sizes.tokens
    for layer, number in kinds_of(recipe, stage):
        if experts := planned_of(layer).experts:
            one = experts.exchanged(recipe, sizes, recipe.recompute, skew)
            found[layer.letter] = found.get(layer.letter, 0.0) + in_flight * number * one
    return found


# --- workspace ---


def _workspace(recipe: Recipe, sizes: Sizes, stage: int) -> float:
    """What is no activation of a layer: library workspaces, and the most that the heads or one
    layer's backward pass need in addition to what the layers keep."""
    own = [layer for layer, _ in kinds_of(recipe, stage)]
    experts = any(planned_of(layer).experts for layer in own)
    found = float(_WORKSPACE * _buffers(recipe, sizes.serving, experts))
    # The gradients of what a layer keeps are about as large; recomputed, it is there as well.
    once = 2 if recipe.parallel.recompute_granularity == "full" else 1
    largest = max(bytes_per_token(recipe, sizes, layer, recompute=False) for layer in own)
    working = once * sizes.tokens * largest
    if is_last(recipe, stage):
        working = max(working, _heads(recipe, sizes))
    return found + working


def _buffers(recipe: Recipe, serving: Serving, experts: bool) -> int:
    """How many buffers cuBLAS has. Transformer Engine's serves all threads and streams. torch makes
    one for each: the forward thread's products are always there (the heads'), the backward thread's
    where a backward pass is in torch, and a captured step is on a stream of its own."""
    backward = (
        serving["linear"] != TE
        or serving["linear_cross_entropy"] == MEGATRON.name
        or (experts and serving["router_gating"] == FP32_OUTPUT)
    )
    streams = 2 if recipe.launch.cuda_graph_impl == "full_iteration" else 1
    grouped = _GROUPED_STREAMS if experts and serving["moe_experts"] == TE else 0
    return 1 + (1 + backward) * streams + grouped


def _heads(recipe: Recipe, sizes: Sizes) -> float:
    """The main head and MTP's. The chunked one makes its gradients at once, of hidden, and of the
    weight in fp32, and keeps them until its backward pass adds the latter to main_grad. Besides
    there is a chunk of logits, and later the gradient in the weight's dtype that autograd gets and
    nobody reads. Megatron's own keeps the logits in bf16 and their softmax in fp32."""
    vocabulary, hidden = recipe.model.vocab_size / sizes.tp, recipe.model.hidden_size
    heads = 1 + recipe.mtp.mtp_num_layers
    rows = 2 * BF16 * hidden * sizes.tokens / sizes.cut  # into the final norm and out of it
    if sizes.serving["linear_cross_entropy"] == MEGATRON.name:
        logits = sizes.tokens * vocabulary
        return heads * (logits * (BF16 + FP32) + rows) + logits * FP32
    logits = min(_HEAD_CHUNK, BF16 * vocabulary * sizes.tokens)
    one = hidden * (BF16 * sizes.tokens + FP32 * vocabulary) + rows
    return heads * one + max(logits, BF16 * vocabulary * hidden)
