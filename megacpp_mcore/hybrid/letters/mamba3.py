"""M: Mamba-3 in the slot of Megatron's Mamba-2, which is what a run without us has there."""

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
from megacpp_mcore.hybrid.mamba3_layout import in_proj_rows
from megacpp_mcore.surfaces.backend import REFERENCE

if TYPE_CHECKING:
    from megacpp_mcore.hybrid.block_settings import RecomputeSettings
    from megacpp_mcore.hybrid.plan import Layer
    from megacpp_mcore.planner.activations import Sizes
    from megacpp_mcore.planner.rates import Rates
    from megacpp_mcore.recipe import Recipe
    from megacpp_mcore.recipe.refusal import Rules

_MAMBA2_CONV = 4  # Megatron's MambaMixer has no argument for it
_CORE = "mamba3_core"  # the surface of all between the mixer's projections


def _cost(recipe: "Recipe", layer: "Layer", keys: float) -> Cost:
    m, hidden = recipe.mamba3, recipe.model.hidden_size
    heads, dim, state = m.mamba_num_heads or 0, m.mamba_head_dim, m.mamba_state_dim
    rank, inner = m.rank, heads * dim
    rows = sum(
        in_proj_rows(
            heads=heads, head_dim=dim, state_dim=state, groups=m.mamba_num_groups, rank=rank,
            angles=m.angles(state),
        )
    )  # fmt: skip
    others = 2 * heads + 2 * heads * rank * state + 2 * state  # dt_bias, D; B, C: biases and norms
    if m.variant == "mimo":
        others += 3 * inner * rank
    scan = 4 * inner * state * rank
    return Cost(hidden * (rows + inner), norm_parameters(recipe) + others, scan)


def _mamba2_cost(recipe: "Recipe", layer: "Layer", keys: float) -> Cost:
    m, hidden = recipe.mamba3, recipe.model.hidden_size
    dim, state = m.mamba_head_dim, m.mamba_state_dim
    heads = m.mamba_num_heads or 2 * hidden // dim
    inner, channels = heads * dim, heads * dim + 2 * m.mamba_num_groups * state
    rows = inner + channels + heads
    others = channels * (_MAMBA2_CONV + 1) + 3 * heads + inner  # conv; A_log, dt_bias, D; norm
    mixing = 4 * inner * state + 2 * _MAMBA2_CONV * channels
    return Cost(hidden * (rows + inner), norm_parameters(recipe) + others, mixing)


def _kept(recipe: "Recipe", sizes: "Sizes", recompute: "RecomputeSettings | None") -> float:
    m = recipe.mamba3
    heads, dim, state = (m.mamba_num_heads or 0) / sizes.tp, m.mamba_head_dim, m.mamba_state_dim
    groups = max(m.mamba_num_groups / sizes.tp, 1)
    rank, angles, inner = m.rank, m.angles(state), heads * dim
    projected = BF16 * sum(
        in_proj_rows(
            heads=heads, head_dim=dim, state_dim=state, groups=groups, rank=rank, angles=angles
        )
    )
    out = BF16 * inner
    if recompute and recompute.mamba3 == "mixer":
        return 0.0
    if recompute and recompute.mamba3 == "core":
        return projected + out
    rotated = 2 * BF16 * heads * rank * state
    states = BF16 * inner * state / m.chunk_size
    if m.variant == "siso" and sizes.serving[_CORE] != REFERENCE:
        # B and C normed; dt, A dt and two factors; q and k rotated, and the angles
        steps = 2 * BF16 * groups * state + 4 * FP32 * heads + FP32 * heads * angles
        return projected + steps + rotated + states + 2 * out
    norms = 2 * groups * rank * state * (FP32 + BF16)  # B and C before, q and k after
    steps = 12 * FP32 * heads  # softplus, decay, dt, A, their sums and scales
    rotated += 2 * BF16 * heads * angles
    return projected + norms + steps + rotated + states + 2 * out


def _replicated(recipe: "Recipe") -> int:
    """The layer's norm, and those of B and C."""
    return recipe.model.hidden_size + 2 * recipe.mamba3.mamba_state_dim


def _recurrence(recipe: "Recipe", sizes: "Sizes", rates: "Rates") -> float:
    if sizes.serving[_CORE] != REFERENCE:
        return 0.0  # inside one operator with all that is moved, and measured with it
    m = recipe.mamba3
    flops = 12 * (m.mamba_num_heads or 0) * m.mamba_head_dim * m.mamba_state_dim * m.rank
    return sizes.tokens / sizes.tp * flops / rates["scan_" + m.variant]


def _rules(r: "Rules") -> None:
    key = "mamba3.mamba_num_heads"
    r.refuse(r[key] is None, key, "is needed: the pattern has an M")
    r.multiple(key, "parallel.tensor_model_parallel_size")
    r.multiple(key, "mamba3.mamba_num_groups")
    backend = r.recipe.backends.get("mamba3_scan", "auto")
    for size in ("mamba3.mamba_head_dim", "mamba3.mamba_state_dim"):
        r.refuse(
            backend != REFERENCE and r[size] & (r[size] - 1),
            size,
            "must be a power of two, as the fused scans need; only backends.mamba3_scan = "
            '"reference" takes others',
        )
    fraction, state = r["mamba3.rope_fraction"], r["mamba3.mamba_state_dim"]
    r.refuse(
        fraction > 1 or (state * fraction) % 2,
        "mamba3.rope_fraction",
        f"must be at most 1 and make mamba3.mamba_state_dim = {state} times it an even number: "
        "RoPE rotates pairs",
    )
    tp, angles = "parallel.tensor_model_parallel_size", r.recipe.mamba3.angles(state)
    r.refuse(
        angles % r[tp],
        "mamba3.rope_fraction",
        f"makes {angles} angles: must be a multiple of {r.text(tp)}",
    )
    r.ordered("mamba3.dt_min", "mamba3.dt_max")


M = BlockLetter(
    letter="M",
    title="Mamba-3",
    slots=(
        Slot(
            symbol="M",
            module="megacpp_mcore.layers.mamba3.Mamba3Mixer",
            layer="megacpp_mcore.layers.blocks.mamba3_layer",
            cost=_cost,
            native="megatron.core.ssm.mamba_mixer.MambaMixer",
            native_cost=_mamba2_cost,
            planned=Planning(
                _kept,
                _replicated,
                _recurrence,
                surface=_CORE,
                recomputes=("mamba3.core", "mamba3.mixer"),
                recomputes_norm=False,
            ),
            exported="mamba3",
        ),
    ),
    not_native="Megatron has no Mamba-3; give --mamba2 to take its own Mamba-2 for every M",
    rules=_rules,
    packed_documents="",
    split_sequence="Mamba-3's state goes from each token to the next, over every cut of the "
    "sequence",
    recompute="mamba3",
)
