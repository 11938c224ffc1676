"""Rules about CUDA graphs: what a whole captured step cannot hold, and per-layer modules."""

from dataclasses import replace
from typing import TYPE_CHECKING

from megacpp_mcore.recipe.refusal import Rules, shown
from megacpp_mcore.surfaces.moe_dispatch import ON_ONE_RANK
from megacpp_mcore.surfaces.moe_experts import COUNTS_ON_DEVICE

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe

IMPL, _MODULES = "launch.cuda_graph_impl", "launch.cuda_graph_modules"
AUTO = "auto"


def was_auto(recipe: "Recipe") -> bool:
    """Whether the recipe left it to us whether the step is captured. Its origin says why not."""
    return recipe.origins.get(IMPL, "").startswith(AUTO)


def replaced(recipe: "Recipe", impl: str, origin: str = AUTO) -> "Recipe":
    """The recipe with the cuda_graph_impl that `auto` stands for."""
    launch = replace(recipe.launch, cuda_graph_impl=impl)
    return replace(recipe, launch=launch, origins={**recipe.origins, IMPL: origin})


def check(r: Rules) -> None:
    modules = r[_MODULES] or ()
    if r[IMPL] == "none":
        r.refuse(modules, _MODULES, 'is read with a launch.cuda_graph_impl other than "none" only')
        return
    r.refuse(
        modules and r[IMPL] == "full_iteration",
        _MODULES,
        f"must be left out with {r.told(IMPL)}, which captures every module",
    )
    r.refuse(
        "moe_preprocess" in modules and "moe_router" not in modules,
        _MODULES,
        "may name moe_preprocess only with moe_router",
    )
    if r[IMPL] == "full_iteration":
        _whole_step(r)


def _whole_step(r: Rules) -> None:
    """The host has no part in a captured step: sizes are known before, nothing is read back."""
    one = ("parallel.expert_model_parallel_size", "parallel.pipeline_model_parallel_size")
    wanted = dict.fromkeys(one, 1) | {
        "data.dataloader_inter_document_masking": False,
        "moe.moe_expert_capacity_factor": None,
        "precision.fp8": None,
        "schedule.check_for_nan_in_loss_and_grad": False,
    }
    if r.has("E"):
        etp = r["parallel.expert_tensor_parallel_size"]
        tp = r["parallel.tensor_model_parallel_size"]
        r.refuse(
            (etp or tp) > 1,
            "parallel.expert_tensor_parallel_size",
            f"must be 1 with {r.told(IMPL)}: {_why('parallel.expert_tensor_parallel_size')}",
        )
    for key, value in wanted.items():
        r.refuse(
            r[key] != value,
            key,
            f"must be {'left out' if value is None else shown(value)} with {r.told(IMPL)}: "
            f"{_why(key)}",
        )
    dispatcher = "backends.moe_dispatch"
    r.refuse(
        r.has("E") and r[dispatcher] not in (None, "auto", *ON_ONE_RANK),
        dispatcher,
        f"must be {', '.join(map(shown, ON_ONE_RANK))} or left out with {r.told(IMPL)}: with the "
        "others the host reads how many tokens each rank or expert gets",
    )
    experts = "backends.moe_experts"
    r.refuse(
        r.has("E") and r[experts] not in (None, "auto", *COUNTS_ON_DEVICE),
        experts,
        f"must be {', '.join(map(shown, COUNTS_ON_DEVICE))} or left out with {r.told(IMPL)}: the "
        "others read the tokens of each expert on the host",
    )
    r.refuse(
        not r["launch.cuda_graph_warmup_steps"],
        "launch.cuda_graph_warmup_steps",
        f"must be at least 1 with {r.told(IMPL)}: kernels are compiled in the steps before",
    )


def _why(key: str) -> str:
    return {
        "parallel.pipeline_model_parallel_size": "a captured step over pipeline stages is untested",
        "data.dataloader_inter_document_masking": "the bounds of packed documents differ from "
        "batch to batch, and the host reads them",
        "schedule.check_for_nan_in_loss_and_grad": "Megatron's check reads every bucket of "
        "gradients on the host; our entry checks loss and gradient norm after each step",
        "precision.fp8": "Transformer Engine's FP8 experts read their counts on the host",
    }.get(key, "the host has to read how many tokens each rank or expert gets")
