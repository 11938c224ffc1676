"""Combinations that cannot run, found before anything is launched.

Each rule is Megatron-Core 0.19.2's own (its parser, TransformerConfig, layers or schedules would
stop, often much later) or the plugin's; what Megatron supports is not refused. A refusal names the
key, its value, where that came from and what is allowed.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megacpp_mcore.recipe.fields import optional
from megacpp_mcore.recipe.refusal import Refusal, Rules
from megacpp_mcore.recipe.rules import (
    attention,
    backends,
    blocks,
    experts,
    numbers,
    parallel,
    recompute,
    run,
)
from megacpp_mcore.recipe.source import KEYS

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe

# Numbers must be greater than 0, except these, which may be 0.
_MAY_BE_ZERO = {
    "model": {
        "hidden_dropout", "attention_dropout", "init_method_std", "embedding_init_method_std",
    },
    "attention": {
        "mscale", "mscale_all_dim", "qk_pos_emb_head_dim", "dsa_indexer_skip_topk_offset",
        "dsa_indexer_loss_coeff",
    },
    "moe": {"moe_router_bias_update_rate", "moe_z_loss_coeff", "moe_input_jitter_eps"},
    "mtp": {"mtp_num_layers", "mtp_loss_scaling_factor"},
    "precision": {"num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"},
    "optimizer": {
        "min_lr", "decoupled_min_lr", "weight_decay", "clip_grad", "adam_beta1", "adam_beta2",
        "lion_beta1", "lion_beta2", "sgd_momentum", "muon_momentum",
    },
    "schedule": {
        "lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_init", "eval_iters", "seed",
        "manual_gc_interval",
    },
    "data": {"null_tokenizer_eod_id", "num_workers"},
    "launch": {"cuda_graph_warmup_steps"},
}  # fmt: skip
_BELOW_ONE = re.compile(r".*_(dropout|beta[12]|momentum)|schedule\.lr_warmup_fraction")


_TOPICS = (backends, parallel, recompute, attention, experts, blocks, numbers, run)


def refusals(recipe: "Recipe") -> Sequence[Refusal]:
    """Everything that cannot be as asked; empty for a recipe that can run."""
    rules = Rules(recipe)
    _ranges(rules)
    _words(rules)
    if rules.found:
        return rules.found  # the rules below divide by these values
    for topic in _TOPICS:
        topic.check(rules)
    return rules.found


def _ranges(r: Rules) -> None:
    for dotted, key in KEYS.items():
        value = r[dotted]
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        unset = ", or leave it out" if optional(key.hint) else ""
        low, least = value <= 0, "greater than 0"
        if key.name in _MAY_BE_ZERO.get(key.section, ()):
            low, least = value < 0, "at least 0"
        r.refuse(low, dotted, f"must be {least}{unset}")
        r.refuse(
            value >= 1 and _BELOW_ONE.fullmatch(dotted),
            dotted,
            f"must be less than 1{unset}",
        )


def _words(r: Rules) -> None:
    """Texts that a command line would take for something else."""
    for dotted, key in KEYS.items():
        if key.flag is None:
            continue
        value = r[dotted]
        r.refuse(value == (), dotted, "must have an entry, or be left out")
        texts = value if isinstance(value, tuple) else (value,)
        r.refuse(
            any(isinstance(text, str) and (not text or text[0] == "-") for text in texts),
            dotted,
            "must not be empty or begin with a dash: Megatron would take it for a flag",
        )
