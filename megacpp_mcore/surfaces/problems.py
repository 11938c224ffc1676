"""The Problem of each surface: what a layer asks dispatch, and what a recipe's layers will ask.

The first function of a surface takes Megatron's config, as the layer that is being built has it;
the second makes that config's fields from a recipe and calls the first, so that the catalog answers
for what the layers will ask. No torch at import.
"""

import ctypes
import functools
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING

from megacpp_mcore.surfaces.backend import Problem

if TYPE_CHECKING:
    from megacpp_mcore.hybrid.block_settings import M2RNNSettings, Mamba3Settings
    from megacpp_mcore.layers.m2rnn_layout import M2RNNLayout
    from megacpp_mcore.layers.mamba3_layout import Mamba3Layout
    from megacpp_mcore.recipe import Recipe


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


def stack_part(device: str) -> Problem:
    """What a stack spec is put together from (linear, residual): chosen before any config."""
    return Problem.of(device, "any")


def stack_part_of(recipe: "Recipe", device: str) -> Problem:
    return stack_part(device)


def linear(device: str, config) -> Problem:
    """The linears of a stack spec, asked again when the stack is built."""
    return Problem.of(device, _dtype(config), fp8=config.fp8)


def linear_of(recipe: "Recipe", device: str) -> Problem:
    return linear(device, _config(recipe))


def norm(device: str, config) -> Problem:
    """normalization: "RMSNorm" or "LayerNorm"."""
    return Problem.of(
        device,
        _dtype(config),
        normalization=config.normalization,
        zero_centered_gamma=config.layernorm_zero_centered_gamma,
        fp32_residual=config.fp32_residual_connection,
    )


def norm_of(recipe: "Recipe", device: str) -> Problem:
    return norm(device, _config(recipe))


def moe_experts(device: str, config, optimizer: str) -> Problem:
    """optimizer: the recipe's, which may want every weight to be a matrix."""
    recomputed = config.recompute_modules if config.recompute_granularity == "selective" else ()
    return Problem.of(
        device,
        _dtype(config),
        swiglu=config.gated_linear_unit and config.activation_func.__name__ == "silu",
        bias=config.add_bias_linear,
        probs_on_input=config.moe_apply_probs_on_input,
        fp8=config.fp8,
        recomputed_activation="moe_act" in recomputed,
        optimizer=optimizer,
    )


def moe_experts_of(recipe: "Recipe", device: str) -> Problem | None:
    if not _has(recipe, "E"):
        return None
    return moe_experts(device, _config(recipe), recipe.optimizer.optimizer)


def core_attention(
    device: str,
    config,
    k_channels: int | None = None,
    v_channels: int | None = None,
    layout: str = "sbhd",
    window: int | None = None,
) -> Problem:
    """dqk, dv: head dims of queries and keys, and of values; they differ in MLA.

    layout: "sbhd" for whole rows, "thd" for packed documents. window: tokens before its own that a
    query of the layer sees, None: all. needs: what the config asks beyond causal attention.
    """
    dqk = k_channels or config.kv_channels
    needs = {
        "dropout": config.attention_dropout > 0,
        "window": window is not None,
        "softmax_type": config.softmax_type != "vanilla",
        "qk_clip": config.qk_clip,
        "log_max_attention_logit": config.log_max_attention_logit,
        "fp8_dot_product_attention": config.fp8_dot_product_attention,
        "fp8_multi_head_attention": config.fp8_multi_head_attention,
        "batch_invariant_mode": config.batch_invariant_mode,
        "deterministic_mode": config.deterministic_mode,
    }
    return Problem.of(
        device,
        _dtype(config),
        dqk=dqk,
        dv=v_channels or dqk,
        heads=config.num_attention_heads,
        context_parallel_size=config.context_parallel_size,
        layout=layout,
        needs=tuple(name for name, is_asked in needs.items() if is_asked),
    )


def core_attention_of(recipe: "Recipe", device: str) -> Problem | None:
    """None when no A layer has a core attention of its own: DSA brings its kernel with it."""
    symbols = {layer.symbol for layer in recipe.plan.layers if layer.letter == "A"}
    a = recipe.attention
    layout = "thd" if recipe.data.dataloader_inter_document_masking else "sbhd"
    if "+" in symbols:
        dqk = a.qk_head_dim + a.qk_pos_emb_head_dim
        return core_attention(device, _config(recipe), dqk, a.v_head_dim, layout)
    return core_attention(device, _config(recipe), layout=layout) if "*" in symbols else None


def mla_rope(device: str, config) -> Problem:
    """heads: of one tensor-parallel rank. rotary_dim: dims of the pos_dim that RoPE turns."""
    pos_dim = config.qk_pos_emb_head_dim
    percent = config.rotary_percent if config.rope_type == "rope" else 1.0  # YaRN turns all
    return Problem.of(
        device,
        _dtype(config),
        heads=config.num_attention_heads // config.tensor_model_parallel_size,
        qk_head_dim=config.qk_head_dim,
        pos_dim=pos_dim,
        v_head_dim=config.v_head_dim,
        rotary_dim=2 * math.ceil(int(pos_dim * percent) / 2),
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
    )


def mla_rope_of(recipe: "Recipe", device: str) -> Problem | None:
    """None when no A layer is MLA: DSA turns its latents itself."""
    has_mla = any(layer.symbol == "+" for layer in recipe.plan.layers)
    return mla_rope(device, _config(recipe)) if has_mla else None


def rope_qk(device: str, config) -> Problem:
    """heads, groups: of one tensor-parallel rank. needs: what Megatron's own path alone does."""
    tp, groups = config.tensor_model_parallel_size, config.num_query_groups
    needs = {
        "attention_output_gate": config.attention_output_gate,
        "fused_single_qkv_rope": config.fused_single_qkv_rope,
        "mrope_section": config.mrope_section is not None,
        f"num_query_groups {groups} with {tp} tensor-parallel ranks": groups < tp,
    }
    return Problem.of(
        device,
        _dtype(config),
        heads=config.num_attention_heads // tp,
        groups=max(1, groups // tp),
        dim=config.kv_channels,
        context_parallel_size=config.context_parallel_size,
        needs=tuple(name for name, is_set in needs.items() if is_set),
    )


def rope_qk_of(recipe: "Recipe", device: str) -> Problem | None:
    """None without a GQA layer, or where no position is turned."""
    turned = recipe.model.position_embedding_type in ("rope", "yarn")
    has_gqa = any(layer.symbol == "*" for layer in recipe.plan.layers)
    return rope_qk(device, _config(recipe)) if has_gqa and turned else None


def mamba3_scan(device: str, config, layout: "Mamba3Layout", settings: "Mamba3Settings") -> Problem:
    """heads, groups: of one tensor-parallel rank. rank: of MIMO, else 1."""
    return Problem.of(
        device,
        _dtype(config),
        variant=settings.variant,
        heads=layout.local_heads,
        groups=layout.scan_groups,
        head_dim=layout.head_dim,
        state_dim=layout.state_dim,
        rank=layout.rank,
        angles=layout.angles,
        chunk_size=settings.chunk_size,
    )


def mamba3_scan_of(recipe: "Recipe", device: str) -> Problem | None:
    if not _has(recipe, "M"):
        return None
    from megacpp_mcore.layers.mamba3_layout import Mamba3Layout

    config, tp = _config(recipe), recipe.parallel.tensor_model_parallel_size
    group = SimpleNamespace(size=lambda: tp, rank=lambda: 0)
    layout = Mamba3Layout.of(config, recipe.mamba3, SimpleNamespace(tp=group))
    return mamba3_scan(device, config, layout, recipe.mamba3)


def mixer_prep(device: str, config) -> Problem:
    """What lies between a mixer's projections and its kernel: elementwise, so of any sizes."""
    return Problem.of(
        device,
        _dtype(config),
        deterministic_mode=config.deterministic_mode,
        cuda_graph_impl=config.cuda_graph_impl,
    )


def mamba3_prep_of(recipe: "Recipe", device: str) -> Problem | None:
    return mixer_prep(device, _config(recipe)) if _has(recipe, "M") else None


def m2rnn_prep_of(recipe: "Recipe", device: str) -> Problem | None:
    return mixer_prep(device, _config(recipe)) if _has(recipe, "R") else None


def m2rnn(device: str, config, layout: "M2RNNLayout", settings: "M2RNNSettings") -> Problem:
    """heads: of one tensor-parallel rank."""
    return Problem.of(
        device,
        _dtype(config),
        heads=layout.local_heads,
        k_head_dim=layout.k_dim,
        v_head_dim=layout.v_dim,
        chunk_size=settings.chunk_size,
    )


def m2rnn_of(recipe: "Recipe", device: str) -> Problem | None:
    if not _has(recipe, "R"):
        return None
    from megacpp_mcore.layers.m2rnn_layout import M2RNNLayout

    config = _config(recipe)
    layout = M2RNNLayout.of(config, recipe.m2rnn, recipe.parallel.tensor_model_parallel_size)
    return m2rnn(device, config, layout, recipe.m2rnn)


def linear_cross_entropy(device: str, config, vocab_size: int) -> Problem:
    """vocab_size: padded, of all tensor-parallel ranks."""
    return Problem.of(
        device,
        _dtype(config),
        hidden_size=config.hidden_size,
        vocab_size=vocab_size,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
    )


def linear_cross_entropy_of(recipe: "Recipe", device: str) -> Problem:
    model, tp = recipe.model, recipe.parallel.tensor_model_parallel_size
    multiple = model.make_vocab_size_divisible_by * tp
    padded = math.ceil(model.vocab_size / multiple) * multiple
    return linear_cross_entropy(device, _config(recipe), padded)


def _has(recipe: "Recipe", letter: str) -> bool:
    return any(layer.letter == letter for layer in recipe.plan.layers)


def _query_groups(recipe: "Recipe") -> int:
    """Megatron reads the recipe's number with --group-query-attention, which only GQA gets."""
    grouped = recipe.attention.kind == "gqa" and recipe.attention.num_query_groups
    return grouped or recipe.model.num_attention_heads


def _dtype(config) -> str:
    return str(config.params_dtype).removeprefix("torch.")


def _config(recipe: "Recipe") -> SimpleNamespace:
    """The fields of Megatron's TransformerConfig that problems and layouts read."""
    model, attention, mamba3 = recipe.model, recipe.attention, recipe.mamba3
    modules = recipe.recompute.megatron_modules
    return SimpleNamespace(
        params_dtype="bfloat16" if recipe.precision.bf16 else "float32",
        fp8=recipe.precision.fp8,
        hidden_size=model.hidden_size,
        normalization=model.normalization,
        layernorm_zero_centered_gamma=False,
        fp32_residual_connection=model.fp32_residual_connection,
        gated_linear_unit=model.swiglu,
        activation_func=SimpleNamespace(__name__="silu" if model.swiglu else "another"),
        add_bias_linear=model.add_bias_linear,
        moe_apply_probs_on_input=recipe.moe.moe_apply_probs_on_input,
        recompute_granularity="selective" if modules else None,
        recompute_modules=modules,
        num_attention_heads=model.num_attention_heads,
        kv_channels=attention.kv_channels or model.hidden_size // model.num_attention_heads,
        num_query_groups=_query_groups(recipe),
        attention_dropout=model.attention_dropout,
        softmax_type="vanilla",
        qk_clip=False,
        log_max_attention_logit=False,
        fp8_dot_product_attention=False,
        fp8_multi_head_attention=False,
        batch_invariant_mode=False,
        deterministic_mode=recipe.precision.deterministic_mode,
        cuda_graph_impl=recipe.launch.cuda_graph_impl,
        attention_output_gate=False,
        fused_single_qkv_rope=False,
        mrope_section=None,
        qk_head_dim=attention.qk_head_dim,
        qk_pos_emb_head_dim=attention.qk_pos_emb_head_dim,
        v_head_dim=attention.v_head_dim,
        rope_type=attention.rope_type,
        rotary_percent=model.rotary_percent,
        context_parallel_size=recipe.parallel.context_parallel_size,
        tensor_model_parallel_size=recipe.parallel.tensor_model_parallel_size,
        mamba_num_heads=mamba3.mamba_num_heads,
        mamba_head_dim=mamba3.mamba_head_dim,
        mamba_state_dim=mamba3.mamba_state_dim,
        mamba_num_groups=mamba3.mamba_num_groups,
    )
