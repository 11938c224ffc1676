"""Surface `linear_cross_entropy`: output layer and loss of every token, main head and MTP.

Hidden [s, b, h], weight [V, h], labels [s, b] -> losses [s, b], or their weighted sum.
"""

from typing import TYPE_CHECKING

from megacpp_mcore.surfaces.backend import REFERENCE, Backend, Surface, reference
from megacpp_mcore.surfaces.figures import Figure
from megacpp_mcore.surfaces.support import KERNEL_TESTS, always, cuda_only, import_reason
from megacpp_mcore.surfaces.workload import Workload, config_of, dtype_of

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe


def workload(device: str, config, vocab_size: int) -> Workload:
    """vocab_size: padded, of all tensor-parallel ranks."""
    return Workload.of(
        device,
        dtype_of(config),
        hidden_size=config.hidden_size,
        vocab_size=vocab_size,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
    )


def of_recipe(recipe: "Recipe", device: str) -> Workload:
    return workload(device, config_of(recipe), recipe.padded_vocab_size)


def _chunked(workload: Workload) -> str | None:
    """Our chunks of logits with a Triton kernel."""
    if reason := cuda_only("a Triton kernel runs", workload):
        return reason
    if workload.dtype not in ("bfloat16", "float32"):
        return (
            f"it takes bfloat16 and float32, not {workload.dtype}: in float16 the gradients of "
            "unlikely classes would be rounded to 0"
        )
    return import_reason("triton")


def _megatron(workload: Workload) -> str | None:
    if workload.device == "cuda":
        return None
    return f"on {workload.device} the reference computes the same logits"


def _ligers_mean(workload: Workload) -> str | None:
    reason = cuda_only("Liger's kernels run", workload)
    return reason or import_reason("liger_kernel.ops.fused_linear_cross_entropy")


CHUNKED = "chunked"
_KERNELS = "megacpp_mcore.kernels.linear_cross_entropy"
_RECEIPT = "linear_cross_entropy-mean.json"
_LAYOUT = "hidden [s, b, h], weight [V, h], labels [s, b] -> losses [s, b]"
_TESTS = (
    "tests/kernels/test_linear_cross_entropy.py", "tests/gpu/test_linear_cross_entropy_gpu.py",
    *KERNEL_TESTS,
)  # fmt: skip
_SPLIT_TESTS = (*_TESTS, "tests/kernels/test_linear_cross_entropy_parallel.py")

# The model's forward pass stays as Megatron has it, logits included.
MEGATRON = Backend(
    "megatron", "megatron.core.models.hybrid.hybrid_model:HybridModel", _megatron,
    stand_in=f"{_KERNELS}.megatron:MEGATRON",
    removes="nothing: Megatron's own heads, with logits and a float32 softmax of every token and "
    "MTP depth in memory. They serve where chunked cannot (fp16), and models of Megatron's own "
    "class have no others",
    layout=_LAYOUT,
    dtypes="bf16, fp16, fp32; the sum and the losses in fp32",
    fallback=REFERENCE,
    tests=_TESTS,
    receipt=_RECEIPT,
    exit_when="Megatron's model takes its heads from a spec",
)  # fmt: skip
# The best of other packages, for weights that are all the same; a bench's yardstick alone.
LIGERS_MEAN = Backend("liger_mean", f"{_KERNELS}.liger:MEAN", _ligers_mean)

SURFACE = Surface(
    "linear_cross_entropy",
    (
        Backend(
            CHUNKED, f"{_KERNELS}.chunked:CHUNKED", _chunked,
            role="chosen",
            removes="the logits, but for a buffer of 256 MiB; with weights known beforehand they "
            "are computed once, 6 T h V operations. Its weight's gradient is added to main_grad in "
            "one pass, in fp32",
            layout="hidden [..., h], weight [V / tp, h], labels [...] -> losses [...], or their "
            "weighted sum; a vocabulary over tensor-parallel ranks",
            dtypes="bf16, fp32; softmax, losses and the sum of the weight's gradient in fp32",
            fallback="megatron", tests=_SPLIT_TESTS, receipt=_RECEIPT,
            figures=(Figure(_RECEIPT, LIGERS_MEAN.name, "Liger's mean"),),
            exit_when="a package on the pinned stack takes a weight a token and a split "
            "vocabulary, and is as fast",
        ),
        MEGATRON,
        reference(
            f"{_KERNELS}:REFERENCE", always,
            removes="nothing: logits of every token, then their cross entropy",
            layout=_LAYOUT,
            dtypes="bf16, fp16, fp32, fp64; the sum and the losses in fp32 or wider",
            tests=_SPLIT_TESTS, receipt=_RECEIPT,
        ),
    ),
    of_recipe,
    case="megacpp_mcore.kernels.linear_cross_entropy.case:LinearCrossEntropyCase",
)  # fmt: skip
