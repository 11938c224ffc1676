"""An exported folder: safetensors, a config, a loader in plain torch, and the way back."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megacpp_mcore.files import read_regular, write_atomically
from megacpp_mcore.hybrid.letters import exported_kind
from megacpp_mcore.inference import standalone
from megacpp_mcore.inference.loading import DTYPES, Loaded, loaded
from megacpp_mcore.inference.names import Names
from megacpp_mcore.inference.recipe import MODEL_SECTIONS, InferenceError
from megacpp_mcore.inference.safetensors import read_safetensors, write_safetensors
from megacpp_mcore.inference.text import check_tokenizer
from megacpp_mcore.inference.trained import Trained
from megacpp_mcore.inference.upstream import (
    PACKAGES,
    block_sizes,
    from_upstream,
    read_weights,
    to_upstream,
)

FORMAT = "megacpp-nam56r-1"
CONFIG, WEIGHTS, LOADER, TOKENIZER, BLOCKS = (
    "config.json", "model.safetensors", "nam56r.py", "tokenizer.json", "blocks"
)  # fmt: skip


class ExportError(InferenceError):
    """A model that the exported format does not describe, or a folder that is not an export."""


def export(
    source: Trained, out: Path, tokenizer: Path | None = None, *, blocks: bool = False
) -> dict[str, Any]:  # fmt: skip
    """Write a checkpoint's model into the folder `out`. Returns its config.

    blocks: also every M and R as its own package's module has it, in `out`/blocks.
    Weights keep the dtype of the checkpoint's model: bfloat16 but for the float32 parameters of M,
    R and the router if the run's recipe has precision.bf16, else float32. Raises ExportError when
    `out` has files or cannot be written, or the recipe has a setting that the loader does not know.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ExportError(f"{out} is there already and not an empty folder: name another --out")
    if wrong := _not_of_the_loader(source.recipe):
        raise ExportError(f"this model cannot be exported: {'; '.join(wrong)}")
    if tokenizer is not None:
        check_tokenizer(tokenizer, source.tokenizer_sha256)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"cannot write {out}: {error.strerror}") from error
    dtype = "bf16" if source.recipe["precision"]["bf16"] else "fp32"
    with loaded(source, device="cpu", dtype=dtype, mtp=True) as found:
        return write(out, source, found, dtype, tokenizer, blocks=blocks)


def write(
    out: Path, source: Trained, found: Loaded, dtype: str, tokenizer: Path | None = None, *,
    blocks: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Write the folder of a model that is loaded with its MTP depths. Returns its config."""
    tensors, config = Names(found.model).exported(), _config(source, found, dtype)
    out.mkdir(parents=True, exist_ok=True)
    write_safetensors(out / WEIGHTS, tensors, {"format": FORMAT})
    if blocks:
        _write_blocks(out / BLOCKS, config, tensors)
    shutil.copyfile(standalone.__file__, out / LOADER)
    if tokenizer is not None:
        shutil.copyfile(tokenizer, out / TOKENIZER)
    write_atomically(out / CONFIG, json.dumps(config, indent=2) + "\n")  # last: now it is whole
    return config


def _write_blocks(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    folder.mkdir()
    for layer, kind in enumerate(config["layers"]):
        if package := PACKAGES.get(kind):
            weights = to_upstream(config, kind, block_of(tensors, layer, kind))
            write_safetensors(folder / f"layer-{layer}.{package}.safetensors", weights)


def block_of(tensors: Mapping[str, Any], layer: int, kind: str) -> dict[str, Any]:
    """The tensors of one layer's block, by their names in it."""
    prefix = f"layers.{layer}.{kind}."
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def with_blocks(
    config: Mapping[str, Any], tensors: Mapping[str, Any], files: Mapping[int, Path]
) -> dict[str, Any]:
    """The tensors with other blocks of M and R. files: layer -> weights of its package's module.

    Raises ExportError for a layer that is neither, and as `from_upstream`.
    """
    replaced = dict(tensors)
    for layer, file in files.items():
        kind = config["layers"][layer] if 0 <= layer < len(config["layers"]) else None
        if kind not in PACKAGES:
            listed = ", ".join(
                f"{n} ({k})" for n, k in enumerate(config["layers"]) if k in PACKAGES
            )
            raise ExportError(f"--block {layer}: not an M or R layer; those are {listed or 'none'}")
        weights = from_upstream(config, kind, read_weights(file))
        replaced |= {f"layers.{layer}.{kind}.{name}": x for name, x in weights.items()}
    return replaced


def read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and tensors of an exported folder. Raises ExportError and InferenceError."""
    path = folder / CONFIG
    try:
        config = json.loads(read_regular(path))
        if config["format"] != FORMAT:
            raise ValueError(f"format {config['format']!r}; it must be {FORMAT!r}")
        if not all(isinstance(config["recipe"][section], dict) for section in MODEL_SECTIONS):
            raise ValueError("its recipe has not every section of a model")
        if not (isinstance(config["layers"], list) and config["dtype"] in DTYPES):
            raise ValueError(
                f"it has no list of layers, or not one of {', '.join(DTYPES)} as dtype"
            )
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ExportError(f"{folder} is not an exported model: {path}: {error}") from error
    return config, read_safetensors(folder / WEIGHTS)


def differences(config: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[str]:
    """Model keys of a recipe that are not those of an export, as `section.key is A, the export has
    B`; only such as shape the weights or what they compute."""
    found = _not_of_the_loader(recipe)
    for name, value in other_keys(config, recipe).items():
        section, _, key = name.partition(".")
        found.append(f"{name} is {recipe[section].get(key)!r}, the export has {value!r}")
    return found


def other_keys(config: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """`section.key` -> the export's value, of the keys in which a recipe's model differs."""
    return {
        f"{section}.{key}": value
        for section in MODEL_SECTIONS
        for key, value in config["recipe"][section].items()
        if key not in _FREE[section] and recipe[section].get(key) != value
    }


# How training computes, and not what: a run that goes on from an export chooses them anew.
_FREE = {
    "model": (
        "seq_length", "max_position_embeddings", "hidden_dropout", "attention_dropout",
        "init_method_std", "embedding_init_method_std", "transformer_impl",
    ),
    "attention": ("attention_backend", "apply_rope_fusion", "mla_down_proj_fusion"),
    "moe": (
        "moe_shared_expert_overlap", "moe_router_bias_update_rate", "moe_router_fusion",
        "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff",
        "moe_input_jitter_eps", "moe_router_force_load_balancing", "moe_grouped_gemm",
        "moe_router_padding_for_quantization", "moe_permute_fusion", "moe_token_dispatcher_type",
        "moe_flex_dispatcher_backend", "moe_flex_dispatcher_num_sms", "moe_expert_capacity_factor",
        "moe_pad_expert_input_to_capacity", "moe_token_drop_policy", "moe_per_layer_logging",
    ),
    "mamba3": ("dt_min", "dt_max", "dt_init_floor", "chunk_size"),
    "m2rnn": ("chunk_size", "grad_clamp", "tanh", "dt_min", "dt_max", "dt_init_floor"),
    "mtp": ("mtp_loss_scaling_factor", "mtp_detach_heads"),
}  # fmt: skip

# Settings that the loader does not know, and the value without them.
_ONLY = {
    "model.normalization": "RMSNorm", "model.add_bias_linear": False,
    "model.fp32_residual_connection": False,
    "moe.moe_apply_probs_on_input": False, "moe.moe_router_num_groups": None,
    "moe.moe_router_group_topk": None,
}  # fmt: skip


def _not_of_the_loader(recipe: Mapping[str, Any]) -> list[str]:
    """Settings of a recipe that the loader does not know, as `section.key is A, ...`."""
    wrong = []
    for dotted, only in _ONLY.items():
        section, _, key = dotted.partition(".")
        if (value := recipe[section][key]) != only:
            wrong.append(f"{dotted} is {value!r}, the loader knows {only!r}")
    model = recipe["model"]
    if not (model["swiglu"] or model["squared_relu"]):
        wrong.append("model.swiglu is false, the loader knows swiglu and squared_relu")
    if model["position_embedding_type"] not in ("rope", "none"):
        wrong.append(
            f"model.position_embedding_type is {model['position_embedding_type']!r}, the loader "
            "knows 'rope' and 'none'"
        )
    balancing = recipe["moe"]["moe_router_load_balancing_type"]
    if {"sinkhorn", "quantile_balancing"} & set(balancing):  # these have scores of their own
        wrong.append(
            f"moe.moe_router_load_balancing_type is {list(balancing)!r}, the loader knows losses"
        )
    return wrong


def _config(source: Trained, found: Loaded, dtype: str) -> dict[str, Any]:
    """What the loader reads, and under "recipe" what the way back needs."""
    recipe, model = found.recipe, found.model
    config, blocks = model.config, block_sizes(recipe, model.config)
    return {
        "format": FORMAT, "name": source.name, "iteration": source.iteration, "dtype": dtype,
        "layers": [exported_kind(layer.letter, layer.symbol) for layer in recipe.plan.main_layers],
        "hidden_size": recipe.model.hidden_size, "vocab_size": recipe.model.vocab_size,
        "padded_vocab_size": recipe.padded_vocab_size, "eod_id": found.eod,
        "norm_eps": recipe.model.layernorm_epsilon,
        "activation": "swiglu" if recipe.model.swiglu else "squared_relu",
        "ffn_hidden_size": config.ffn_hidden_size,
        "tied": not recipe.model.untie_embeddings_and_output_weights,
        "attention": _attention(recipe, model), "moe": _moe(recipe),
        "mamba3": blocks["mamba3"], "m2rnn": blocks["m2rnn"],
        "recipe": {name: dict(source.recipe[name]) for name in MODEL_SECTIONS},
    }  # fmt: skip


def _attention(recipe: Any, model: Any) -> dict[str, Any] | None:
    """Sizes, scale and frequencies of the model's first attention layer; all have the same."""
    layers = (layer.self_attention for layer in model.decoder.layers
              if hasattr(layer, "self_attention"))  # fmt: skip
    module = next((m for m in layers if hasattr(m, "linear_proj")), None)
    if module is None:
        return None
    config = model.config
    common = {"heads": config.num_attention_heads, "norms": config.qk_layernorm}
    if config.multi_latent_attention:
        names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        sizes = {name: getattr(config, name) for name in names}
        found = module.rotary_pos_emb.get_emb(2)
        table, scale = found if isinstance(found, tuple) else (found, 1.0)
        scaled = {"softmax_scale": module.softmax_scale, "rope": _rope(table, scale)}
        return common | sizes | scaled
    rope = None
    if recipe.model.position_embedding_type == "rope":
        rope = _rope(model.rotary_pos_emb(2), 1.0)
    return common | {
        "groups": config.num_query_groups or config.num_attention_heads,
        "head_dim": config.kv_channels, "rope": rope,
        "softmax_scale": config.softmax_scale or config.kv_channels**-0.5,
    }  # fmt: skip


def _rope(table: torch.Tensor, scale: float) -> dict[str, Any]:
    """table: Megatron's, [positions, 1, 1, 2 * pairs] with every angle twice; position 1 has the
    frequencies."""
    angles = table[1, 0, 0]
    return {"frequencies": angles[: len(angles) // 2].float().tolist(), "scale": float(scale)}


def _moe(recipe: Any) -> dict[str, Any] | None:
    moe = recipe.moe
    if moe.num_experts is None:
        return None
    return {
        "experts": moe.num_experts, "top_k": moe.moe_router_topk,
        "ffn_hidden_size": moe.moe_ffn_hidden_size,
        "shared_size": moe.moe_shared_expert_intermediate_size,
        "shared_gate": moe.moe_shared_expert_gate, "score": moe.moe_router_score_function,
        "pre_softmax": moe.moe_router_pre_softmax, "bias": moe.moe_router_enable_expert_bias,
        "scaling": moe.moe_router_topk_scaling_factor, "router_dtype": moe.moe_router_dtype,
    }  # fmt: skip
