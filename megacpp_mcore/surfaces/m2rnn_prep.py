"""Surface `m2rnn_prep`: convolution, decay and gated norm around an R block's recurrence."""

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
    return workload(device, config_of(recipe)) if "R" in recipe.plan.letters else None


_KERNELS, _LAYER = "megacpp_mcore.kernels.m2rnn_prep", "layer-m2rnn-prep.json"
_facts = mixer_prep.FACTS | {
    "layout": "q, k, v, decay (s, b, ...) -> (s, b, 2 K + H V), f (b, s, H); y, v (b, s, H, V), "
    "gate (s, b, H V) -> (s, b, H V)",
    "receipt": _LAYER,
}

SURFACE = Surface(
    "m2rnn_prep",
    (
        Backend(
            "inductor", f"{_KERNELS}.inductor:INDUCTOR", mixer_prep.inductor,
            opt_in=True, ruled_out=mixer_prep.ruled_out, role="experimental",
            removes="reads and writes in the convolution, the decay and the gated norm, two graphs "
            "of torch.compile each way, three with tensor parallelism",
            fallback=REFERENCE,
            figures=(
                Figure(_LAYER, "m2rnn_prep=inductor", "the layer"),
                Figure(_LAYER, "m2rnn_prep=reference", "the layer without it"),
                *mixer_prep.FIGURES,
            ),
            exit_when=mixer_prep.EXIT,
            **_facts,
        ),
        reference(
            f"{_KERNELS}:REFERENCE", always, removes=mixer_prep.REFERENCE_REMOVES, **_facts
        ),
    ),
    of_recipe,
    blocks="R",
    case="megacpp_mcore.kernels.m2rnn_prep.case:M2RNNPrepCase",
)  # fmt: skip
