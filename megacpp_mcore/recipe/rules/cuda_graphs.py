"""Rules about CUDA graphs: what a whole captured step cannot hold, and per-layer modules."""

from dataclasses import replace
from typing import TYPE_CHECKING

from megacpp_mcore.recipe.refusal import Rules, shown
from megacpp_mcore.recipe.rules import fp8_step
from megacpp_mcore.surfaces.moe_dispatch import ALLGATHER, ON_ONE_RANK
from megacpp_mcore.surfaces.moe_experts import COUNTS_ON_DEVICE, FUSED
from megacpp_mcore.surfaces.registry import REGISTRY

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
        f"must be left out with {r.text(IMPL)}, which captures every module",
    )
    r.refuse(
        "moe_preprocess" in modules and "moe_router" not in modules,
        _MODULES,
        "may name moe_preprocess only with moe_router",
    )
    if r[IMPL] == "full_iteration":
        _whole_step(r)


_COUNTED = "the host has to read how many tokens each rank or expert gets"
_CAPTURED = {  # key -> its value in a captured step, and why
    "parallel.pipeline_model_parallel_size": (
        1, "a captured step over pipeline stages is untested",
    ),
    "data.dataloader_inter_document_masking": (
        False,
        "the number of packed documents differs from batch to batch, and the host sizes "
        "launches by it",
    ),
    "moe.moe_expert_capacity_factor": (None, _COUNTED),
    "schedule.check_for_nan_in_loss_and_grad": (
        False,
        "Megatron's check reads every bucket of gradients on the host; our entry checks loss and "
        "gradient norm after each step",
    ),
}  # fmt: skip


def _whole_step(r: Rules) -> None:
    """The host has no part in a captured step: sizes are known before, nothing is read back."""
    captured = f"with {r.text(IMPL)}"
    if r.has("E"):
        _experts(r, captured)
    for key, (value, why) in _CAPTURED.items():
        r.must_be(key, value, f"{captured}: {why}")
    fp8 = r["precision.fp8"] is not None
    if fp8:
        fp8_step.check(r, captured)
    if r.has("E") and (not fp8 or r["backends.moe_experts"] == FUSED):
        _chosen_experts(r)
    r.refuse(
        not r["launch.cuda_graph_warmup_steps"],
        "launch.cuda_graph_warmup_steps",
        f"must be at least 1 {captured}: kernels are compiled in the steps before",
    )


def _experts(r: Rules, captured: str) -> None:
    """Over ranks our all-gather alone exchanges tokens without counts, for experts that take them
    in their order."""
    over_ranks = r["parallel.expert_model_parallel_size"] > 1
    r.refuse(
        over_ranks and r["backends.moe_dispatch"] != ALLGATHER,
        "parallel.expert_model_parallel_size",
        f"must be 1 {captured}: {_COUNTED}, unless backends.moe_dispatch = {shown(ALLGATHER)}",
    )
    overlap = "moe.moe_shared_expert_overlap"
    r.refuse(over_ranks and r[overlap], overlap, f"must be false {captured}: {_COUNTED}")
    etp = "parallel.expert_tensor_parallel_size"
    size = r[etp] or r["parallel.tensor_model_parallel_size"]
    r.refuse(size > 1, etp, f"must be 1 {captured}: {_COUNTED}")
    allowed = {"backends.moe_experts": _counting(r)}
    if not over_ranks:
        allowed["backends.moe_dispatch"] = ON_ONE_RANK
    for key, names in allowed.items():
        r.refuse(
            r[key] not in (None, "auto", *names),
            key,
            f"must be {', '.join(map(shown, names))} or left out {captured}: the others "
            "read the tokens of each expert on the host",
        )


def _counting(r: Rules) -> tuple[str, ...]:
    """The experts that a captured step can hold."""
    return (FUSED,) if r["parallel.expert_model_parallel_size"] > 1 else COUNTS_ON_DEVICE


def _chosen_experts(r: Rules) -> None:
    """Where the model rules all of them out, the layers would choose others."""
    experts = REGISTRY["moe_experts"]
    workload = experts.workload(r.recipe, r["launch.device"])
    reasons = [experts.backend(name).ruled_out(r.recipe, workload) for name in _counting(r)]
    r.refuse(
        all(reasons),
        IMPL,
        'must be "none": of the experts that read the tokens of each expert on the device '
        f"{' and '.join(_counting(r))} cannot serve: {reasons[0]}",
    )
