"""Which recipe keys the CPU lane supports; a recipe that sets others is refused.

The model's sections are all supported, by Megatron's model code and ours. Of the other sections,
the CPU lane supports the keys listed here. Any other key must have its default, so that no option
is silently ignored.
"""

from typing import Any

from megacpp_mcore import dispatch
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.recipe.source import KEYS
from megacpp_mcore.surfaces.moe_dispatch import ALLGATHER

_MODEL_SECTIONS = {"model", "attention", "moe", "mamba3", "m2rnn", "mtp"}
_SERVED: dict[str, set[str]] = {
    "parallel": set(),
    "recompute": {"moe", "mamba3", "m2rnn"},
    "precision": {
        "gradient_accumulation_fusion", "masked_softmax_fusion", "bias_swiglu_fusion",
        "bias_dropout_fusion", "no_persist_layer_norm", "disable_jit_fuser",
        "attention_softmax_in_fp32",
    },
    "optimizer": {
        "lr", "min_lr", "weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps",
    },
    "schedule": {
        "train_iters", "micro_batch_size", "global_batch_size", "lr_decay_style", "lr_decay_iters",
        "lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_init", "lr_wsd_decay_style",
        "lr_wsd_decay_iters", "eval_interval", "eval_iters", "log_interval", "seed",
    },
    "data": {
        "data_path", "split", "data_cache_path", "tokenizer_type", "tokenizer_sha256",
        "null_tokenizer_eod_id",
        "reset_position_ids", "eod_mask_loss", "dataloader_type",
        "create_attention_mask_in_dataloader", "num_workers",
    },
    "checkpoint": {"save_interval", "keep_latest", "verify_checksums"},
    "launch": {
        "device", "strict", "heartbeat_timeout_s", "environment", "distributed_backend",
        "use_cpu_initialization",
    },
}  # fmt: skip
# key -> the supported values, for keys where these are not just the default
_ONLY: dict[tuple[str, str], tuple[Any, ...]] = {
    ("launch", "distributed_backend"): ("gloo",),
    ("launch", "use_cpu_initialization"): (True,),
    ("data", "tokenizer_type"): ("NullTokenizer",),
    ("data", "num_workers"): (0,),
    ("data", "dataloader_type"): (None, "single"),
    ("data", "create_attention_mask_in_dataloader"): (False,),
    ("model", "transformer_impl"): ("local",),
    ("moe", "moe_token_dispatcher_type"): (ALLGATHER,),
    ("moe", "moe_per_layer_logging"): (False,),
}


class CpuLaneError(MegacppError):
    """The recipe asks for something that the CPU lane does not support."""


def check(recipe: Recipe, steps: int | None = None) -> None:
    """Refuse a recipe that the CPU lane would not run as written.

    Raises CpuLaneError, which names every such key, its value and the supported one, and
    DispatchError as `dispatch.check_read`.
    """
    if recipe.launch.device != "cpu":
        raise CpuLaneError(
            f"recipe {recipe.name} has launch.device = {recipe.launch.device!r}: train it with "
            f"`megacpp train {recipe.request} --gpus N`; without a GPU, `megacpp train nam56r-tiny`"
        )
    dispatch.check_read(recipe)
    problems = []
    if steps is not None and steps > recipe.schedule.train_iters:
        problems.append(
            f"--steps {steps} goes beyond the schedule; raise schedule.train_iters, which is "
            f"{recipe.schedule.train_iters}"
        )
    for (section, key), served in _ONLY.items():
        if (asked := recipe.get(f"{section}.{key}")) not in served:
            problems.append(f"{section}.{key} is {asked!r}; the CPU lane supports {served[-1]!r}")
    for dotted, key in KEYS.items():
        served = key.section in _MODEL_SECTIONS or key.name in _SERVED[key.section]
        if not served and (asked := recipe.get(dotted)) != key.default:
            problems.append(f"{dotted} is {asked!r}; the CPU lane supports {key.default!r}")
    if recipe.model.add_bias_linear and "E" in recipe.plan.letters:
        problems.append(
            "model.add_bias_linear is True; experts that run one after another train without a "
            "bias only: Megatron adds it in place, which autograd refuses"
        )
    if not recipe.data.data_path:
        problems.append("data.data_path is not set; build one with `megacpp data build`")
    if problems:
        raise CpuLaneError(f"recipe {recipe.name} cannot train on the CPU: {'; '.join(problems)}")
