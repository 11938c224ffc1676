"""Which backend serves which surface: requested, observed, and the reason.

A surface is a place in the model where more than one implementation fits (`core_attention`,
`mamba3_scan`, ...). Its backends stand in order of preference; each says with a sentence why it
cannot serve a problem, or nothing when it can. `auto` takes the first that can. A backend named in
the recipe's `[backends]`, or forced with `MEGACPP_BACKENDS=surface=name,...`, serves or raises.

A layer decides once, when it is built; nothing here runs in a training step. Importing this module
imports neither torch nor any optional package: a backend is imported when it is asked about.
"""

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.errors import MegacppError

AUTO = "auto"
ENVIRONMENT_VARIABLE = "MEGACPP_BACKENDS"


class DispatchError(MegacppError):
    """An unknown surface or backend, or a named backend that cannot serve."""


@dataclass(frozen=True)
class Problem:
    """What a backend is asked to serve.

    device: "cpu" or "cuda". dtype: torch's name without the prefix ("bfloat16"). sizes: whatever
    the surface's backends need to know (head dims, heads, layout), as sorted (name, value) pairs so
    that a problem can be a cache key; build one with `Problem.of`.
    """

    device: str
    dtype: str
    sizes: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, device: str, dtype: str, **sizes: Any) -> "Problem":
        return cls(device, dtype, tuple(sorted(sizes.items())))

    def size(self, name: str, default: Any = None) -> Any:
        return dict(self.sizes).get(name, default)


@dataclass(frozen=True)
class Backend:
    """One implementation of a surface.

    implementation: "module:attribute", imported when a layer takes the backend.
    supports: returns None when the backend can serve the problem, else a sentence saying why not.
    """

    name: str
    implementation: str
    supports: Callable[[Problem], str | None]


@dataclass(frozen=True)
class Decision:
    """The outcome of one choice; what lands in the receipt."""

    surface: str
    requested: str
    observed: str
    reason: str
    implementation: str

    def load(self) -> Any:
        """Import and return what serves the surface."""
        module, attribute = self.implementation.split(":")
        return getattr(importlib.import_module(module), attribute)


@functools.cache
def import_reason(module: str) -> str | None:
    """None when `module` imports here, else a sentence with the failure.

    Any failure counts: an optional CUDA package may fail with ImportError (absent), OSError (no
    driver), AssertionError (a version check) or AttributeError (another version beside it).
    """
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"cannot import {module}: {type(error).__name__}: {error}"
    return None


def always(problem: Problem) -> str | None:
    """The `supports` of a reference backend: plain torch, serves everything."""
    return None


def transformer_engine(problem: Problem) -> str | None:
    """The `supports` of Transformer Engine's modules."""
    if problem.device != "cuda":
        return f"Transformer Engine runs on cuda only, the problem is on {problem.device}"
    return import_reason("transformer_engine.pytorch")


_PARTS = "megacpp_mcore.layers.parts"

# surface -> backends in order of preference; the last is plain torch and always serves
REGISTRY: dict[str, tuple[Backend, ...]] = {
    "linear": (
        Backend("te", f"{_PARTS}:te_linears", transformer_engine),
        Backend("reference", f"{_PARTS}:megatron_linears", always),
    ),
    "norm": (
        Backend("te", f"{_PARTS}:te_norm", transformer_engine),
        Backend("reference", f"{_PARTS}:torch_norm", always),
    ),
    "moe_experts": (
        Backend("te", f"{_PARTS}:te_experts", transformer_engine),
        Backend("reference", f"{_PARTS}:sequential_experts", always),
    ),
    "core_attention": (
        Backend("sdpa", "megacpp_mcore.layers.core_attention:SDPACoreAttention", always),
        Backend("reference", "megacpp_mcore.layers.core_attention:ReferenceCoreAttention", always),
    ),
    "mamba3_scan": (Backend("reference", "megacpp_mcore.kernels.mamba3:mamba3_scan", always),),
    "m2rnn": (Backend("reference", "megacpp_mcore.kernels.m2rnn:m2rnn", always),),
}

# surface -> names a recipe or MEGACPP_BACKENDS may give, `auto` apart
SURFACES: Mapping[str, tuple[str, ...]] = {
    surface: tuple(backend.name for backend in backends) for surface, backends in REGISTRY.items()
}


def check_requests(requests: Mapping[str, str], where: str) -> None:
    """Refuse a request for a surface or backend that does not exist.

    Raises DispatchError naming `where` the request was made, the value, and what is known.
    """
    for surface, name in requests.items():
        if surface not in SURFACES:
            raise DispatchError(
                f"{where}: unknown surface {surface!r}; the surfaces are {', '.join(SURFACES)}"
            )
        if name != AUTO and name not in SURFACES[surface]:
            raise DispatchError(
                f"{where}: unknown backend {name!r} of surface {surface!r}; "
                f"choose {AUTO}, {', '.join(SURFACES[surface])}"
            )


def forced_backends(text: str | None = None) -> dict[str, str]:
    """`surface=name,...` parsed and checked; by default from MEGACPP_BACKENDS.

    Raises DispatchError for an entry of another form, a surface given twice, or an unknown name.
    """
    text = os.environ.get(ENVIRONMENT_VARIABLE, "") if text is None else text
    requests: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        surface, equals, name = (part.strip() for part in entry.partition("="))
        if not (surface and equals and name):
            raise DispatchError(
                f"{ENVIRONMENT_VARIABLE}: {entry!r} is not of the form surface=backend"
            )
        if surface in requests:
            raise DispatchError(f"{ENVIRONMENT_VARIABLE}: surface {surface!r} is given twice")
        requests[surface] = name
    check_requests(requests, ENVIRONMENT_VARIABLE)
    return requests


def decide(surface: str, problem: Problem, requests: Mapping[str, str] | None = None) -> Decision:
    """Choose the backend that serves `surface` for `problem`, and record the decision.

    requests: the recipe's `[backends]`; MEGACPP_BACKENDS goes before it. Raises DispatchError for
    an unknown surface or backend, and when a named backend cannot serve, with its reason.
    """
    forced = forced_backends()
    requests = dict(requests or {})
    check_requests({surface: AUTO} | requests, "[backends]")
    requested = forced.get(surface, requests.get(surface, AUTO))
    source = ENVIRONMENT_VARIABLE if surface in forced else "the recipe's [backends]"
    decision = _decide(surface, problem, requested, source)
    _DECISIONS.setdefault((decision, problem), None)
    return decision


@functools.cache
def _decide(surface: str, problem: Problem, requested: str, source: str) -> Decision:
    passed_over = []
    for backend in REGISTRY[surface]:
        if requested not in (AUTO, backend.name):
            continue
        why_not = backend.supports(problem)
        if why_not is None:
            if requested != AUTO:
                reason = f"named in {source}"
            else:
                reason = "; ".join(passed_over) or "first in order"
            return Decision(surface, requested, backend.name, reason, backend.implementation)
        passed_over.append(f"{backend.name}: {why_not}")
    raise DispatchError(
        f"backend {requested!r} was named for surface {surface!r} in {source} and cannot serve: "
        f"{'; '.join(passed_over)}. Name another of {', '.join(SURFACES[surface])}, or {AUTO}"
    )


_DECISIONS: dict[tuple[Decision, Problem], None] = {}


def decisions() -> tuple[Decision, ...]:
    """Every distinct decision of this process so far, in order."""
    return tuple(dict.fromkeys(decision for decision, _ in _DECISIONS))
