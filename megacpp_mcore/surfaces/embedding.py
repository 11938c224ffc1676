"""Surface `embedding`: token ids [b, s], a weight [V, h] -> its rows [s, b, h]."""

from typing import TYPE_CHECKING

from megacpp_mcore.surfaces.backend import REFERENCE, Backend, Surface, reference
from megacpp_mcore.surfaces.support import (
    KERNEL_TESTS,
    always,
    cuda_only,
    import_reason,
    whatever_the_machine,
)
from megacpp_mcore.surfaces.workload import Workload, config_of, dtype_of

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe

TRITON = "triton"
_DTYPES = ("bfloat16", "float32")


def workload(device: str, config) -> Workload:
    """weight_shards: ranks over which Megatron's generalized tensor parallelism has the weight."""
    return Workload.of(
        device,
        dtype_of(config),
        hidden_size=config.hidden_size,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        sequence_parallel=config.sequence_parallel,
        weight_shards=getattr(config, "gtp_weight_remat_size", 1),
    )


def of_recipe(recipe: "Recipe", device: str) -> Workload:
    return workload(device, config_of(recipe))


def _whole_weight(workload: Workload) -> str | None:
    """Why the ids are not looked up in one whole weight, into whole rows."""
    for name in ("tensor_model_parallel_size", "weight_shards"):
        if (ranks := workload.size(name, 1)) != 1:
            return f"{name} {ranks}: it takes the whole vocabulary on every rank"
    if workload.size("sequence_parallel"):
        return "sequence_parallel: it gives every rank the whole sequence"
    if workload.dtype not in _DTYPES:
        return f"it takes {' and '.join(_DTYPES)}, not {workload.dtype}"
    return None


def _triton(workload: Workload) -> str | None:
    reason = cuda_only("a Triton kernel runs", workload) or _whole_weight(workload)
    return reason or import_reason("triton")


_KERNELS = "megacpp_mcore.kernels.embedding"
_facts = {
    "layout": "ids [b, s], weight [V, h] -> [s, b, h]",
    "tests": (
        "tests/kernels/test_embedding.py", "tests/layers/test_embedding_layer.py",
        "tests/training/test_main_grads.py",
        "tests/gpu/test_embedding_gpu.py", *KERNEL_TESTS,
    ),
    "receipt": "embedding.json",
}  # fmt: skip

SURFACE = Surface(
    "embedding",
    (
        Backend(
            TRITON, f"{_KERNELS}.triton:embedding", _triton,
            ruled_out=whatever_the_machine(_whole_weight),
            role="chosen",
            removes="the transposed copies of the rows and of their gradient, and the dense "
            "gradient of the weight: zeros, the sums, their addition where MTP embeds again, and "
            "the pass that adds it to main_grad. The sums are added to main_grad at once, in fp32",
            dtypes="bf16, fp32; gradients summed in fp32, and added to main_grad without a "
            "rounding between",
            fallback=REFERENCE,
            exit_when="Megatron adds the rows' gradients to main_grad itself",
            **_facts,
        ),
        reference(
            "megatron.core.tensor_parallel.layers:VocabParallelEmbedding", always,
            stand_in=f"{_KERNELS}:embedding",
            removes="nothing: Megatron's own module, and the copy to its layout",
            dtypes="bf16, fp16, fp32, fp64",
            **_facts,
        ),
    ),
    of_recipe,
    outside="the embedding",
    case=f"{_KERNELS}.case:EmbeddingCase",
)  # fmt: skip
