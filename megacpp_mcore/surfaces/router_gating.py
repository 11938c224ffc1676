"""Surface `router_gating`: tokens [s, b, h], a router's weight [E, h] -> its logits [s, b, E]."""

from typing import TYPE_CHECKING

from megacpp_mcore.surfaces.backend import REFERENCE, Backend, Surface, reference
from megacpp_mcore.surfaces.support import KERNEL_TESTS, STACK_TESTS, always, cuda_only
from megacpp_mcore.surfaces.workload import Workload, config_of, dtype_of

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe

NAME = "router_gating"
FP32_OUTPUT = "fp32_output"
_COLUMNS = 8  # a bf16 product's rows are multiples of 16 bytes


def workload(device: str, config) -> Workload:
    """router_dtype: of the logits, None: the model's. experts: of the whole layer."""
    return Workload.of(
        device,
        dtype_of(config),
        router_dtype=config.moe_router_dtype,
        bias=config.add_bias_linear,
        hidden_size=config.hidden_size,
        experts=config.num_moe_experts,
    )


def of_recipe(recipe: "Recipe", device: str) -> Workload | None:
    return workload(device, config_of(recipe)) if "E" in recipe.plan.letters else None


def _asked(workload: Workload) -> str | None:
    """Why it is not the product that is asked for."""
    if workload.dtype != "bfloat16":
        return f"it multiplies bfloat16, not {workload.dtype}"
    if (dtype := workload.size("router_dtype")) != "fp32":
        return f"moe_router_dtype {dtype}: its logits are fp32"
    if workload.size("bias"):
        return "add_bias_linear: it has no bias"
    for name in ("hidden_size", "experts"):
        if workload.size(name) % _COLUMNS:
            return f"{name} {workload.size(name)}: it takes multiples of {_COLUMNS}"
    return None


def _fp32_output(workload: Workload) -> str | None:
    return cuda_only("cuBLAS, which writes fp32 from bf16 products, runs", workload) or _asked(
        workload
    )


_KERNELS = "megacpp_mcore.kernels.router_gating"
_facts = {
    "layout": "tokens [s, b, h], weight [experts, h] -> logits [s, b, experts]",
    "tests": ("tests/kernels/test_router_gating.py", *KERNEL_TESTS),
    "receipt": "router_gating.json",
}

SURFACE = Surface(
    NAME,
    (
        Backend(
            FP32_OUTPUT, f"{_KERNELS}.fp32_output:router_gating", _fp32_output,
            role="chosen",
            removes="three copies of all tokens in fp32: bf16 products are summed and written in "
            "fp32, and the fp32 gradient of the logits is three bf16 parts",
            dtypes="bf16; logits fp32", fallback=REFERENCE,
            exit_when="Megatron's own product no longer casts the tokens",
            skips={"float32": "it multiplies bf16"},
            **_facts,
        ),
        reference(
            "megatron.core.transformer.moe.router:TopKRouter", always,
            stand_in=f"{_KERNELS}:router_gating",
            removes="nothing: Megatron casts tokens and weight to fp32",
            dtypes="bf16, fp16, fp32; logits fp32, fp64 or the model's",
            layout=_facts["layout"], receipt=_facts["receipt"],
            tests=(*_facts["tests"], *STACK_TESTS),
        ),
    ),
    of_recipe,
    blocks="E",
    case=f"{_KERNELS}.case:RouterGatingCase",
)  # fmt: skip
