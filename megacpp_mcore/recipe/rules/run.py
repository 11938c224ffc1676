"""Rules about the schedule, the data, checkpoints and the machine."""

import re

from megacpp_mcore.recipe.refusal import Rules
from megacpp_mcore.surfaces.moe_dispatch import ALLGATHER

# names in launch.environment that torchrun or the lowering sets
_RESERVED = re.compile(r"MEGACPP_.*|PET_.*|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_.*")
_MOST_SEED = 2**32 - 1  # numpy's
# the values that a machine without CUDA needs, and why (training/cpu/support.py has further ones)
_ON_CPU = {
    "launch.distributed_backend": ("gloo", "nccl needs CUDA"),
    "launch.use_cpu_initialization": (True, "Megatron initialises on CUDA otherwise"),
    "launch.cuda_graph_impl": ("none", "there is no CUDA"),
    "model.transformer_impl": ("local", "Transformer Engine needs CUDA"),
    "attention.apply_rope_fusion": (False, "the fusion needs Transformer Engine or Triton"),
    "attention.mla_down_proj_fusion": (False, "the fused projection is Transformer Engine's"),
    "precision.bf16": (False, "the CPU lane trains in fp32"),
    "precision.gradient_accumulation_fusion": (False, "the fusion needs CUDA"),
    "precision.masked_softmax_fusion": (False, "the fusion needs CUDA"),
    "precision.bias_swiglu_fusion": (False, "the fusion would be compiled for CUDA"),
    "precision.bias_dropout_fusion": (False, "the fusion would be compiled for CUDA"),
    "precision.no_persist_layer_norm": (True, "the persistent kernel needs CUDA"),
    "parallel.recompute_granularity": (None, "Megatron's checkpointing keeps CUDA RNG states"),
    "moe.moe_token_dispatcher_type": (ALLGATHER, "the others make CUDA streams"),
    "moe.moe_grouped_gemm": (False, "it needs Transformer Engine"),
    "moe.moe_permute_fusion": (False, "it needs Transformer Engine"),
    "moe.moe_router_fusion": (False, "it needs Transformer Engine"),
    "moe.moe_router_force_load_balancing": (False, "Megatron draws from CUDA's random states"),
}


def check(r: Rules) -> None:
    if r["launch.device"] == "cpu":
        _cpu(r)
    _schedule(r)
    _data(r)
    _checkpoint(r)
    _environment(r)


def _cpu(r: Rules) -> None:
    for key, (value, why) in _ON_CPU.items():
        r.must_be(key, value, f'with launch.device = "cpu": {why}')


def _schedule(r: Rules) -> None:
    decay = r["schedule.lr_decay_iters"] or r["schedule.train_iters"]
    warmup = "schedule.lr_warmup_iters"
    r.refuse(r[warmup] >= decay, warmup, f"must be less than the {decay} steps of the decay")
    start = "schedule.lr_warmup_init"
    r.refuse(r[start] > r["optimizer.lr"], start, f"must be at most {r.text('optimizer.lr')}")
    r.refuse(
        r["schedule.lr_decay_style"] == "WSD" and r["schedule.lr_wsd_decay_iters"] is None,
        "schedule.lr_wsd_decay_iters",
        'is needed with schedule.lr_decay_style = "WSD"',
    )

    seed, last = "schedule.seed", 100 * (r["parallel.pipeline_model_parallel_size"] - 1)
    if r["launch.device"] == "cuda":
        r.refuse(r[seed] == 0, seed, "must be at least 1: Megatron refuses 0 as a run starts")
        r.refuse(
            r[seed] + last > _MOST_SEED, seed,
            f"must be at most {_MOST_SEED - last}: pipeline stage n adds 100 n, and numpy takes 32 "
            "bits",
        )  # fmt: skip


def _data(r: Rules) -> None:
    digest = "data.tokenizer_sha256"
    known = r[digest] is None or re.fullmatch("[0-9a-f]{64}", r[digest])
    r.refuse(not known, digest, "must be the 64 digits that PREFIX.json has")
    per_split = ("data.train_data_path", "data.valid_data_path", "data.test_data_path")
    one = sum((bool(r["data.data_path"]), r["data.mock_data"], any(r[key] for key in per_split)))
    r.refuse(
        one != 1,
        "data.data_path",
        "give exactly one source: data.data_path, data.train_data_path with its valid and test "
        "paths, or data.mock_data = true",
    )
    if r["data.data_path"]:
        _split(r)
    r.refuse(
        r["data.train_data_path"] and r["schedule.eval_iters"] and not r["data.valid_data_path"],
        "data.valid_data_path",
        f"is needed with {r.text('schedule.eval_iters')}",
    )
    documents = "packed documents are data.dataloader_inter_document_masking"
    r.refuse(
        r["data.reset_attention_mask"],
        "data.reset_attention_mask",
        f"must be false: attention is causal and reads no mask, M and R have none; {documents}",
    )
    r.refuse(
        r["data.reset_position_ids"] and r["model.position_embedding_type"] != "learned_absolute",
        "data.reset_position_ids",
        f"must be false with {r.text('model.position_embedding_type')}, which reads no position "
        f"ids; {documents}",
    )
    null = r["data.tokenizer_type"] == "NullTokenizer"
    r.refuse(
        not null and r["data.tokenizer_model"] is None,
        "data.tokenizer_model",
        f"is needed with {r.text('data.tokenizer_type')}",
    )
    eod = r["data.null_tokenizer_eod_id"]
    r.refuse(
        null and eod is not None and eod >= r["model.vocab_size"],
        "data.null_tokenizer_eod_id",
        f"must be less than {r.text('model.vocab_size')}",
    )


def _split(r: Rules) -> None:
    key, number = "data.split", r"\s*[0-9]{1,15}(\.[0-9]+)?\s*"
    if not re.fullmatch(f"{number}(,{number}){{0,2}}", r[key] or ""):
        r.refuse(
            True, key, 'must be the weights of training, validation and test, such as "98,1,1"'
        )
        return
    train, validation, _ = [*map(float, r[key].split(",")), 0.0, 0.0][:3]
    r.refuse(not train, key, "must leave data for training")
    r.refuse(
        not validation and r["schedule.eval_iters"],
        key,
        f"must leave data for validation with {r.text('schedule.eval_iters')}",
    )


def _checkpoint(r: Rules) -> None:
    every, keep = "checkpoint.save_interval", "checkpoint.save_retain_interval"
    r.refuse(r["checkpoint.save"] and r[every] is None, every, "is needed with checkpoint.save")
    r.refuse(
        r[keep] is not None and (r[every] is None or r[keep] % r[every]),
        keep,
        f"must be a multiple of {r.text(every)}",
    )
    r.refuse(
        r["checkpoint.keep_latest"] is not None and r[keep] is not None,
        "checkpoint.keep_latest",
        f"and {keep} cannot both be set",
    )
    r.refuse(
        r["checkpoint.async_save"] and not r["checkpoint.use_persistent_ckpt_worker"],
        "checkpoint.async_save",
        "needs checkpoint.use_persistent_ckpt_worker",
    )
    r.refuse(
        r["checkpoint.override_opt_param_scheduler"]
        and r["checkpoint.use_checkpoint_opt_param_scheduler"],
        "checkpoint.override_opt_param_scheduler",
        "and checkpoint.use_checkpoint_opt_param_scheduler cannot both be true",
    )
    r.refuse(
        r["checkpoint.exit_on_missing_checkpoint"] and r["checkpoint.load"] is None,
        "checkpoint.exit_on_missing_checkpoint",
        "needs checkpoint.load",
    )


def _environment(r: Rules) -> None:
    key = "launch.environment"
    environment = r[key]
    for name in environment:
        r.refuse(
            not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name), key, f"{name!r} is no variable name"
        )
        r.refuse("\0" in environment[name], key, f"{name} has a NUL, which no variable can have")
        r.refuse(
            _RESERVED.fullmatch(name), key, f"may not have {name}: the launcher sets it itself"
        )
