"""Surface `router_topk`: a router's logits [t, E] -> weights, map and balance of the load."""

from typing import TYPE_CHECKING

from megacpp_mcore.surfaces.backend import REFERENCE, Backend, Figure, Surface, reference
from megacpp_mcore.surfaces.support import KERNEL_TESTS, STACK_TESTS, always, triton
from megacpp_mcore.surfaces.workload import Workload, config_of

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe

NAME = "router_topk"
TRITON = "triton"
MOST_EXPERTS = 16  # with more nobody has measured that it is faster


def workload(device: str, config) -> Workload:
    """dtype: of the logits. balancing: Megatron's moe_router_load_balancing_type, as a tuple."""
    types = config.moe_router_load_balancing_type
    dtype = {"fp32": "float32", "fp64": "float64"}.get(config.moe_router_dtype or "", "model")
    return Workload.of(
        device,
        dtype,
        experts=config.num_moe_experts,
        fusion=config.moe_router_fusion,
        score_function=config.moe_router_score_function,
        groups=config.moe_router_num_groups,
        balancing=(types,) if isinstance(types, str) else tuple(types),
        capacity_factor=config.moe_expert_capacity_factor,
        replay=config.moe_enable_routing_replay,
        ranks=config.tensor_model_parallel_size * config.context_parallel_size,
    )


def of_recipe(recipe: "Recipe", device: str) -> Workload | None:
    return workload(device, config_of(recipe)) if "E" in recipe.plan.letters else None


def _asked(workload: Workload) -> str | None:
    """Why it is not the choice that is asked for."""
    size = workload.size
    if not size("fusion"):
        return "moe_router_fusion = false: Megatron's steps are asked for, one by one"
    if (function := size("score_function")) != "sigmoid":
        return f"moe_router_score_function {function}: its scores are sigmoids"
    if workload.dtype != "float32":
        return "moe_router_dtype: its logits are fp32"
    if size("groups"):
        return "moe_router_num_groups: it chooses among all experts"
    if other := sorted(set(size("balancing")) - {"none", "aux_loss"}):
        return f"moe_router_load_balancing_type {other[0]}: it has aux_loss alone"
    if size("capacity_factor") is not None:
        return "moe_expert_capacity_factor: it drops no token"
    if size("replay"):
        return "moe_enable_routing_replay: it records no choice"
    if (ranks := size("ranks")) > 1:
        return f"tensor times context parallelism of {ranks}: it counts one rank's tokens"
    if (experts := size("experts")) > MOST_EXPERTS:
        return f"{experts} experts: it has been measured with up to {MOST_EXPERTS}"
    return None


def _triton(workload: Workload) -> str | None:
    return triton(workload) or _asked(workload)


_KERNELS = "megacpp_mcore.kernels.router_topk"
_LAYER = "layer-router.json"
_facts = {
    "layout": "logits [t, experts], bias [experts] -> weights and map [t, experts], balance []",
    "tests": ("tests/kernels/test_router_topk.py", *KERNEL_TESTS),
    "receipt": _LAYER,
}

SURFACE = Surface(
    NAME,
    (
        Backend(
            TRITON, f"{_KERNELS}.fused:router_topk", _triton,
            role="chosen",
            removes="a dozen launches: scores, choice, weights, counts and balance are two "
            "kernels, and their gradient is one. A batch with a mask of padding takes Megatron's "
            "steps",
            dtypes="fp32", fallback=REFERENCE,
            exit_when="Transformer Engine's fused router does it in as few",
            figures=(Figure(_LAYER, "recipe", "layer E"),),
            **_facts,
        ),
        reference(
            "megatron.core.transformer.moe.router:TopKRouter", always,
            stand_in=f"{_KERNELS}:router_topk",
            removes="nothing: Megatron's steps; with moe_router_fusion Transformer Engine's "
            "kernels for some of them",
            dtypes="fp32, fp64 or the model's",
            layout=_facts["layout"], receipt=_LAYER,
            figures=(Figure(_LAYER, "router_topk=reference", "layer E"),),
            tests=(*_facts["tests"], *STACK_TESTS),
        ),
    ),
    of_recipe,
    blocks="E",
    case=f"{_KERNELS}.case:RouterTopkCase",
)  # fmt: skip
