"""Surface `m2rnn`: the nonlinear recurrence of an R block."""

from typing import TYPE_CHECKING

from megacpp_mcore.surfaces.backend import REFERENCE, Backend, Surface, reference
from megacpp_mcore.surfaces.support import SCAN_TESTS, always, cuda_only
from megacpp_mcore.surfaces.workload import Workload, config_of, dtype_of

if TYPE_CHECKING:
    from megacpp_mcore.hybrid.block_settings import M2RNNSettings
    from megacpp_mcore.hybrid.m2rnn_layout import M2RNNLayout
    from megacpp_mcore.recipe import Recipe


def workload(device: str, config, layout: "M2RNNLayout", settings: "M2RNNSettings") -> Workload:
    """heads: of one tensor-parallel rank."""
    return Workload.of(
        device,
        dtype_of(config),
        heads=layout.local_heads,
        k_head_dim=layout.k_dim,
        v_head_dim=layout.v_dim,
        chunk_size=settings.chunk_size,
    )


def of_recipe(recipe: "Recipe", device: str) -> Workload | None:
    if "R" not in recipe.plan.letters:
        return None
    from megacpp_mcore.hybrid.m2rnn_layout import M2RNNLayout

    config = config_of(recipe)
    layout = M2RNNLayout.of(config, recipe.m2rnn, recipe.parallel.tensor_model_parallel_size)
    return workload(device, config, layout, recipe.m2rnn)


def _cuda(workload: Workload) -> str | None:
    if reason := cuda_only("a CUDA kernel runs", workload):
        return reason
    from megacpp_mcore.kernels.m2rnn import cuda, launch

    sizes = (workload.size(name) for name in ("k_head_dim", "v_head_dim", "chunk_size"))
    return cuda.sizes_reason(workload.dtype, *sizes) or launch.LIBRARY.reason()


CUDA = "cuda"
BUILDS = "megacpp_mcore.kernels.m2rnn.launch:LIBRARY"
_LAYOUT = "q, k (B, S, 1 or H, K), v (B, S, H, V) -> (B, S, H, V), state (B, H, K, V)"

SURFACE = Surface(
    "m2rnn",
    (
        Backend(
            CUDA, "megacpp_mcore.kernels.m2rnn.cuda:m2rnn", _cuda,
            role="chosen",
            removes="the launches of 4096 dependent steps: one forward, two backward, the state in "
            "registers, the backward pass's states and sums at the same time as its recurrence; at "
            "44 heads",
            layout=f"{_LAYOUT}; V 16, K a multiple of 32",
            dtypes="bf16, fp16: h to 11 bits where it is multiplied, tanh 2^-16 (2^-20 is an "
            "option); fp32: products 2^-20",
            fallback=REFERENCE,
            tests=(
                "tests/gpu/test_m2rnn_gpu.py", "tests/kernels/test_m2rnn_on_cpu.py",
                "tests/kernels/test_m2rnn_gradient_sizes.py", "tests/kernels/test_m2rnn_build.py",
            ),
            receipt="m2rnn-b4-h44.json",
            builds=BUILDS,
            exit_when="upstream's kernels, at true gradients, come within a tenth of it over a "
            "whole step",
        ),
        reference(
            "megacpp_mcore.kernels.m2rnn:m2rnn", always,
            removes="the per-step graph: states are kept once a chunk and recomputed in the "
            "backward pass",
            layout=_LAYOUT,
            dtypes="bf16, fp16, fp32, fp64; computed in fp32 or wider",
            tests=("tests/kernels/test_m2rnn_kernel.py", *SCAN_TESTS),
            no_receipt="not timed together with the kernels, because it is far slower",
        ),
    ),
    of_recipe,
    blocks="R",
    case="megacpp_mcore.kernels.m2rnn.case:M2RNNCase",
)  # fmt: skip
