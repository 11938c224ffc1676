"""Surface `rope_qk`: RoPE of grouped-query attention, from its projection to q, k and v."""

from typing import TYPE_CHECKING

from megacpp_mcore.surfaces.backend import REFERENCE, Backend, Surface, reference
from megacpp_mcore.surfaces.figures import Figure
from megacpp_mcore.surfaces.support import (
    KERNEL_TESTS,
    TE_GRAPH,
    always,
    one_context_rank,
    triton,
)
from megacpp_mcore.surfaces.workload import Workload, config_of, dtype_of

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe


def workload(device: str, config) -> Workload:
    """heads, groups: of one tensor-parallel rank. needs: what Megatron's own path alone does."""
    tp, groups = config.tensor_model_parallel_size, config.num_query_groups
    needs = {
        "attention_output_gate": config.attention_output_gate,
        "fused_single_qkv_rope": config.fused_single_qkv_rope,
        "mrope_section": config.mrope_section is not None,
        f"num_query_groups {groups} with {tp} tensor-parallel ranks": groups < tp,
    }
    return Workload.of(
        device,
        dtype_of(config),
        heads=config.num_attention_heads // tp,
        groups=max(1, groups // tp),
        dim=config.kv_channels,
        context_parallel_size=config.context_parallel_size,
        needs=tuple(name for name, is_set in needs.items() if is_set),
    )


def of_recipe(recipe: "Recipe", device: str) -> Workload | None:
    """None without a GQA layer, or where no position is rotated."""
    rotated = recipe.model.position_embedding_type in ("rope", "yarn")
    return workload(device, config_of(recipe)) if rotated and "*" in recipe.plan.symbols else None


def _definition(workload: Workload) -> str | None:
    if reason := one_context_rank(workload):
        return reason
    needs = workload.size("needs", ())
    return f"{', '.join(needs)}: Megatron's own path alone has it" if needs else None


def _triton(workload: Workload) -> str | None:
    if reason := triton(workload) or _definition(workload):
        return reason
    from megacpp_mcore.kernels.rope_qk.triton import DTYPES

    dtype = workload.dtype
    return None if dtype in DTYPES else f"it takes {', '.join(DTYPES)}, not {dtype}"


_KERNELS = "megacpp_mcore.kernels.rope_qk"
_facts = {
    "layout": "projection [s, b, groups, (heads / groups + 2) * dim] -> q [s, b, heads, dim], k, v "
    "[s, b, groups, dim], or q and k apart; packed thd; any rotated share, pairs side by side or "
    "half apart",
    "tests": (
        "tests/kernels/test_rope_qk.py", "tests/layers/test_attention.py",
        "tests/layers/test_attention_parallel.py", *KERNEL_TESTS,
    ),
    "receipt": "rope_qk.json",
}  # fmt: skip

# The layer leaves its forward pass to the class it inherits from, which has output gates, and
# counts positions over context-parallel ranks.
MEGATRON = Backend(
    "megatron", "megatron.core.transformer.attention:SelfAttention", always,
    stand_in=f"{_KERNELS}.megatron:ROPE_QK",
    removes="nothing by itself; with Transformer Engine each rotation is one kernel. It alone has "
    "output gates and context parallelism",
    dtypes="bf16, fp16, fp32; sine and cosine rounded to it without Transformer Engine",
    fallback=REFERENCE,
    exit_when="the kernel has both",
    skips=TE_GRAPH,
    **_facts,
)  # fmt: skip

SURFACE = Surface(
    "rope_qk",
    (
        Backend(
            "triton", f"{_KERNELS}.triton:ROPE_QK", _triton,
            role="chosen",
            removes="all but one read and one write of the projection each way: the queries' copy, "
            "two launches for RoPE, and the concatenation of three gradients",
            dtypes="bf16, fp16, fp32; angles, sine and rotations in fp32, rounded once",
            fallback="megatron",
            figures=(
                Figure("rope_qk.json", "megatron", "Megatron's, with TE's kernels"),
                Figure("layer-gqa.json", "recipe", "the layer"),
                Figure("layer-gqa.json", "rope_qk=megatron", "Megatron's layer"),
            ),
            exit_when="an attention kernel rotates queries and keys as it loads them",
            **_facts,
        ),
        MEGATRON,
        reference(
            f"{_KERNELS}:REFERENCE", _definition,
            removes="nothing: the definition in plain torch",
            dtypes="bf16, fp16, fp32, fp64; rotated in fp32 or wider, rounded once",
            **_facts,
        ),
    ),
    of_recipe,
    blocks="A",
    case="megacpp_mcore.kernels.rope_qk.case:RopeQKCase",
)  # fmt: skip
