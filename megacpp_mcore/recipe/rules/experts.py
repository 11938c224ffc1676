"""Rules about the mixture of experts."""

from megacpp_mcore.recipe.refusal import Rules, shown
from megacpp_mcore.surfaces.backend import REFERENCE
from megacpp_mcore.surfaces.moe_dispatch import HYBRIDEP, WITH_DEEP_EP


def check(r: Rules) -> None:
    _experts(r)
    if r.has("E"):
        _router(r)
        _dispatch(r)


def _experts(r: Rules) -> None:
    experts = r["moe.num_experts"]
    if not r.has("E"):
        r.refuse(
            r["parallel.expert_model_parallel_size"] > 1,
            "parallel.expert_model_parallel_size",
            "must be 1: the pattern has no E",
        )
        return
    for key in ("moe.num_experts", "moe.moe_ffn_hidden_size"):
        r.refuse(r[key] is None, key, "is needed: the pattern has an E")
    named = r["backends.moe_experts"]
    r.refuse(
        not r["moe.moe_grouped_gemm"] and r["launch.device"] == "cuda" and named != REFERENCE,
        "moe.moe_grouped_gemm",
        f'must be true with backends.moe_experts = "{named or "auto"}", whose experts are grouped; '
        'backends.moe_experts = "reference" has one after another',
    )
    if experts is None:
        return
    r.refuse(
        r["moe.moe_router_topk"] > experts,
        "moe.moe_router_topk",
        f"must be at most moe.num_experts = {experts}",
    )
    tp = r["parallel.tensor_model_parallel_size"]
    etp = r["parallel.expert_tensor_parallel_size"] or tp
    r.multiple("moe.moe_ffn_hidden_size", f"the expert tensor parallel size = {etp}", etp)
    r.multiple("moe.moe_shared_expert_intermediate_size", "parallel.tensor_model_parallel_size")
    shared = r["moe.moe_shared_expert_intermediate_size"] is not None
    r.refuse(
        r["model.add_bias_linear"] and shared,
        "model.add_bias_linear",
        "must be false with moe.moe_shared_expert_intermediate_size: Megatron's shared expert has "
        "no bias",
    )
    r.refuse(
        r["model.add_bias_linear"] and named == REFERENCE,
        "model.add_bias_linear",
        f'must be false with backends.moe_experts = "{REFERENCE}": Megatron 0.19.2 adds the bias '
        "of experts that run one after another in place, which autograd refuses",
    )
    r.refuse(
        r["moe.moe_apply_probs_on_input"] and r["moe.moe_router_topk"] != 1,
        "moe.moe_apply_probs_on_input",
        f"must be false with {r.text('moe.moe_router_topk')}: it works with one expert a token",
    )
    r.refuse(
        tp > 1 and not r["parallel.sequence_parallel"],
        "parallel.sequence_parallel",
        f"must be true: experts with {r.text('parallel.tensor_model_parallel_size')} train only so",
    )


def _router(r: Rules) -> None:
    kinds, coefficients = r["moe.moe_router_load_balancing_type"], r["moe.moe_aux_loss_coeff"]
    r.refuse(
        len(kinds) != len(coefficients),
        "moe.moe_aux_loss_coeff",
        f"must have one number for each of moe.moe_router_load_balancing_type = {list(kinds)}",
    )
    r.refuse(
        {"sinkhorn", "quantile_balancing"} & set(kinds) and any(coefficients),
        "moe.moe_aux_loss_coeff",
        "must be 0 with sinkhorn and quantile_balancing, which balance without a loss",
    )
    r.refuse(
        r["moe.moe_router_pre_softmax"] and r["moe.moe_router_score_function"] != "softmax",
        "moe.moe_router_pre_softmax",
        'is read with moe.moe_router_score_function = "softmax" only',
    )
    groups, chosen = r["moe.moe_router_num_groups"], r["moe.moe_router_group_topk"]
    r.refuse(
        groups is not None and chosen is None,
        "moe.moe_router_num_groups",
        "is read with moe.moe_router_group_topk only",
    )
    if chosen is None or groups is None:
        return
    r.multiple("moe.moe_router_topk", "moe.moe_router_group_topk")
    room = chosen * ((r["moe.num_experts"] or 0) // groups)
    r.refuse(
        r["moe.moe_router_topk"] > room,
        "moe.moe_router_topk",
        f"must be at most the {room} experts of {chosen} groups",
    )


def _dispatch(r: Rules) -> None:
    r.refuse(
        r["moe.moe_router_padding_for_quantization"] and r["moe.moe_router_fusion"],
        "moe.moe_router_padding_for_quantization",
        "must be false with moe.moe_router_fusion = true: Megatron 0.19.2 pads the fused router's "
        "map in place, which its backward pass then refuses to read",
    )
    r.refuse(
        r["moe.moe_token_drop_policy"] != "probs" and r["moe.moe_expert_capacity_factor"] is None,
        "moe.moe_token_drop_policy",
        "is read with moe.moe_expert_capacity_factor only",
    )
    flex = "moe.moe_flex_dispatcher_backend"
    r.refuse(
        r[flex] == HYBRIDEP and r["moe.moe_token_dispatcher_type"] != "flex",
        flex,
        'is read with moe.moe_token_dispatcher_type = "flex" only',
    )
    r.refuse(
        r[flex] == "ncclep",
        flex,
        f"must be {' or '.join(map(shown, WITH_DEEP_EP))}: ncclep needs NCCL 2.30.4, torch 2.11 "
        "brings 2.28.9",
    )
