"""`megacpp bench`: how fast the backends of a surface are here, and a whole model.

`bench_surface` times every usable backend of one surface side by side on the sizes of a recipe,
`bench_model` the recipe's model. Both run in one process on one device, the model unsharded, and
return a bench receipt (`megacpp_mcore.receipts`), which `megacpp report` shows and compares.
"""

import importlib.util
import sys
from collections.abc import Sequence

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.recipe import Recipe, load_recipe

# What a run over several ranks has and one process cannot.
_ONE_RANK = [
    "parallel.tensor_model_parallel_size=1", "parallel.pipeline_model_parallel_size=1",
    "parallel.virtual_pipeline_model_parallel_size=null", "parallel.context_parallel_size=1",
    "parallel.expert_model_parallel_size=1", "parallel.expert_tensor_parallel_size=null",
    "parallel.sequence_parallel=false", "parallel.tp_comm_overlap=false",
    "parallel.num_distributed_optimizer_instances=1", "parallel.overlap_grad_reduce=false",
    "parallel.overlap_param_gather=false", "launch.nnodes=1", "launch.nproc_per_node=1",
]  # fmt: skip
ONE_RANK_NOTE = "one process: the recipe's model on one device, without any parallelism"
TOPOLOGY = {"world_size": 1, "tp": 1, "pp": 1, "ep": 1, "cp": 1, "dp": 1}


class BenchError(MegacppError):
    """A bench that cannot be made as asked."""


class BenchFailure(BenchError):
    """A bench in which a backend failed or was wrong, or that timed nothing."""

    exit_status = 1


def to_stderr(words: str) -> None:
    """What is being done: the page on stdout is the receipt's."""
    print(words, file=sys.stderr, flush=True)


def load_for_bench(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe for one process: one micro batch a step, no parallelism, no multi-host dispatcher.

    Raises RecipeError as `load_recipe` does.
    """
    asked = load_recipe(name, overrides)
    ours = [*_ONE_RANK, f"schedule.global_batch_size={asked.schedule.micro_batch_size}"]
    if asked.moe.moe_token_dispatcher_type == "flex":
        ours.append("moe.moe_token_dispatcher_type=alltoall")
    return load_recipe(name, [*ours, *overrides])


def check_receipts() -> None:
    """Refuse before anything is timed where a receipt could not be validated in the end."""
    if importlib.util.find_spec("jsonschema") is None:
        raise BenchError(
            "jsonschema is not installed, which validates the receipt; install it (it is one of "
            "megacpp-mcore's dependencies: `pip install 'jsonschema>=4.23'`)"
        )
