"""Overrides that make a recipe one process's, and its model one layer. Nothing imports torch."""

from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import moe_dispatch

# What a run over several ranks has and one process cannot.
_ONE_RANK = [
    "parallel.tensor_model_parallel_size=1", "parallel.pipeline_model_parallel_size=1",
    "parallel.virtual_pipeline_model_parallel_size=null", "parallel.context_parallel_size=1",
    "parallel.expert_model_parallel_size=1", "parallel.expert_tensor_parallel_size=null",
    "parallel.sequence_parallel=false", "parallel.tp_comm_overlap=false",
    "parallel.num_distributed_optimizer_instances=1", "parallel.overlap_grad_reduce=false",
    "parallel.overlap_param_gather=false", "launch.nnodes=1", "launch.nproc_per_node=1",
]  # fmt: skip


def one_rank(asked: Recipe) -> list[str]:
    """One micro batch a step, no parallelism, no multi-host dispatcher, calls that are eager: a
    captured step is a part of Megatron's loop."""
    ours = [*_ONE_RANK, f"schedule.global_batch_size={asked.schedule.micro_batch_size}"]
    if asked.backends.get(moe_dispatch.NAME) not in (None, *moe_dispatch.ON_ONE_RANK):
        ours.append(f"backends.{moe_dispatch.NAME}=auto")
    if asked.moe.moe_token_dispatcher_type == "flex":
        ours.append("moe.moe_token_dispatcher_type=alltoall")
    if asked.launch.device == "cuda":
        ours.append("launch.cuda_graph_impl=none")
    return ours


def one_layer(letter: str) -> list[str]:
    """A model of one layer, without MTP."""
    return [
        f"model.pattern={letter}", "model.depth=1", "mtp.mtp_num_layers=0", "mtp.pattern=",
        "parallel.expert_model_parallel_size=1",
    ]  # fmt: skip
