"""Surface `mamba3_prep`: from an M block's projection to its scan, as far as it is arithmetic."""

from typing import TYPE_CHECKING

from megacpp_mcore.surfaces import mixer_prep
from megacpp_mcore.surfaces.backend import REFERENCE, Backend, Surface, reference
from megacpp_mcore.surfaces.figures import Figure
from megacpp_mcore.surfaces.mixer_prep import workload
from megacpp_mcore.surfaces.support import always
from megacpp_mcore.surfaces.workload import Workload, config_of

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe


def of_recipe(recipe: "Recipe", device: str) -> Workload | None:
    return workload(device, config_of(recipe)) if "M" in recipe.plan.letters else None


_KERNELS, _LAYER = "megacpp_mcore.kernels.mamba3_prep", "layer-mamba3-prep.json"
_facts = mixer_prep.FACTS | {
    "layout": "B, C (b, s, G R N), dt, A (b, s, H) -> q, k (b, s, [R,] G, N), adt, dt (b, s, H)",
    "receipt": _LAYER,
}

SURFACE = Surface(
    "mamba3_prep",
    (
        Backend(
            "inductor", f"{_KERNELS}.inductor:mamba3_prep", mixer_prep.inductor,
            opt_in=True, ruled_out=mixer_prep.ruled_out, role="experimental",
            removes="reads and writes between the norms of B and C, the steps and the decays, one "
            "graph of torch.compile each way",
            fallback=REFERENCE,
            figures=(
                Figure(_LAYER, "mamba3_prep=inductor", "the layer"),
                Figure(_LAYER, "mamba3_prep=reference", "the layer without it"),
                *mixer_prep.FIGURES,
            ),
            exit_when=mixer_prep.EXIT,
            **_facts,
        ),
        reference(
            f"{_KERNELS}:mamba3_prep", always, removes=mixer_prep.REFERENCE_REMOVES, **_facts
        ),
    ),
    of_recipe,
    blocks="M",
    case="megacpp_mcore.kernels.mamba3_prep.case:Mamba3PrepCase",
)  # fmt: skip
