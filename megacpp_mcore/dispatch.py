"""Which backend serves which surface: requested, observed, and the reason.

A surface is a place in the model where more than one implementation fits (`core_attention`,
`mamba3_scan`, ...; `megacpp_mcore.surfaces` has them). Its backends stand in order of preference;
each says why it cannot serve a workload, or nothing when it can. `auto` takes the first that can,
but for those that wait to be named. A backend named in the recipe's `[backends]`, or forced with
`MEGACPP_BACKENDS=surface=name,...`, serves or raises.

`auto` does not fall past a backend for which only the compiler of its kernels is missing: what is
slower has to be named. With `strict`, which a run sets from its recipe's launch.strict, it does not
fall past one whose package is installed but broken either: that is an error. A run begins with
`begin`, so that its record holds nothing of an earlier run in the process.

A decision is said in a short line, or by a run in one line for all (`summary`); its reason is in
the receipt, and on the terminal where MEGACPP_VERBOSE is 1 (`-v`), where another backend serves
than the one that was named, or where `auto` falls past one whose package is broken, or, because of
what this machine lacks, past the one that the catalog calls chosen: such a run is slower than its
user believes.

A layer decides once, when it is built; nothing here runs in a training step. Importing this module
imports neither torch nor any optional package: a backend is imported when it is asked about.
"""

import functools
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.surfaces.backend import Backend, Surface, load
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.support import Broken, OfMachine, Unbuildable
from megacpp_mcore.surfaces.workload import Workload

if TYPE_CHECKING:
    from megacpp_mcore.recipe import Recipe

__all__ = [
    "AUTO", "ENVIRONMENT_VARIABLE", "VERBOSE", "Backend", "Decision", "DispatchError", "Workload",
    "begin", "check_read", "check_requests", "choices", "choose", "decide", "decisions",
    "forced_backends", "forget", "questions", "requested", "strict", "summary", "verdicts",
]  # fmt: skip

AUTO = "auto"
ENVIRONMENT_VARIABLE = "MEGACPP_BACKENDS"
VERBOSE = "MEGACPP_VERBOSE"  # 1: a line with the reason for each decision


class DispatchError(MegacppError):
    """An unknown surface or backend, or no backend that can serve as asked."""


@dataclass(frozen=True)
class Decision:
    """The outcome of one choice; `asdict` of it is what lands in the receipt."""

    surface: str
    requested: str
    observed: str
    reason: str
    implementation: str

    def load(self) -> Any:
        """Import and return what serves the surface."""
        return load(self.implementation)


def choices(surface: str) -> tuple[str, ...]:
    """The names that a recipe or MEGACPP_BACKENDS may give for `surface`, in order.

    Raises DispatchError for an unknown surface.
    """
    return (AUTO, *(backend.name for backend in _surface(surface).backends))


def check_requests(requests: Mapping[str, str], where: str) -> None:
    """Refuse a request for a surface or backend that does not exist.

    Raises DispatchError naming `where` the request was made, the value, and what is known.
    """
    for surface, name in requests.items():
        if surface not in REGISTRY:
            raise DispatchError(f"{where}: {_unknown(surface)}")
        if name not in choices(surface):
            raise DispatchError(
                f"{where}: unknown backend {name!r} of surface {surface!r}; "
                f"choose {', '.join(choices(surface))}"
            )


def forced_backends(text: str | None = None, origin: str = ENVIRONMENT_VARIABLE) -> dict[str, str]:
    """`surface=name,...` parsed and checked; by default from MEGACPP_BACKENDS. origin: of the text,
    for messages.

    Raises DispatchError for an entry of another form, a surface given twice, or an unknown name.
    """
    text = os.environ.get(ENVIRONMENT_VARIABLE, "") if text is None else text
    return dict(_forced(text, origin))


@functools.cache
def _forced(text: str, origin: str) -> Mapping[str, str]:
    requests: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        surface, equals, name = (part.strip() for part in entry.partition("="))
        if not (surface and equals and name):
            raise DispatchError(f"{origin}: {entry!r} is not of the form surface=backend")
        if surface in requests:
            raise DispatchError(f"{origin}: surface {surface!r} is given twice")
        requests[surface] = name
    check_requests(requests, origin)
    return requests


def check_read(recipe: "Recipe", surfaces: Collection[str] | None = None) -> None:
    """Refuse a backend in [backends] for a surface that the recipe's model does not have, as no
    layer would read it. MEGACPP_BACKENDS may name those of several models. surfaces: those asked
    about; None: all.

    Raises DispatchError, which names all of them.
    """
    unread = {
        name: asked
        for name, surface in REGISTRY.items()
        if (surfaces is None or name in surfaces)
        and (asked := recipe.backends.get(name, AUTO)) != AUTO
        and surface.workload(recipe, recipe.launch.device) is None
    }
    if unread:
        listed = ", ".join(f'backends.{name} = "{asked}"' for name, asked in unread.items())
        raise DispatchError(
            f"recipe {recipe.name}: {listed}: no part of this model asks for "
            f"{' or '.join(unread)}; leave it out, or choose a model that has it"
        )


def decide(surface: str, workload: Workload, requests: Mapping[str, str] | None = None) -> Decision:
    """Choose the backend that serves `surface` for `workload`, and record the decision.

    requests: the recipe's `[backends]`; MEGACPP_BACKENDS goes before it. A decision that this
    process has not made before is printed on stderr by rank 0, unless the run says all at once.
    Raises DispatchError as `choose`.
    """
    return record(choose(surface, workload, requests), workload)


def record(decision: Decision, workload: Workload | None = None) -> Decision:
    """As `decide` does, for what was not ours to choose; workload: None when none was asked."""
    _QUESTIONS.setdefault((decision.surface, workload), {})[decision] = None
    if decision not in _DECISIONS:
        _DECISIONS[decision] = None
        in_full = _told_in_full(decision) or _fell_back(decision, workload)
        if (_SAYS_EACH[0] or in_full) and os.environ.get("RANK", "0") == "0":
            print(_line(decision, in_full), file=sys.stderr, flush=True)
    return decision


def choose(surface: str, workload: Workload, requests: Mapping[str, str] | None = None) -> Decision:
    """As `decide`, but for the asking only: neither recorded nor printed.

    Raises DispatchError for an unknown surface or backend, and with every backend's reason when a
    named backend cannot serve, or none can.
    """
    name = requested(surface, requests)
    is_forced = surface in forced_backends()
    source = ENVIRONMENT_VARIABLE if is_forced else "the recipe's [backends]"
    return _choose(surface, workload, name, source, _STRICT[0])


def strict(on: bool) -> None:
    """Whether `auto` refuses to fall past a backend whose package is broken, in this process."""
    _STRICT[0] = on


def requested(surface: str, requests: Mapping[str, str] | None = None) -> str:
    """What is asked for: by MEGACPP_BACKENDS, else by `requests`, else "auto".

    Raises DispatchError for an unknown surface or backend.
    """
    _surface(surface)
    forced = forced_backends()
    if requests:
        check_requests(requests, "[backends]")
    return forced.get(surface) or (requests or {}).get(surface, AUTO)


def verdicts(surface: str, workload: Workload) -> dict[str, str | None]:
    """Every backend of `surface`, in order: None when it can serve `workload`, else why not."""
    return {backend.name: backend.supports(workload) for backend in _surface(surface).backends}


def decisions() -> tuple[Decision, ...]:
    """Every distinct decision of this process so far, in order."""
    return tuple(_DECISIONS)


def questions() -> dict[tuple[str, Workload | None], tuple[Decision, ...]]:
    """(surface, workload) -> every distinct decision about it in this process so far."""
    return {question: tuple(decisions) for question, decisions in _QUESTIONS.items()}


def begin(*, say_each: bool = True) -> None:
    """Drop the record: a run begins. say_each: decisions are printed as they are made; else the
    run prints `summary` when the model is built."""
    _DECISIONS.clear()
    _QUESTIONS.clear()
    _SAYS_EACH[0] = say_each


def summary() -> str:
    """All decisions so far in one line, those of one backend's name together."""
    served: dict[str, dict[str, None]] = {}
    for decision in _DECISIONS:
        served.setdefault(decision.observed, {})[decision.surface] = None
    listed = "; ".join(f"{name}: {', '.join(surfaces)}" for name, surfaces in served.items())
    why = "" if _verbose() else " (why: -v, or the receipt)"
    return f"megacpp: backends {listed}{why}"


def forget() -> None:
    """Drop the record and the cache, as in a new process; what failed to import stays failed."""
    begin()
    strict(False)
    _choose.cache_clear()
    _forced.cache_clear()


_DECISIONS: dict[Decision, None] = {}
_QUESTIONS: dict[tuple[str, Workload | None], dict[Decision, None]] = {}
_STRICT = [False]
_SAYS_EACH = [True]


@functools.cache
def _choose(
    surface: str, workload: Workload, requested: str, source: str, strict: bool
) -> Decision:  # fmt: skip
    passed_over = []
    for backend in REGISTRY[surface].backends:
        if requested not in (AUTO, backend.name):
            continue
        why_not = backend.supports(workload)
        # What `auto` passes over for this workload need be neither whole nor built.
        of_workload = callable(backend.opt_in) and isinstance(why_not, Broken | Unbuildable)
        if requested == AUTO and (why_not is None or of_workload):
            why_not = backend.passed_over(workload) or why_not
        if why_not is None:
            reason = "; ".join(passed_over) or "first in order"
            if requested != AUTO:
                passed = callable(backend.opt_in) and backend.opt_in(workload)
                reason = f"named in {source}"
                reason += f"; auto passes it over: {passed}" if passed else ""
            if layout := workload.size("layout"):
                reason = f"layout {layout}: {reason}"
            return Decision(surface, requested, backend.name, reason, backend.implementation)
        if strict and requested == AUTO and isinstance(why_not, Broken):
            raise DispatchError(
                f"launch.strict: backend {backend.name!r} of surface {surface!r} would serve, but "
                f"its package is broken: {why_not}. Repair it, name another backend in the "
                "recipe's [backends], or set launch.strict=false"
            )
        if requested == AUTO and isinstance(why_not, Unbuildable):
            raise DispatchError(
                f"backend {backend.name!r} of surface {surface!r} would serve, but its kernels "
                f"cannot be compiled: {why_not}"
            )
        passed_over.append(f"{backend.name}: {why_not}")
    raise DispatchError(_refusal(surface, workload, requested, source))


def _refusal(surface: str, workload: Workload, requested: str, source: str) -> str:
    found = verdicts(surface, workload)
    if requested == AUTO:
        start = f"no backend of surface {surface!r} can serve {workload}: "
    else:
        start = (
            f"backend {requested!r} is named for surface {surface!r} in {source} and cannot serve: "
            f"{found.pop(requested)}. Remove the name, or choose another: "
        )
    return start + "; ".join(f"{name}: {why_not or 'can serve'}" for name, why_not in found.items())


def _surface(name: str) -> Surface:
    if name not in REGISTRY:
        raise DispatchError(_unknown(name))
    return REGISTRY[name]


def _unknown(surface: str) -> str:
    return f"unknown surface {surface!r}; the surfaces are {', '.join(REGISTRY)}"


def _verbose() -> bool:
    return os.environ.get(VERBOSE, "") not in ("", "0")


def _told_in_full(decision: Decision) -> bool:
    """Another than the one that was named serves: always said with its reason."""
    return _verbose() or decision.requested not in (AUTO, decision.observed)


def _fell_back(decision: Decision, workload: Workload | None) -> bool:
    """Whether `auto` took less than a user of this machine expects."""
    if workload is None or decision.requested != AUTO or decision.surface not in REGISTRY:
        return False
    for backend in REGISTRY[decision.surface].backends:
        if backend.name == decision.observed:
            return False
        expected = OfMachine if backend.role == "chosen" else Broken
        if isinstance(backend.supports(workload), expected) and not backend.passed_over(workload):
            return True
    return False


def _line(decision: Decision, in_full: bool) -> str:
    line = f"megacpp: backend of {decision.surface}: {decision.observed}"
    return f"{line} (requested {decision.requested}; {decision.reason})" if in_full else line
