"""Which backend the planner assumes: the one that is named, or that an H200 would have."""

from megacpp_mcore.dispatch import AUTO
from megacpp_mcore.hybrid.plan import Layer
from megacpp_mcore.planner.pipeline import planned_of
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import moe_dispatch
from megacpp_mcore.surfaces.backend import REFERENCE, Backend, Surface
from megacpp_mcore.surfaces.moe_experts import FUSED, GROUPED_MM, TE
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.workload import config_of


class Serving(dict[str, str]):
    """surface -> the backend that the recipe names; for `auto` the one that the catalog has as
    chosen on the pinned stack, or where the recipe rules that out the next in order that `auto`
    takes. Each is found when it is first asked for."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self._recipe = recipe

    def __missing__(self, surface: str) -> str:
        name = self._recipe.backends.get(surface, AUTO)
        if name == AUTO:
            of_layers = surface == moe_dispatch.NAME
            name = self._dispatcher() if of_layers else self._in_order(REGISTRY[surface])
        self[surface] = name
        return name

    def _in_order(self, found: Surface) -> str:
        workload = found.workload(self._recipe, "cuda")

        def serves(backend: Backend) -> bool:
            ruled_out = backend.ruled_out and backend.ruled_out(self._recipe, workload)
            return not (ruled_out or backend.passed_over(workload))

        in_order = sorted(found.backends, key=lambda backend: backend.role != "chosen")
        return next(x.name for x in in_order if workload is None or serves(x))

    def _dispatcher(self) -> str:
        """As `layers.moe` decides it, of the experts that serve here."""
        recipe = self._recipe
        routes, host_ranks = self["moe_experts"] == FUSED, recipe.launch.nproc_per_node
        workload = moe_dispatch.workload("cuda", config_of(recipe), routes, host_ranks)
        return next(
            backend.name
            for backend in moe_dispatch.SURFACE.backends
            if not (backend.passed_over(workload) or backend.supports(workload))
        )

    @property
    def gathers_tokens(self) -> bool:
        """Whether the experts take tokens in their order: no permuted copy is kept, and a weight
        gradient is added to the main gradient by its product."""
        in_order = moe_dispatch.UNMOVED, moe_dispatch.ALLGATHER, moe_dispatch.DEEPEP
        return self["moe_experts"] == FUSED and self[moe_dispatch.NAME] in in_order

    def of_layer(self, layer: Layer) -> str | None:
        """Which of the measured kinds of a layer the recipe's is; None: there is one kind.

        Those without a receipt of their own count as the layer that copies between its operators.
        """
        planned = planned_of(layer)
        if planned.experts:
            if self["moe_experts"] == TE:
                return TE
            return FUSED if self.gathers_tokens else GROUPED_MM
        return planned.surface and self[planned.surface]


def passes_rate(letter: str, backend: str | None) -> str:
    """Name of the rate: how often a layer moves the bytes that it keeps."""
    return "_".join(filter(None, ("passes", letter, backend)))


PASSES_OF_OTHERS = passes_rate("M", REFERENCE)  # of a letter without a receipt
