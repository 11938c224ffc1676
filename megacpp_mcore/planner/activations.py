"""What one layer keeps for its backward pass, a token and rank, from its shapes.

What is a letter's own is in its file in `hybrid/letters`. The terms are the tensors that `layers/`,
its kernels and Megatron's modules save, those of no size worth counting left out.
"""

from dataclasses import dataclass, field

from megacpp_mcore.hybrid.letters.letter import BF16, FP32
from megacpp_mcore.hybrid.plan import Layer
from megacpp_mcore.planner.backends import Serving
from megacpp_mcore.planner.pipeline import planned_of
from megacpp_mcore.recipe import Recipe


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


def bytes_per_token(recipe: Recipe, sizes: Sizes, layer: Layer, *, recompute: bool = True) -> float:
    """What a layer keeps a token of the micro batch, on one rank.

    recompute: count what the recipe recomputes as not kept. Raises PlanError for a letter whose
    entry does not say what its layers keep.
    """
    hidden = recipe.model.hidden_size * BF16 / sizes.cut
    planned = planned_of(layer)
    if recompute and recipe.parallel.recompute_granularity == "full":
        return hidden
    asked = recipe.recompute if recompute else None
    normed = 0 if asked and asked.layernorm and planned.recomputes_norm else hidden
    return hidden + normed + FP32 / sizes.cut + planned.kept(recipe, sizes, asked)
