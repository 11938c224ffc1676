"""Layouts of one small NAM56R, and the runs of them that `parallel_runs` launches."""

from dataclasses import dataclass

STEPS, SAVED = 20, 10

RECIPE = """
extends = "nam56r"
description = "every letter and an MTP depth, small; one GPU unless overridden"
unset = ["checkpoint.save", "checkpoint.load", "checkpoint.save_interval"]

[model]
pattern = "AEMEARME"
depth = 8
hidden_size = 512
ffn_hidden_size = 1024
num_attention_heads = 8
vocab_size = 257
make_vocab_size_divisible_by = 256  # times TP 2: the padding has a part in every loss
seq_length = 512

[moe]
num_experts = 8
moe_router_topk = 2
moe_ffn_hidden_size = 256
moe_shared_expert_intermediate_size = 256

[mamba3]
mamba_num_heads = 8
mamba_num_groups = 4

[m2rnn]
num_heads = 8

[parallel]
expert_model_parallel_size = 1
ddp_bucket_size = 200_000  # several buckets, or there is nothing to overlap

[optimizer]
lr = 2e-4
min_lr = 2e-5

[schedule]
train_iters = 20
micro_batch_size = 1
global_batch_size = 4
lr_warmup_iters = 5
eval_iters = 0
log_interval = 1
log_throughput = false

[data]
split = "100,0,0"
null_tokenizer_eod_id = 256
num_workers = 1

[checkpoint]
dist_ckpt_optim_fully_reshardable = true

[launch]
nproc_per_node = 1
"""
_TP = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
_PP = ("parallel.pipeline_model_parallel_size=2",)
_PP2 = (*_PP, "model.pattern=AEM|EARME")


_CAPTURED = ("backends.moe_dispatch=allgather", "launch.cuda_graph_impl=full_iteration")


def _ep(ranks: int) -> tuple[str, ...]:
    return (f"parallel.expert_model_parallel_size={ranks}",)


@dataclass(frozen=True)
class Run:
    """One launch. gpus: its ranks. start: the run whose checkpoint it loads, and the step of it;
    None trains from random weights. saves: it keeps a checkpoint of step SAVED. script:
    Megatron-LM's instead of megacpp_mcore.pretrain, from the checkout that MEGACPP_MEGATRON_LM
    names."""

    name: str
    gpus: int = 1
    overrides: tuple[str, ...] = ()
    start: tuple[str, int] | None = ("seed", 1)
    saves: bool = False
    script: str | None = None

    @property
    def resumes(self) -> bool:
        return self.start is not None and self.start[0] != "seed"

    @property
    def first_step(self) -> int:
        return SAVED + 1 if self.resumes else 1


SEED = Run("seed", overrides=("schedule.train_iters=1", "schedule.lr_warmup_iters=0"), start=None)
ONE = Run("one", saves=True)
# How far rounding alone takes the losses of one GPU apart: half the micro batches, twice as large;
# and M's and R's operators one by one, as tensor-parallel ranks have them.
_UNFUSED = ("backends.mamba3_core=reference", "backends.m2rnn_core=reference")
ROUNDING = (
    Run("one-mb2", overrides=("schedule.micro_batch_size=2",)),
    Run("one-unfused", overrides=_UNFUSED),
)
# What a machine that is lent for minutes must not miss comes first.
RUNS = (
    *ROUNDING,
    Run("dp2", 2, saves=True),
    Run("ep2", 2, _ep(2), saves=True),
    Run("ep2-captured", 2, (*_ep(2), *_CAPTURED)),
    Run("tp2", 2, _TP),
    Run("pp2", 2, _PP2),
    Run("dp4", 4, saves=True),
    Run("ep4", 4, _ep(4), saves=True),
    Run("ep4-captured", 4, (*_ep(4), *_CAPTURED)),
    Run("tp2-dp2", 4, _TP),
    Run("pp2-dp2", 4, _PP2),
    Run("tp2-ep2", 4, (*_TP, *_ep(2))),
    Run("pp2-vpp2", 2, (*_PP, "model.pattern=AE|ME|AR|ME")),
    Run("tp2-from-dp2", 2, _TP, start=("dp2", SAVED)),
    Run("ep4-from-ep2", 4, _ep(4), start=("ep2", SAVED)),
    Run("ep4-from-dp4", 4, _ep(4), start=("dp4", SAVED)),
    Run("dp4-from-ep4", 4, start=("ep4", SAVED)),
    Run("one-resumed", start=("one", SAVED)),
    Run("dp2-grouped-mm", 2, ("backends.moe_experts=grouped_mm",)),
)
# Megatron's own script wants three keys that docs/gpu.md names, and has Megatron's own heads: with
# both, a twin of ours gives the same bits.
_SCRIPT = (
    "precision.gradient_accumulation_fusion=false",
    "schedule.check_for_nan_in_loss_and_grad=true",
    "launch.cuda_graph_impl=none",
)
_HEADS = (*_SCRIPT, "backends.linear_cross_entropy=megatron")
TWINS = {
    Run("stock", overrides=_SCRIPT, script="pretrain_hybrid.py"):
        Run("megatron-heads", overrides=_HEADS),
    Run("stock-tp2", 2, (*_TP, *_SCRIPT), script="pretrain_hybrid.py"):
        Run("tp2-megatron-heads", 2, (*_TP, *_HEADS)),
}  # fmt: skip
STOCK = (*TWINS, *TWINS.values())
