"""`megacpp bench`: how fast an operator's backends, one layer or a whole model are here.

`runner.run` is the bench; `operator`, `layer` and `model` say how to build and call what is timed.
It runs in one process on one device, the model unsharded, and returns a bench receipt
(`megacpp_mcore.receipts`), which `megacpp report` shows and compares.
"""

from collections.abc import Sequence

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.recipe import Recipe, load_recipe
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


class BenchError(MegacppError):
    """A bench that cannot be made as asked."""


class BenchFailure(BenchError):
    """A bench in which a backend failed or was wrong, or that timed nothing."""

    exit_status = 1


def load_for_bench(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe for one process: one micro batch a step, no parallelism, no multi-host dispatcher.

    Calls are eager and there is no main gradient: a captured step and gradients that are
    accumulated inside the products are parts of Megatron's loop.

    Raises RecipeError as `load_recipe` does.
    """
    asked = load_recipe(name, overrides)
    ours = [*_ONE_RANK, f"schedule.global_batch_size={asked.schedule.micro_batch_size}"]
    if asked.backends.get(moe_dispatch.NAME) not in (None, *moe_dispatch.ON_ONE_RANK):
        ours.append(f"backends.{moe_dispatch.NAME}=auto")
    if asked.moe.moe_token_dispatcher_type == "flex":
        ours.append("moe.moe_token_dispatcher_type=alltoall")
    if asked.launch.device == "cuda":
        ours += ["launch.cuda_graph_impl=none", "precision.gradient_accumulation_fusion=false"]
    return load_recipe(name, [*ours, *overrides])
