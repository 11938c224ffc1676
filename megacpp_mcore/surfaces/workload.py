"""What a backend is asked to serve, and the config fields that a recipe gives for it.

A surface's `workload` takes Megatron's config, as the layer that is being built has it; its
`of_recipe` makes those fields from a recipe and calls `workload`, so that the catalog answers for
what the layers will ask. No torch at import.
"""

import ctypes
import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe


@dataclass(frozen=True)
class Workload:
    """What a backend is asked to serve; build one with `Workload.of`.

    device: "cpu" or "cuda". dtype: torch's name without the prefix ("bfloat16"), or "any" where the
    choice is made before the dtype is known. sizes: what the surface's backends need to know (head
    dims, heads, layout) as sorted (name, value) pairs, so that a workload can be a cache key.
    """

    device: str
    dtype: str
    sizes: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, device: str, dtype: str, **sizes: Any) -> "Workload":
        return cls(device, dtype, tuple(sorted(sizes.items())))

    def size(self, name: str, default: Any = None) -> Any:
        return dict(self.sizes).get(name, default)


@functools.cache
def current_device() -> str:
    """ "cuda" where this process can use a GPU, else "cpu".

    Without the driver's library torch cannot use a GPU, so that torch need not be imported to know.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype_of(config) -> str:
    """The parameters' dtype, without torch's prefix."""
    return str(config.params_dtype).removeprefix("torch.")


def _activation(model) -> str:
    """Name of Megatron's activation function, of those that a backend asks for."""
    if model.swiglu:
        return "silu"
    return "squared_relu" if model.squared_relu else "another"


def config_of(recipe: "Recipe") -> SimpleNamespace:
    """The fields of Megatron's TransformerConfig that workloads and layouts read."""
    model, attention, mamba3 = recipe.model, recipe.attention, recipe.mamba3
    modules = recipe.recompute.megatron_modules
    # Megatron reads the recipe's number with --group-query-attention, which only GQA gets.
    groups = attention.kind == "gqa" and attention.num_query_groups
    return SimpleNamespace(
        params_dtype="bfloat16" if recipe.precision.bf16 else "float32",
        fp8=recipe.precision.fp8,
        hidden_size=model.hidden_size,
        normalization=model.normalization,
        layernorm_zero_centered_gamma=False,
        fp32_residual_connection=model.fp32_residual_connection,
        gated_linear_unit=model.swiglu,
        activation_func=SimpleNamespace(__name__=_activation(model)),
        add_bias_linear=model.add_bias_linear,
        num_moe_experts=recipe.moe.num_experts or 0,
        moe_router_topk=recipe.moe.moe_router_topk,
        moe_router_dtype=recipe.moe.moe_router_dtype,
        moe_router_fusion=recipe.moe.moe_router_fusion,
        moe_router_score_function=recipe.moe.moe_router_score_function,
        moe_router_num_groups=recipe.moe.moe_router_num_groups,
        moe_router_load_balancing_type=recipe.moe.moe_router_load_balancing_type,
        moe_enable_routing_replay=False,
        moe_flex_dispatcher_num_sms=recipe.moe.moe_flex_dispatcher_num_sms,
        moe_expert_capacity_factor=recipe.moe.moe_expert_capacity_factor,
        moe_pad_expert_input_to_capacity=recipe.moe.moe_pad_expert_input_to_capacity,
        moe_router_padding_for_quantization=recipe.moe.moe_router_padding_for_quantization,
        moe_shared_expert_overlap=recipe.moe.moe_shared_expert_overlap,
        moe_apply_probs_on_input=recipe.moe.moe_apply_probs_on_input,
        moe_ffn_hidden_size=recipe.moe.moe_ffn_hidden_size or 0,
        expert_model_parallel_size=recipe.parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=recipe.parallel.expert_tensor_parallel_size
        or recipe.parallel.tensor_model_parallel_size,
        recompute_granularity="selective" if modules else None,
        recompute_modules=modules,
        num_attention_heads=model.num_attention_heads,
        kv_channels=attention.kv_channels or model.hidden_size // model.num_attention_heads,
        num_query_groups=groups or model.num_attention_heads,
        attention_dropout=model.attention_dropout,
        softmax_type="vanilla",
        qk_clip=False,
        log_max_attention_logit=False,
        fp8_dot_product_attention=False,
        fp8_multi_head_attention=False,
        batch_invariant_mode=False,
        deterministic_mode=recipe.precision.deterministic_mode,
        cuda_graph_impl=recipe.launch.cuda_graph_impl,
        cuda_graph_modules=recipe.launch.cuda_graph_modules,
        attention_output_gate=False,
        fused_single_qkv_rope=False,
        mrope_section=None,
        q_lora_rank=attention.q_lora_rank,
        kv_lora_rank=attention.kv_lora_rank,
        qk_layernorm=attention.qk_layernorm,
        qk_head_dim=attention.qk_head_dim,
        qk_pos_emb_head_dim=attention.qk_pos_emb_head_dim,
        v_head_dim=attention.v_head_dim,
        rope_type=attention.rope_type,
        rotary_percent=model.rotary_percent,
        context_parallel_size=recipe.parallel.context_parallel_size,
        tensor_model_parallel_size=recipe.parallel.tensor_model_parallel_size,
        sequence_parallel=recipe.parallel.sequence_parallel,
        mamba_num_heads=mamba3.mamba_num_heads,
        mamba_head_dim=mamba3.mamba_head_dim,
        mamba_state_dim=mamba3.mamba_state_dim,
        mamba_num_groups=mamba3.mamba_num_groups,
    )
