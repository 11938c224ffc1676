"""What `mamba3_core`, `m2rnn_core` and `mla_up` share: an operator with another surface inside."""

from collections.abc import Mapping

from megacpp_mcore.surfaces.workload import Workload


def around(inside: Workload, surface: str, ranks: int, requests: Mapping[str, str]) -> Workload:
    """The workload of an operator with `surface` inside, of which `inside` is asked.

    ranks: of tensor parallelism. requests: a recipe's [backends]; where they, or MEGACPP_BACKENDS,
    name a backend of the surface inside, that is one of the `parts`.
    """
    from megacpp_mcore import dispatch  # which imports every surface

    named = dispatch.requested(surface, requests) != dispatch.AUTO
    more = {"tensor_model_parallel_size": ranks, "parts": (surface,) if named else ()}
    return Workload.of(inside.device, inside.dtype, **{**dict(inside.sizes), **more})


def options(workload: Workload, over_ranks: str) -> str | None:
    """Why the operator does not serve a recipe. over_ranks: what is exchanged inside under tensor
    parallelism."""
    if parts := workload.size("parts", ()):
        return f"{', '.join(parts)} named: this operator has its own inside"
    ranks = workload.size("tensor_model_parallel_size", 1)
    return None if ranks == 1 else f"tensor_model_parallel_size {ranks}: {over_ranks}"
