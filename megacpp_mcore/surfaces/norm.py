"""Surface `norm`: RMSNorm or LayerNorm of [..., h] over h, before the mixers and at the end."""

from functools import partial
from typing import TYPE_CHECKING

from megacpp_mcore.surfaces.backend import REFERENCE, Backend, Surface, reference
from megacpp_mcore.surfaces.support import (
    KERNEL_TESTS,
    STACK_TESTS,
    TE,
    TE_GRAPH,
    transformer_engine,
    triton,
)
from megacpp_mcore.surfaces.workload import Workload, config_of, dtype_of

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe

MAX_HIDDEN_SIZE = 16384  # of a row, which a program of our kernel holds


def workload(device: str, config) -> Workload:
    """normalization: "RMSNorm" or "LayerNorm"."""
    selective = config.recompute_granularity == "selective"
    return Workload.of(
        device,
        dtype_of(config),
        hidden_size=config.hidden_size,
        normalization=config.normalization,
        zero_centered_gamma=config.layernorm_zero_centered_gamma,
        fp32_residual=config.fp32_residual_connection,
        recomputed=selective and "layernorm" in (config.recompute_modules or ()),
    )


def of_recipe(recipe: "Recipe", device: str) -> Workload:
    return workload(device, config_of(recipe))


def _torch(workload: Workload) -> str | None:
    if workload.size("zero_centered_gamma"):
        return "layernorm_zero_centered_gamma: only Transformer Engine's norms have it"
    kind = workload.size("normalization", "RMSNorm")
    known = ("RMSNorm", "LayerNorm")
    return None if kind in known else f"normalization {kind}: torch has {' and '.join(known)}"


def _triton_kind(workload: Workload) -> str | None:
    """Why the fused RMSNorm is not the norm that is asked for."""
    if (kind := workload.size("normalization")) != "RMSNorm":
        return f"normalization {kind}: the kernel is an RMSNorm"
    if workload.size("fp32_residual"):
        return "fp32_residual_connection: the kernel's input, output and weight have one dtype"
    if workload.size("recomputed"):
        return (
            "recompute.layernorm: Megatron frees what a recomputed norm returns, and this one also "
            "returns the residual"
        )
    if (hidden := workload.size("hidden_size", 0)) > MAX_HIDDEN_SIZE:
        return f"hidden_size {hidden}: a program holds a row of at most {MAX_HIDDEN_SIZE}"
    return _torch(workload)


def _triton(workload: Workload) -> str | None:
    return triton(workload) or _triton_kind(workload)


def _triton_ruled_out(recipe: "Recipe", workload: Workload) -> str | None:
    if "D" in recipe.plan.megatron_pattern:
        return "DSA's indexer has a LayerNorm, this is an RMSNorm"
    return _triton_kind(workload)


_TESTS = ("tests/kernels/test_norm.py", *KERNEL_TESTS)
_backend = partial(Backend, layout="[..., h], normalised over h", receipt="norm.json", tests=_TESTS)

TRITON = "triton"

SURFACE = Surface(
    "norm",
    (
        _backend(
            TRITON, "megacpp_mcore.layers.norm:FusedRMSNorm", _triton,
            ruled_out=_triton_ruled_out,
            role="chosen",
            removes="the addition of the residual's gradient, which the backward kernel reads with "
            "the norm's own, and a second reading of x and dy for the weight's gradient",
            dtypes="bf16, fp16, fp32; computed in fp32, rounded once", fallback=TE,
            exit_when="Transformer Engine's fused residual norm is as fast over a whole step",
        ),
        _backend(
            TE, "megatron.core.extensions.transformer_engine:TENorm", transformer_engine,
            removes="a read and a write of the activations between the square sum and the scaling",
            dtypes="bf16, fp16, fp32; sums in fp32", fallback=REFERENCE,
            exit_when="no LayerNorm and no zero-centred weight is asked for",
            before={
                REFERENCE: "it is reached where triton is not, for a LayerNorm, an fp32 residual "
                "or a recomputed norm, and of these the receipt has none",
            },
            skips={
                **TE_GRAPH, "zero_size": "TE 2.17.1 asserts that a norm's output holds data",
            },
        ),
        reference(
            "megacpp_mcore.layers.norm:TorchNorm", _torch,
            removes="nothing: torch.nn.RMSNorm and LayerNorm, sequence parallelism added",
            layout="[..., h], normalised over h",
            dtypes="bf16, fp16, fp32", receipt="norm.json", tests=(*_TESTS, *STACK_TESTS),
        ),
    ),
    of_recipe,
    blocks="AEMR",
    case="megacpp_mcore.kernels.norm.case:NormCase",
)  # fmt: skip
