"""What `mamba3_prep` and `m2rnn_prep` share: elementwise work that torch.compile can fuse."""

from typing import Any

from megacpp_mcore.surfaces.figures import step
from megacpp_mcore.surfaces.support import (
    KERNEL_TESTS,
    compiled,
    import_reason,
    whatever_the_machine,
)
from megacpp_mcore.surfaces.workload import Workload, dtype_of


def workload(device: str, config) -> Workload:
    """What lies between a mixer's projections and its kernel: elementwise, so of any sizes."""
    return Workload.of(
        device,
        dtype_of(config),
        deterministic_mode=config.deterministic_mode,
        cuda_graph_impl=config.cuda_graph_impl,
    )


def inductor(workload: Workload) -> str | None:
    """The `supports` of what we compile with torch.compile as a layer is first called."""
    if reason := _options(workload) or import_reason("triton"):
        return reason
    from megacpp_mcore.kernels import inductor as here

    return here.reason()


def _options(workload: Workload) -> str | None:
    """Why nothing is compiled under the recipe's options, whatever the machine has."""
    if reason := compiled(workload):
        return reason
    if workload.size("deterministic_mode"):
        return (
            "deterministic_mode: how a compiled sum is cut up is chosen by timing, so that two "
            "runs may add in another order"
        )
    # A whole step is captured after steps that have compiled; a layer's graph with its first call.
    graphs = workload.size("cuda_graph_impl", "none")
    if graphs not in ("none", "full_iteration"):
        return f"cuda_graph_impl {graphs}: a compilation cannot be part of a captured graph"
    return None


ruled_out = whatever_the_machine(_options)
FACTS: dict[str, Any] = {
    "dtypes": "bf16, fp16, fp32, fp64; computed in fp32 or wider, rounded once",
    "tests": (
        "tests/kernels/test_mixer_prep.py", "tests/kernels/test_mixer_prep_admission.py",
        "tests/layers/test_compiled.py", "tests/gpu/test_compiled_gpu.py", *KERNEL_TESTS,
    ),
}  # fmt: skip
REFERENCE_REMOVES = "nothing: the definition in plain torch, which serves unless another is named"
EXIT = (
    "a whole step is faster with it beyond the spread: then auto takes it. One of nam56r-quarter, "
    "off, with R's, with M's and with both in turns, was not"
)
_STEPS = "model-nam56r-quarter-compile.json"
_OFF, _M = "m2rnn_prep=reference", "mamba3_prep=inductor"
FIGURES = (
    step(_STEPS, _OFF, "a step of nam56r-quarter, off"),
    step(_STEPS, "model", "with R's"),
    step(_STEPS, f"{_OFF},{_M}", "with M's"),
    step(_STEPS, _M, "with both"),
)
