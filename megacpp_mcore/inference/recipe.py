"""The recipe of a trained model on one device, made from the recipe that it was trained with.

Settings of the model and its weights are kept; layout, optimizer and data are not. Linears and
norms are plain torch, so that Transformer Engine is not needed.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.hybrid import letters
from megacpp_mcore.recipe import Recipe, load_recipe
from megacpp_mcore.surfaces.backend import REFERENCE
from megacpp_mcore.surfaces.moe_dispatch import ALLGATHER, DEEPEP

# The sections that describe a model; the others of an exported model's recipe may change.
MODEL_SECTIONS = ("model", "attention", "moe", "mamba3", "m2rnn", "mtp")

_NEVER_DROP = {  # a token's experts do not depend on the other tokens of its batch
    "moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": False,
    "moe_token_drop_policy": "probs", "moe_input_jitter_eps": None,
    "moe_router_force_load_balancing": False,
}  # fmt: skip
_ONE_RANK = {
    "moe_token_dispatcher_type": ALLGATHER, "moe_flex_dispatcher_num_sms": None,
    "moe_flex_dispatcher_backend": DEEPEP,  # the default, which the all-gather does not read
    "moe_shared_expert_overlap": False, "moe_permute_fusion": False, "moe_router_fusion": False,
    "moe_router_padding_for_quantization": False,
}  # fmt: skip
_UNFUSED = {
    "gradient_accumulation_fusion": False, "masked_softmax_fusion": False,
    "bias_swiglu_fusion": False, "bias_dropout_fusion": False, "no_persist_layer_norm": True,
    "disable_jit_fuser": True,
}  # fmt: skip


class InferenceError(MegacppError):
    """A run, a model or a request that inference does not support."""


def check_letters(recipe: Recipe) -> None:
    """Raises InferenceError for a block that keeps no state between tokens here."""
    layers = recipe.plan.layers
    if recipe.attention.kind == "dsa" and "A" in recipe.plan.letters:
        raise InferenceError(
            'attention.kind = "dsa": its sparse attention has no cache here; "mla" and "gqa" have'
        )
    unknown = {x.letter for x in layers if not letters.exported_kind(x.letter, x.symbol)}
    if unknown:
        raise InferenceError(
            f"the pattern has {', '.join(sorted(unknown))}: only A, E, M, R and dense MLPs are "
            "supported outside training"
        )


def on_one_device(
    name: str, content: Mapping[str, Any], *, device: str, mtp: bool = False
) -> Recipe:
    """The recipe of the model alone. content: of `Recipe.to_dict`; MODEL_SECTIONS are read.

    device: "cpu" or "cuda". mtp: with its depths, which generating does not need.

    Raises RecipeError for sections that no recipe has, InferenceError for a pattern that cannot run
    here.
    """
    on_cpu = device == "cpu"
    sections = {name: dict(content[name]) for name in MODEL_SECTIONS}
    model, moe = sections["model"], sections["moe"]
    model |= {"transformer_impl": "local", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    moe |= _ONE_RANK | _NEVER_DROP | {"moe_grouped_gemm": not on_cpu}
    sections["attention"] |= {"apply_rope_fusion": False, "mla_down_proj_fusion": False,
                              "attention_backend": "auto"}  # fmt: skip
    if not mtp:
        sections["mtp"] |= {"mtp_num_layers": 0, "pattern": ""}
    sections |= {
        "precision": _UNFUSED,
        "optimizer": {"lr": 1e-4},
        "schedule": {"train_iters": 1, "micro_batch_size": 1, "global_batch_size": 1,
                     "eval_interval": 1, "eval_iters": 0},
        "data": {"mock_data": True, "tokenizer_type": "NullTokenizer", "num_workers": 0,
                 "create_attention_mask_in_dataloader": False},
        "launch": {"device": device, "distributed_backend": "gloo" if on_cpu else "nccl",
                   "use_cpu_initialization": on_cpu or None},
        "backends": dict.fromkeys(("linear", "norm"), REFERENCE),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.toml"  # `name` comes from a receipt: it may be a path
        path.write_text(to_toml(sections))
        recipe = replace(load_recipe(str(path)), name=name)
    check_letters(recipe)
    return recipe


def to_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """A recipe's file. Values that are None are left out. JSON's literals are TOML's."""
    lines = []
    for section, table in sections.items():
        lines += ["", f"[{section}]"]
        for key, value in table.items():
            if isinstance(value, Mapping):
                inner = ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in value.items())
                lines.append(f"{key} = {{{inner}}}")
            elif value is not None:
                lines.append(f"{key} = {json.dumps(value)}")
    return "\n".join(lines).lstrip() + "\n"
