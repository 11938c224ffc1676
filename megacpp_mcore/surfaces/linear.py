"""Surface `linear`: the linears of every layer, [s, b, in] -> [s, b, out], weight [out, in]."""

from typing import TYPE_CHECKING

from megacpp_mcore.surfaces.backend import Backend, Surface, reference
from megacpp_mcore.surfaces.support import (
    DISPATCH_TESTS,
    STACK_TESTS,
    TE,
    in_the_models_dtype,
    transformer_engine,
    whatever_the_machine,
)
from megacpp_mcore.surfaces.workload import Workload, config_of, dtype_of

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe


def workload(device: str, config) -> Workload:
    """The linears of a stack spec, asked again when the stack is built."""
    return Workload.of(device, dtype_of(config), fp8=config.fp8)


def of_recipe(recipe: "Recipe", device: str) -> Workload:
    return workload(device, config_of(recipe))


_facts = {"layout": "[s, b, in] -> [s, b, out], weight [out, in]"}

SURFACE = Surface(
    "linear",
    (
        Backend(
            TE, "megacpp_mcore.layers.parts:te_linears", transformer_engine,
            role="chosen",
            removes="FP8 casts outside the GEMM, and tensor-parallel communication that does not "
            "overlap it; in bf16 on one GPU nothing, both call cuBLAS",
            dtypes="bf16, fp16, fp32; fp8 inside", fallback="reference",
            tests=(*DISPATCH_TESTS, "tests/layers/test_precision.py"),
            no_receipt="whole runs in FP8 and in bf16 are compared in docs/performance.md; in bf16 "
            "there is nothing to compare",
            exit_when="torch's linears train NAM56R at the same tokens/s, FP8 included",
            **_facts,
        ),
        reference(
            "megacpp_mcore.layers.parts:megatron_linears", in_the_models_dtype,
            ruled_out=whatever_the_machine(in_the_models_dtype),
            removes="nothing: Megatron's own linears in plain torch",
            dtypes="bf16, fp16, fp32", tests=STACK_TESTS,
            no_receipt="benched only inside the whole model so far",
            **_facts,
        ),
    ),
    of_recipe,
    blocks="AEMR",
)  # fmt: skip
