"""Surface `residual`: bias, dropout and addition, x and residual [s, b, h], bias [h] -> [s, b, h].

Chosen with the linears, before any config.
"""

from typing import TYPE_CHECKING

from megacpp_mcore.surfaces.backend import REFERENCE, Backend, NotCarried, Surface, reference
from megacpp_mcore.surfaces.support import KERNEL_TESTS, always, compiled
from megacpp_mcore.surfaces.workload import Workload, stack_part

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe


def of_recipe(recipe: "Recipe", device: str) -> Workload:
    return stack_part(device)


_facts = {
    "layout": "x, residual [s, b, h], bias [h] -> [s, b, h]",
    "tests": ("tests/kernels/test_residual.py", *KERNEL_TESTS),
    "receipt": "residual.json",
}

SURFACE = Surface(
    "residual",
    (
        Backend(
            "megatron", "megacpp_mcore.layers.parts:megatron_residual", compiled,
            role="chosen", keep="keep",
            removes="two of three elementwise launches and their traffic: bias, dropout and "
            "addition are one kernel of torch.compile, where the recipe has bias_dropout_fusion",
            dtypes="bf16, fp16, fp32; the residual's", fallback=REFERENCE,
            exit_when="it is no faster than the eager operations over a whole step",
            **_facts,
        ),
        reference(
            "megacpp_mcore.layers.parts:plain_residual", always,
            removes="nothing: bias, dropout and addition one after another",
            dtypes="bf16, fp16, fp32, fp64; the residual's",
            **_facts,
        ),
    ),
    of_recipe,
    blocks="AEMR",
    case="megacpp_mcore.kernels.residual.case:ResidualCase",
    not_carried=(
        NotCarried(
            name="own_triton", role="deferred",
            removes="elementwise launches between a block's output and the next block's input",
            fallback="megatron",
            why="bias, dropout and addition are one kernel of torch.compile already; a Triton "
            "kernel would be a border that the compiler cannot fuse across",
            exit_when="torch.compile stops fusing them in the pinned stack, seen in a trace of a "
            "run",
        ),
    ),
)  # fmt: skip
