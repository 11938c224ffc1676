"""Surface `m2rnn_core`: everything between an R block's projections, as one operator."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megacpp_mcore.surfaces import m2rnn, mixer_core
from megacpp_mcore.surfaces.backend import REFERENCE, Backend, Surface, reference
from megacpp_mcore.surfaces.figures import Figure
from megacpp_mcore.surfaces.support import (
    KERNEL_TESTS,
    always,
    cuda_only,
    import_reason,
    whatever_the_machine,
)
from megacpp_mcore.surfaces.workload import Workload

if TYPE_CHECKING:
    from megacpp_mcore.hybrid.block_settings import M2RNNSettings
    from megacpp_mcore.hybrid.m2rnn_layout import M2RNNLayout
    from megacpp_mcore.recipe import Recipe

_INSIDE = m2rnn.SURFACE.name


def workload(
    device: str,
    config,
    layout: "M2RNNLayout",
    settings: "M2RNNSettings",
    requests: Mapping[str, str],
) -> Workload:
    """The workload of `m2rnn`, and requests: the recipe's [backends]."""
    inside = m2rnn.workload(device, config, layout, settings)
    return mixer_core.around(inside, _INSIDE, layout.tp, requests)


def of_recipe(recipe: "Recipe", device: str) -> Workload | None:
    ranks, inside = recipe.parallel.tensor_model_parallel_size, m2rnn.of_recipe(recipe, device)
    return inside and mixer_core.around(inside, _INSIDE, ranks, recipe.backends)


def _options(workload: Workload) -> str | None:
    """Why the kernels cannot serve a recipe on any machine."""
    return mixer_core.options(workload, "q, k and the norm's sum go over the ranks")


def _triton(workload: Workload) -> str | None:
    if reason := cuda_only("its kernels run", workload) or _options(workload):
        return reason
    within = m2rnn.SURFACE.backend(m2rnn.CUDA).supports(workload)
    return within or import_reason("triton")


_KERNELS = "megacpp_mcore.kernels.m2rnn_core"
_facts = {
    "layout": "[s, b, in_proj's rows] -> [s, b, H V]; V 16, K a multiple of 32; any length, packed "
    "documents",
    "tests": (
        "tests/kernels/test_m2rnn_core.py", "tests/gpu/test_cores_gpu.py", *KERNEL_TESTS,
    ),
}  # fmt: skip

SURFACE = Surface(
    "m2rnn_core",
    (
        Backend(
            "triton", f"{_KERNELS}.triton:m2rnn_core", _triton,
            ruled_out=whatever_the_machine(_options), role="chosen",
            removes="unfused convolution, gates and norm, every copy around them and of their "
            "gradients: our own kernels before and after the recurrence, forward and backward",
            dtypes="bf16, fp16, fp32; convolution, gates and norm in fp32, rounded once; the "
            "recurrence as in m2rnn's CUDA kernels",
            fallback=REFERENCE,
            receipt="layer-m2rnn-core.json",
            figures=(
                Figure("layer-m2rnn-core.json", "recipe", "an R layer"),
                Figure("layer-m2rnn-core.json", "m2rnn_core=reference", "with reference"),
            ),
            builds=m2rnn.BUILDS,
            exit_when="the recurrence's helper warps have convolution and gates inside",
            **_facts,
        ),
        reference(
            f"{_KERNELS}:m2rnn_core", always,
            removes="nothing: plain torch around m2rnn, which has backends of its own",
            dtypes="bf16, fp16, fp32, fp64; computed in fp32 or wider",
            no_receipt="a layer's, in layer-m2rnn-core.json, has a backend of m2rnn inside",
            **_facts,
        ),
    ),
    of_recipe,
    blocks="R",
    case="megacpp_mcore.kernels.m2rnn_core.case:M2RNNCoreCase",
)  # fmt: skip
