"""Rules about attention: GQA, MLA and DSA."""

from megacpp_mcore.recipe.refusal import Rules
from megacpp_mcore.surfaces.backend import REFERENCE
from megacpp_mcore.surfaces.support import TE


def check(r: Rules) -> None:
    r.refuse(
        r["model.position_embedding_type"] != "rope" and r["attention.apply_rope_fusion"],
        "attention.apply_rope_fusion",
        f"must be false with {r.text('model.position_embedding_type')}: Megatron would turn it off",
    )
    r.refuse(
        r["attention.mla_down_proj_fusion"] and not r.has("+"),
        "attention.mla_down_proj_fusion",
        "must be false: there is no MLA layer",
    )
    if r["attention.kv_channels"] is None:  # Megatron derives them, also where no layer needs them
        r.multiple("model.hidden_size", "model.num_attention_heads")
    _backend(r)
    if r.has("*"):
        _groups(r)
    if r.has("+D"):
        _mla(r)
    if r.has("D"):
        _dsa(r)


def _backend(r: Rules) -> None:
    """Megatron only sets environment variables for it, which Transformer Engine alone reads."""
    core = r["backends.core_attention"]
    r.refuse(
        r["attention.attention_backend"] != "auto" and r.has("+*") and core != TE,
        "attention.attention_backend",
        f'must be "auto" with backends.core_attention = "{core or "auto"}": it chooses within '
        f'Transformer Engine\'s attention only; name backends.core_attention, or "{TE}" there',
    )


def _groups(r: Rules) -> None:
    key = "attention.num_query_groups"
    if r[key] is None:
        r.refuse(True, key, 'is needed with attention.kind = "gqa" (as many as heads for MHA)')
        return
    r.multiple("model.num_attention_heads", key)
    dims = r["attention.kv_channels"] or r["model.hidden_size"] // r["model.num_attention_heads"]
    r.refuse(
        dims % 2 and r["model.position_embedding_type"] in ("rope", "yarn"),
        "attention.kv_channels",
        f"makes heads of {dims} dims: must be even, RoPE rotates pairs",
    )


def _mla(r: Rules) -> None:
    r.refuse(
        r["model.position_embedding_type"] == "yarn",
        "model.position_embedding_type",
        'must be "rope" or "none" with MLA, whose YaRN is attention.rope_type = "yarn": Megatron '
        "0.19.2 stops on an assertion",
    )
    r.refuse(
        r["attention.rope_type"] is None,
        "attention.rope_type",
        'must be given with MLA, "rope" or "yarn": Megatron\'s silent default is yarn',
    )
    r.refuse(
        r["attention.qk_layernorm"] and r["attention.q_lora_rank"] is None,
        "attention.qk_layernorm",
        "must be false without attention.q_lora_rank: Megatron norms q's latents, not q",
    )
    if r["attention.rope_type"] == "yarn":
        r.refuse(
            r["model.rotary_percent"] != 1,
            "model.rotary_percent",
            'must be 1 with attention.rope_type = "yarn", which rotates all of '
            "attention.qk_pos_emb_head_dim",
        )
    else:
        for key, unset in (("rotary_scaling_factor", 1), ("mscale", 1), ("mscale_all_dim", 0)):
            r.must_be(f"attention.{key}", unset, 'without attention.rope_type = "yarn"')
    r.refuse(
        r["attention.mla_down_proj_fusion"] and r["attention.q_lora_rank"] is None,
        "attention.mla_down_proj_fusion",
        "needs attention.q_lora_rank",
    )
    for key in ("backends.linear", "backends.norm"):
        r.refuse(
            r["attention.mla_down_proj_fusion"] and r[key] not in (None, "auto", TE),
            "attention.mla_down_proj_fusion",
            f"must be false with {r.text(key)}: Transformer Engine has the fused projection, with "
            "the norm inside",
        )
    r.refuse(
        r["attention.qk_pos_emb_head_dim"] % 2,
        "attention.qk_pos_emb_head_dim",
        "must be even: RoPE rotates pairs",
    )
    r.refuse(
        r["attention.apply_rope_fusion"] and r["attention.qk_pos_emb_head_dim"] % 4,
        "attention.apply_rope_fusion",
        f"must be false: Megatron's kernel needs {r.text('attention.qk_pos_emb_head_dim')} to be "
        "a multiple of 4",
    )


def _dsa(r: Rules) -> None:
    for key in ("n_heads", "head_dim", "topk", "loss_coeff"):
        dotted = f"attention.dsa_indexer_{key}"
        r.refuse(r[dotted] is None, dotted, "is needed for DSA layers")
    topk = r["attention.dsa_indexer_topk"]
    r.refuse(
        topk is not None and topk > r["model.seq_length"],
        "attention.dsa_indexer_topk",
        f"must be at most {r.text('model.seq_length')}",
    )
    for key, value in (("launch.device", "cpu"), ("backends.linear", REFERENCE)):
        r.refuse(
            r[key] == value,
            key,
            f'must not be "{value}" with DSA: its indexer takes Transformer Engine\'s linears only',
        )
    r.refuse(
        r["attention.apply_rope_fusion"], "attention.apply_rope_fusion", "must be false with DSA"
    )
    _dsa_ranks(r)
    _dsa_sharing(r)


def _dsa_ranks(r: Rules) -> None:
    ranks = "parallel.tensor_model_parallel_size"
    r.refuse(
        r[ranks] > 1 and not r["parallel.sequence_parallel"],
        "parallel.sequence_parallel",
        f"must be true with DSA and {r.text(ranks)}",
    )
    r.refuse(
        r["parallel.context_parallel_size"] > 1 and r["parallel.cp_comm_type"] != ("all_gather",),
        "parallel.cp_comm_type",
        'must be ["all_gather"] with DSA and context parallelism',
    )


def _dsa_sharing(r: Rules) -> None:
    """Megatron shares top-k by global layer number: the source must be a DSA layer as well."""
    frequency = r["attention.dsa_indexer_topk_freq"]
    offset = max(r["attention.dsa_indexer_skip_topk_offset"], 1)
    layers = [layer for layer in r.recipe.plan.layers if layer.symbol == "D"]
    places = {(layer.mtp_depth, layer.number, layer.stage, layer.virtual_stage) for layer in layers}
    for layer in layers:
        source = layer.number - max(layer.number - offset, 0) % frequency
        if (layer.mtp_depth, source, layer.stage, layer.virtual_stage) not in places:
            r.refuse(
                True,
                "attention.dsa_indexer_topk_freq",
                f"makes DSA layer {layer.number} reuse the top-k of layer {source}, which is no "
                f"DSA layer of its pipeline stage; DSA layers are "
                f"{', '.join(str(d.number) for d in layers)}, offset is {offset}",
            )
            return
