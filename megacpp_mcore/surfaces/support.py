"""Reasons that the `supports` of several surfaces give, and texts that their catalog entries share.

No torch at import; an optional package is imported when a backend that needs it is asked.
"""

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from megacpp_mcore.surfaces.workload import Workload

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe

TE = "te"  # the backend of every surface that Transformer Engine serves
TE_GRAPH = {
    "graph": "TE keeps torch.compile out of its modules: a break before and after each, by design"
}
KERNEL_TESTS = ("tests/gpu/test_kernels_gpu.py",)
DISPATCH_TESTS = ("tests/test_dispatch.py",)
STACK_TESTS = (*DISPATCH_TESTS, "tests/layers/test_stack.py")
SCAN_TESTS = ("tests/kernels/test_scan_admission.py",)


class OfMachine(str):
    """A reason that lies in the machine, not in the workload: with a package more, or another GPU,
    the backend would serve."""

    __slots__ = ()


class Broken(OfMachine):
    """The reason of a backend whose package is installed, but does not work here.

    `auto` passes it over as it does any other, unless the recipe says launch.strict.
    """

    __slots__ = ()


class Unbuildable(OfMachine):
    """The reason of a backend whose kernels would be compiled here, but for the compiler.

    `auto` does not pass it over: what is slower has to be named.
    """

    __slots__ = ()


@functools.cache
def import_reason(module: str) -> str | None:
    """None when `module` imports here, else a sentence with the failure; tried once per process.

    OfMachine where it is simply absent, else Broken. Any failure counts: an optional CUDA package
    may fail with ImportError, OSError (no driver), AssertionError (a version check), AttributeError
    (two versions that do not fit), or exit.
    """
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        reason = f"cannot import {module}: {type(error).__name__}: {error}"
        absent = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(
            f"{error.name}."
        )
        return OfMachine(reason) if absent else Broken(reason)
    return None


def always(workload: Workload) -> str | None:
    """The `supports` of plain torch that serves everything."""
    return None


def cuda_only(what: str, workload: Workload) -> str | None:
    """what: subject and verb ("Liger's kernels run")."""
    return None if workload.device == "cuda" else f"{what} on cuda only, not on {workload.device}"


def transformer_engine(workload: Workload) -> str | None:
    """The `supports` of Transformer Engine's modules."""
    reason = cuda_only("Transformer Engine runs", workload)
    return reason or import_reason("transformer_engine.pytorch")


def triton(workload: Workload) -> str | None:
    """Why no Triton kernel of ours runs."""
    return cuda_only("a Triton kernel runs", workload) or import_reason("triton")


def in_the_models_dtype(workload: Workload) -> str | None:
    """The `supports` of matrix products that are not Transformer Engine's; the `opt_in` of those
    that serve beside its FP8 linears where they are named."""
    if (fp8 := workload.size("fp8")) is None:
        return None
    return f"fp8 {fp8}: it multiplies in the model's dtype, Transformer Engine in FP8"


def one_context_rank(workload: Workload) -> str | None:
    """The `supports` of a RoPE that takes a row's first token to be the first of a document."""
    ranks = workload.size("context_parallel_size", 1)
    if ranks == 1:
        return None
    return f"context_parallel_size {ranks}: it counts positions in the rows of one rank"


def whatever_the_machine(
    *reasons: Callable[[Workload], str | None],
) -> Callable[["Recipe", Workload], str | None]:
    """The first of `reasons`, which depend on the workload alone, as a `ruled_out`."""
    return lambda recipe, workload: next(filter(None, (why(workload) for why in reasons)), None)
