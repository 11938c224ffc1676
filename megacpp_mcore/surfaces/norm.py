"""Surface `norm`: RMSNorm or LayerNorm of [..., h] over h, before the mixers and at the end."""

from functools import partial
from typing import TYPE_CHECKING

from megacpp_mcore.surfaces.backend import REFERENCE, Backend, NotCarried, Surface, reference
from megacpp_mcore.surfaces.support import (
    KERNEL_TESTS,
    STACK_TESTS,
    TE,
    TE_GRAPH,
    cuda_only,
    import_reason,
    transformer_engine,
)
from megacpp_mcore.surfaces.workload import Workload, config_of, dtype_of

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe


def workload(device: str, config) -> Workload:
    """normalization: "RMSNorm" or "LayerNorm"."""
    return Workload.of(
        device,
        dtype_of(config),
        normalization=config.normalization,
        zero_centered_gamma=config.layernorm_zero_centered_gamma,
        fp32_residual=config.fp32_residual_connection,
    )


def of_recipe(recipe: "Recipe", device: str) -> Workload:
    return workload(device, config_of(recipe))


def _torch(workload: Workload) -> str | None:
    if workload.size("zero_centered_gamma"):
        return "layernorm_zero_centered_gamma: only Transformer Engine's norms have it"
    kind = workload.size("normalization", "RMSNorm")
    known = ("RMSNorm", "LayerNorm")
    return None if kind in known else f"normalization {kind}: torch has {' and '.join(known)}"


def _liger_kind(workload: Workload) -> str | None:
    """Why Liger's RMSNorm is not the norm that is asked for."""
    if (kind := workload.size("normalization")) != "RMSNorm":
        return f"normalization {kind}: Liger's is an RMSNorm"
    if workload.size("fp32_residual"):
        return "fp32_residual_connection: Liger's norm returns float32 there, which no linear takes"
    return _torch(workload)


def _liger(workload: Workload) -> str | None:
    reason = cuda_only("Liger's kernels run", workload) or _liger_kind(workload)
    return reason or import_reason("liger_kernel.transformers.rms_norm")


def _liger_ruled_out(recipe: "Recipe", workload: Workload) -> str | None:
    if "D" in recipe.plan.megatron_pattern:
        return "DSA's indexer has a LayerNorm, Liger's is an RMSNorm"
    return _liger_kind(workload)


_TESTS = ("tests/kernels/test_norm.py", *KERNEL_TESTS)
_backend = partial(Backend, layout="[..., h], normalised over h", receipt="norm.json", tests=_TESTS)

SURFACE = Surface(
    "norm",
    (
        _backend(
            TE, "megacpp_mcore.layers.parts:te_norm", transformer_engine,
            role="chosen", keep="keep",
            removes="a read and a write of the activations between the square sum and the scaling",
            dtypes="bf16, fp16, fp32; sums in fp32", fallback="liger",
            exit_when="torch's RMSNorm is within the noise of it over a whole step",
            skips={
                **TE_GRAPH, "zero_size": "TE 2.17.1 asserts that a norm's output holds data",
            },
        ),
        _backend(
            "liger", "megacpp_mcore.layers.parts:liger_norm", _liger,
            ruled_out=_liger_ruled_out,
            removes="the same round trip as te, without te; RMSNorm only",
            dtypes="bf16, fp16, fp32; computed in fp32", fallback=REFERENCE,
            exit_when="te or torch is as fast in the bench of the surface",
        ),
        reference(
            "megacpp_mcore.layers.parts:torch_norm", _torch,
            removes="nothing: torch.nn.RMSNorm and LayerNorm, sequence parallelism added",
            layout="[..., h], normalised over h",
            dtypes="bf16, fp16, fp32", receipt="norm.json", tests=(*_TESTS, *STACK_TESTS),
        ),
    ),
    of_recipe,
    blocks="AEMR",
    case="megacpp_mcore.kernels.norm.case:NormCase",
    not_carried=(
        NotCarried(
            name="own_triton", role="deferred",
            removes="the same round trip that te and Liger remove already",
            fallback=TE,
            why="TE, Liger and torch each have one that a far larger user base tests; one of our "
            "own removes no memory traffic that theirs do not",
            exit_when="a norm fused with a neighbour that no package offers saves step time in a "
            "run",
        ),
    ),
)  # fmt: skip
