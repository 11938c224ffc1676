"""Rules about precision and the optimizer."""

from megacpp_mcore.recipe.refusal import Rules, shown
from megacpp_mcore.recipe.rules import recompute
from megacpp_mcore.recipe.source import KEYS
from megacpp_mcore.surfaces import mla_up, moe_experts

# Named beside FP8 linears, they multiply in the model's dtype.
_IN_THE_MODELS_DTYPE = {
    "backends.moe_experts": moe_experts.FUSED,
    "backends.mla_up": mla_up.TRITON,
}
_OF_DELAYED_SCALING = ("fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad")
_TP, _CP = "parallel.tensor_model_parallel_size", "parallel.context_parallel_size"


def check(r: Rules) -> None:
    _precision(r)
    if r["precision.fp8"] is not None:
        _fp8(r)
        _fp8_sizes(r)
    _optimizer(r)


def _precision(r: Rules) -> None:
    for key, other in (
        ("precision.grad_reduce_in_bf16", "bf16"), ("precision.first_last_layers_bf16", "fp8")
    ):  # fmt: skip
        r.refuse(r[key] and not r[f"precision.{other}"], key, f"needs precision.{other}")


def _fp8(r: Rules) -> None:
    r.refuse(not r["precision.bf16"], "precision.bf16", "must be true with precision.fp8")
    r.refuse(
        r["model.transformer_impl"] != "transformer_engine",
        "model.transformer_impl",
        'must be "transformer_engine" with precision.fp8',
    )
    if r["precision.fp8_recipe"] != "delayed":
        why = f"with {r.text('precision.fp8_recipe')}: Megatron reads it for delayed scaling alone"
        for key in (f"precision.{name}" for name in _OF_DELAYED_SCALING):
            r.must_be(key, KEYS[key].default, why)
    stage = r["model.depth"] // r["parallel.pipeline_model_parallel_size"]
    for key in ("precision.num_layers_at_start_in_bf16", "precision.num_layers_at_end_in_bf16"):
        r.refuse(r[key] > stage, key, f"must be at most the {stage} layers of a pipeline stage")
    for key, name in _IN_THE_MODELS_DTYPE.items():
        if r[key] == name:
            _not_recomputed(r, f"with precision.fp8 and {key} = {shown(name)}, which is not in FP8")


def _not_recomputed(r: Rules, why: str) -> None:
    blocks = (f"recompute.{block}" for block in recompute.BLOCKS)
    for key in ("parallel.recompute_granularity", *blocks):
        r.refuse(r[key], key, f"must be left out {why}: untested")


def _fp8_sizes(r: Rules) -> None:
    """Both dimensions of an FP8 matrix product are multiples of 16, on every rank.

    A projection of an M or an R that does not fit stays in bf16.
    """
    tp = r[_TP]
    etp = r["parallel.expert_tensor_parallel_size"] or tp
    split = {"model.hidden_size": 1}
    if r.has("+D"):
        split |= {"attention.q_lora_rank": 1, "attention.kv_lora_rank": 1}
        split |= {"attention.qk_head_dim": 1, "attention.v_head_dim": 1}
    if r.has("E"):
        split["moe.moe_ffn_hidden_size"] = etp
        split["moe.moe_shared_expert_intermediate_size"] = tp
    for key, ranks in split.items():
        base = "16 with precision.fp8" if ranks == 1 else f"16 x {ranks} ranks with precision.fp8"
        r.multiple(key, base, 16 * ranks)
    tokens = r["model.seq_length"] * r["schedule.micro_batch_size"] // r[_CP]
    r.refuse(
        tokens % 16,
        "model.seq_length",
        f"makes {tokens} tokens a rank: must be a multiple of 16 with precision.fp8",
    )


def _optimizer(r: Rules) -> None:
    r.ordered("optimizer.min_lr", "optimizer.lr")
    name, precise = r["optimizer.optimizer"], "optimizer.use_precision_aware_optimizer"
    r.refuse(
        r[precise] and (name != "adam" or not r["parallel.use_distributed_optimizer"]),
        precise,
        'needs optimizer.optimizer = "adam" and parallel.use_distributed_optimizer',
    )
    for key in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        dotted = f"optimizer.{key}"
        r.refuse(
            r[dotted] != "fp32" and not r[precise], dotted, f'must be "fp32" without {precise}'
        )
    r.refuse(
        name not in ("adam", "sgd") and r["precision.fp8_param_gather"],
        "precision.fp8_param_gather",
        f"must be false with {r.text('optimizer.optimizer')}",
    )
