"""Surface `mla_rope`: RoPE of MLA, from what the up-projections leave to what attention takes."""

import math
from typing import TYPE_CHECKING

from megacpp_mcore.patching import missing
from megacpp_mcore.surfaces.backend import REFERENCE, Backend, Surface, reference
from megacpp_mcore.surfaces.figures import Figure
from megacpp_mcore.surfaces.support import KERNEL_TESTS, one_context_rank, triton
from megacpp_mcore.surfaces.workload import Workload, config_of, dtype_of

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe

K_POS_PATCH = "mla-k-pos-gradient"


def workload(device: str, config) -> Workload:
    """heads: of one tensor-parallel rank. rotary_dim: how many of the pos_dim are rotated."""
    pos_dim = config.qk_pos_emb_head_dim
    percent = config.rotary_percent if config.rope_type == "rope" else 1.0  # YaRN rotates all
    return Workload.of(
        device,
        dtype_of(config),
        heads=config.num_attention_heads // config.tensor_model_parallel_size,
        qk_head_dim=config.qk_head_dim,
        pos_dim=pos_dim,
        v_head_dim=config.v_head_dim,
        rotary_dim=2 * math.ceil(int(pos_dim * percent) / 2),
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
    )


def of_recipe(recipe: "Recipe", device: str) -> Workload | None:
    """None when no A layer is MLA: DSA rotates its latents itself."""
    return workload(device, config_of(recipe)) if "+" in recipe.plan.symbols else None


def _triton(workload: Workload) -> str | None:
    if reason := triton(workload) or one_context_rank(workload):
        return reason
    from megacpp_mcore.kernels.mla_rope.triton import DTYPES

    dtype = workload.dtype
    return None if dtype in DTYPES else f"it takes {', '.join(DTYPES)}, not {dtype}"


def _megatron(workload: Workload) -> str | None:
    """Megatron's own path counts positions over the ranks of context parallelism."""
    ranks = workload.size("tensor_model_parallel_size", 1)
    if ranks == 1 or not missing([K_POS_PATCH]):
        return None
    return (
        f"tensor_model_parallel_size {ranks}: Megatron 0.19.2 leaves other ranks' heads out of the "
        "gradient of k's rotary part, but for TE's linears with sequence_parallel; "
        f"`megacpp patch apply --only {K_POS_PATCH}` corrects it"
    )


_KERNELS = "megacpp_mcore.kernels.mla_rope"
_LAYER = "layer-mla.json"
_facts = {
    "layout": "q, kv [s, b, heads, dims], k_pos [s, b, pos] -> q, k, v [s, b, heads, dims], or "
    "packed thd; any dims, heads and rotated share, pairs side by side or half the dims apart",
    "tests": (
        "tests/kernels/test_mla_rope.py", "tests/layers/test_mla.py",
        "tests/layers/test_mla_parallel.py", "tests/gpu/test_mla_rope_gpu.py", *KERNEL_TESTS,
    ),
    "receipt": "mla_rope.json",
}  # fmt: skip

# The layer leaves everything between projections and core attention to the class it inherits from.
MEGATRON = Backend(
    "megatron", "megatron.core.transformer.multi_latent_attention:MLASelfAttention", _megatron,
    stand_in=f"{_KERNELS}.unfused:mla_rope",
    removes="nothing: Megatron's own operations, one after another; the unfused layer to compare "
    "with. Refused with tensor parallelism, where it leaves other ranks out of k's rotary "
    f"gradient, without the patch {K_POS_PATCH}",
    dtypes="bf16, fp16, fp32, fp64; cos, sin and every step rounded to it",
    fallback=REFERENCE,
    exit_when="nobody needs the figures of the unfused layer any more",
    **_facts,
)  # fmt: skip

SURFACE = Surface(
    "mla_rope",
    (
        Backend(
            "triton", f"{_KERNELS}.triton:mla_rope", _triton,
            role="chosen",
            removes="every copy around RoPE: q, kv and k_pos are read once and q, k and v written "
            "once, and the same with their gradients, at more than four fifths of a copy's rate",
            dtypes="bf16, fp16, fp32; rotated and summed over heads in fp32, rounded once",
            fallback=REFERENCE,
            figures=(
                Figure(_LAYER, "recipe", "the layer"),
                Figure(_LAYER, "mla_rope=megatron", "the unfused layer"),
            ),
            exit_when="an attention core takes the rotary part apart from the rest",
            **_facts,
        ),
        MEGATRON,
        reference(
            f"{_KERNELS}:mla_rope", one_context_rank,
            removes="nothing: the definition in plain torch",
            dtypes="bf16, fp16, fp32, fp64; rotated in fp32 or wider, rounded once",
            **_facts,
        ),
    ),
    of_recipe,
    blocks="A",
    case="megacpp_mcore.kernels.mla_rope.case:MLARopeCase",
)  # fmt: skip
