"""Rules about [recompute]: what the backward pass recomputes, by block."""

from dataclasses import fields

from megacpp_mcore.hybrid import letters
from megacpp_mcore.hybrid.block_settings import MEGATRON_RECOMPUTES, RecomputeSettings
from megacpp_mcore.recipe.refusal import Rules, shown

BLOCKS = tuple(field.name for field in fields(RecomputeSettings))  # the keys of [recompute]


def check(r: Rules) -> None:
    for block in BLOCKS:
        if r[f"recompute.{block}"]:
            _key(r, block)
    _attention(r)
    _moe(r)
    r.refuse(
        r["recompute.layernorm"] and not r.has("+*DEG-"),
        "recompute.layernorm",
        "must be left out: Megatron recomputes the norms before A, E, R and D, and there is none",
    )
    r.refuse(
        r["recompute.layernorm"] and r["model.transformer_impl"] != "transformer_engine",
        "recompute.layernorm",
        'needs model.transformer_impl = "transformer_engine": Megatron 0.19.2 asks it about FP8',
    )


def _key(r: Rules, block: str) -> None:
    key = f"recompute.{block}"
    r.refuse(
        r["parallel.recompute_granularity"] == "full",
        key,
        'must be left out with parallel.recompute_granularity = "full", which recomputes layers',
    )
    for letter in (entry.letter for entry in letters.known() if entry.recompute == block):
        r.refuse(not r.has_letter(letter), key, f"must be left out: there is no {letter}")
    for part in r.recipe.recompute.asked(block):
        megatrons = (block, part) in MEGATRON_RECOMPUTES
        r.refuse(
            megatrons and r["launch.device"] == "cpu",
            key,
            f'may not have {shown(part)} with launch.device = "cpu": Megatron keeps CUDA\'s random '
            "states for it",
        )
        r.refuse(
            not megatrons and r["launch.cuda_graph_impl"] != "none",
            key,
            f"may not have {shown(part)} with {r.text('launch.cuda_graph_impl')}: a captured graph "
            "recomputes nothing",
        )


def _attention(r: Rules) -> None:
    key = "recompute.attention"
    r.refuse(
        "core_attn" in r[key] and not r.has("+D*"), key, "must be left out: there is no attention"
    )


def _moe(r: Rules) -> None:
    key = "recompute.moe"
    asked = r[key]
    r.refuse(
        "layer" in asked and len(set(asked)) > 1,
        key,
        'must be "layer" alone, or without it: it recomputes the others, too',
    )
    r.refuse(
        {"act", "experts"} <= set(asked), key, "may name act or experts, which has the act inside"
    )
    r.refuse(
        "shared_experts" in asked and r["moe.moe_shared_expert_intermediate_size"] is None,
        key,
        "may name shared_experts only with moe.moe_shared_expert_intermediate_size",
    )
