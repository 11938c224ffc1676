"""Rules about [backends]: a named backend that this recipe's model rules out on any machine."""

from megacpp_mcore.recipe.refusal import Rules
from megacpp_mcore.surfaces.registry import REGISTRY


def check(r: Rules) -> None:
    for surface in REGISTRY.values():
        key = f"backends.{surface.name}"
        for backend in surface.backends:
            if backend.ruled_out is None or r[key] != backend.name:
                continue
            workload = surface.workload(r.recipe, r["launch.device"])
            why = workload and backend.ruled_out(r.recipe, workload)
            r.refuse(why, key, f"must be left out, or name another: {why}")
