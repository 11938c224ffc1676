"""What `mamba3_core` and `m2rnn_core` share: an operator with another surface inside of it."""

from collections.abc import Mapping, Sequence

from megacpp_mcore.surfaces.workload import Workload


def named(parts: Sequence[str], requests: Mapping[str, str]) -> tuple[str, ...]:
    """Which of the surfaces inside have their backend named: in `requests`, a recipe's [backends],
    or in MEGACPP_BACKENDS."""
    from megacpp_mcore import dispatch  # which imports every surface

    return tuple(name for name in parts if dispatch.requested(name, requests) != dispatch.AUTO)


def options(workload: Workload, over_ranks: str) -> str | None:
    """Why the operator does not serve a recipe. over_ranks: what is exchanged inside under tensor
    parallelism."""
    if parts := workload.size("parts", ()):
        return f"{', '.join(parts)} named: this operator has its own inside"
    ranks = workload.size("tensor_model_parallel_size", 1)
    return None if ranks == 1 else f"tensor_model_parallel_size {ranks}: {over_ranks}"
