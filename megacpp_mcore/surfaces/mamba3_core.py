"""Surface `mamba3_core`: everything between an M block's projections, as one operator."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megacpp_mcore.surfaces import mamba3_scan, mixer_core
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
    from megacpp_mcore.hybrid.block_settings import Mamba3Settings
    from megacpp_mcore.hybrid.mamba3_layout import Mamba3Layout
    from megacpp_mcore.recipe import Recipe

_INSIDE = mamba3_scan.SURFACE.name


def workload(
    device: str,
    config,
    layout: "Mamba3Layout",
    settings: "Mamba3Settings",
    requests: Mapping[str, str],
) -> Workload:
    """A SISO block's workload, as of `mamba3_scan`, and requests: the recipe's [backends]."""
    inside = mamba3_scan.workload(device, config, layout, settings)
    return mixer_core.around(inside, _INSIDE, layout.tp, requests)


def of_recipe(recipe: "Recipe", device: str) -> Workload | None:
    """None where there is no M, or it is MIMO."""
    ranks, inside = (
        recipe.parallel.tensor_model_parallel_size,
        mamba3_scan.of_recipe(recipe, device),
    )
    if inside is None or inside.size("variant") != "siso":
        return None
    return mixer_core.around(inside, _INSIDE, ranks, recipe.backends)


def _options(workload: Workload) -> str | None:
    """Why the kernels cannot serve a recipe on any machine."""
    over_ranks = "the angles are gathered over the ranks between"
    if reason := mixer_core.options(workload, over_ranks):
        return reason
    if workload.dtype != "bfloat16":
        return f"the kernels' products are of bfloat16, not {workload.dtype}"
    if (chunk_size := workload.size("chunk_size")) != 64:
        return f"chunk_size {chunk_size}: the kernels' chunks have 64 tokens"
    for name in ("state_dim", "head_dim"):
        if (size := workload.size(name)) not in (32, 64, 128):
            return f"{name} {size}: the kernels are tested with 32, 64 and 128"
    return None


def _triton(workload: Workload) -> str | None:
    reason = cuda_only("its kernels run", workload) or _options(workload)
    return reason or import_reason("triton")


_KERNELS = "megacpp_mcore.kernels.mamba3_core"
_facts = {
    "layout": "[s, b, in_proj's rows] -> [s, b, H P]; SISO, any length; packed "
    "documents, or an initial and a final state, both with gradients",
    "tests": (
        "tests/kernels/test_mamba3_core.py", "tests/kernels/test_mamba3_states.py",
        "tests/gpu/test_cores_gpu.py", *KERNEL_TESTS,
    ),
}  # fmt: skip

SURFACE = Surface(
    "mamba3_core",
    (
        Backend(
            "triton", f"{_KERNELS}.triton:mamba3_core", _triton,
            ruled_out=whatever_the_machine(_options), role="chosen",
            removes="every copy between in_proj and the scan, between the scan and out_proj, and "
            "of their gradients: x and z are read where they lie, and the projection's gradient is "
            "written in place; a program processes an eighth of a row of one head, where "
            "mamba-ssm's scan processes the whole row. The rotated q and k are stored for each "
            "head, and their gradients in the same place; 5 launches forward and 7 backward, and "
            "four sums of what these leave",
            dtypes="bf16; dt, decay, angles, their sums and state in fp32",
            fallback=REFERENCE,
            receipt="layer-mamba3.json",
            figures=(
                Figure("layer-mamba3.json", "recipe", "an M layer"),
                Figure("layer-mamba3.json", "mamba3_core=reference", "with reference"),
            ),
            exit_when="one kernel each way has the scan and what is around it inside",
            **_facts,
        ),
        reference(
            f"{_KERNELS}:mamba3_core", always,
            removes="nothing: plain torch around mamba3_scan, which has backends of its own",
            dtypes="bf16, fp16, fp32, fp64; dt, decay and state in fp32 or wider",
            no_receipt="a layer's, in layer-mamba3.json, has a backend of mamba3_scan inside",
            **_facts,
        ),
    ),
    of_recipe,
    blocks="M",
    case="megacpp_mcore.kernels.mamba3_core.case:Mamba3CoreCase",
)  # fmt: skip
