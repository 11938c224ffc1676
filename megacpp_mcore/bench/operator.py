"""An operator: the backends of one surface, on one micro batch of a recipe.

Each is compared with the definition first; one that fails or is wrong has a reason and no times.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megacpp_mcore import dispatch
from megacpp_mcore.bench import BenchError, BenchFailure
from megacpp_mcore.bench.clock import Clock, measure_rates
from megacpp_mcore.bench.runner import Contender, Target
from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.case import BoundBackend, Case, Tensors, case_class
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.stack import bridges
from megacpp_mcore.surfaces.backend import REFERENCE, load
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.workload import current_device

_SECONDS_A_PHASE = 4.0


class OperatorTarget(Target):
    """The backends of a surface: those of `against` and the one that dispatch chooses, else all
    that can serve."""

    def __init__(
        self, surface: str, recipe: Recipe, against: Sequence[str] = (), variant: str | None = None
    ) -> None:
        """recipe: from `load_for_bench`. against: the first that is timed is the baseline; without
        them the one that dispatch chooses. variant: of the surface's case, see `Case.variants`.

        Raises CaseError and DispatchError for unknown names, BenchError when the recipe has no such
        layer, the case no such variant, or a backend named in `against` cannot serve.
        """
        super().__init__(recipe, surface, _SECONDS_A_PHASE)
        self.case = _case(surface, recipe, variant)
        self.dtype = torch.bfloat16 if recipe.precision.bf16 else torch.float32
        bridges.before_megatron()
        workload = self.case.workload(current_device(), self.dtype)
        chosen = dispatch.choose(surface, workload, recipe.backends).observed
        self.preferred = (*against, chosen, REFERENCE)
        self.entered = _backends(self.case, workload, chosen, against)

    def build(self, clock: Clock, say: Callable[[str], None]) -> None:
        """Make the inputs, run every backend once, and drop what is not right.

        Raises BenchFailure when no backend is left.
        """
        case, dtype = self.case, self.dtype
        self.sets = [_inputs(case, dtype, clock.device, seed=0)]
        size = _bytes(self.sets[0])
        for seed in range(1, _set_count(clock, size)):
            self.sets.append(_inputs(case, dtype, clock.device, seed))
        wide = torch.float32 if clock.device == "cuda" else torch.float64
        count = len(self.sets)
        say(f"the definition in {wide}, on {count} sets of inputs of {size / 2**20:,.1f} MiB")
        self.expected = parity.truth_of(case, self.sets[0], dtype, wide, by_region=True)
        _warm_device(clock, dtype)
        for backend in self.entered:
            if backend.reason is None:
                say(f"{backend.name}: first call, then compared with the definition")
                self._try(backend, clock)
        self.backends = [backend.entry(self.surface) for backend in self.entered]
        self.wrong += [f"{b.name}: {b.reason}" for b in self.entered if b.failed]
        timed = [backend.name for backend in self.entered if backend.reason is None]
        if not timed:
            reasons = "; ".join(f"{b.name}: {b.reason}" for b in self.entered)
            raise BenchFailure(f"no backend of {self.surface} could be timed: {reasons}")
        self.baseline = next(name for name in (*self.preferred, *timed) if name in timed)
        self.rates = measure_rates(clock, dtype)

    def _try(self, backend: "_Backend", clock: Clock) -> None:
        """A backend that fails is a finding of the bench.

        Too little memory for one that nobody named is no failure.
        """
        try:
            self._check(backend, clock)
        except torch.OutOfMemoryError as error:
            backend.drop(f"out of memory: {_first_line(error)}", failed=backend.is_asked_for)
        except Exception as error:  # whatever a vendor's package raises
            traceback.print_exc()
            backend.drop(f"{type(error).__name__}: {_first_line(error)}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what it kept would be missing for the next

    def _check(self, backend: "_Backend", clock: Clock) -> None:
        """Build the backend, take its cold times, and compare it with the definition."""
        case = self.case
        for tensors in self.sets:
            bound = case.bind(load(backend.implementation), clock.device, self.dtype)
            bound.put(tensors)
            backend.bound.append(bound)
        kept: list[Any] = []
        first = clock.cold(lambda: kept.extend(self._outputs(backend, 0)))
        back = clock.cold(lambda: self._gradients(*kept))
        kept.clear()
        backend.cold_ms = {"forward": first, "forward_backward": first + back}
        values = parity.run(case, backend.bound[0], self.sets[0], self.expected.directions)
        worst = backend.worst = parity.errors(case, values, self.expected, self.dtype)[0]
        if worst.share > 1:
            return backend.drop(f"wrong: {worst}")
        if backend.name != REFERENCE:
            backend.error, backend.tolerance = worst.error, worst.tolerance
        backend.calls = {
            "forward": lambda turn: self._outputs(backend, turn)[0],
            "forward_backward": lambda turn: self._gradients(*self._outputs(backend, turn)),
        }

    def _outputs(self, backend: "_Backend", turn: int) -> tuple[Tensors, list[torch.Tensor]]:
        """A forward call, and the tensors that gradients are for."""
        index = turn % len(self.sets)
        tensors, bound = self.sets[index], backend.bound[index]
        sources = [tensors[n] for n in self.case.inputs if n not in bound.parameters]
        sources += [p for parameters in bound.parameters.values() for p in parameters]
        return bound.call(**tensors), sources

    def _gradients(self, outputs: Tensors, sources: list[torch.Tensor]) -> object:
        """The backward call."""
        along = [self.expected.directions[name] for name in outputs]
        return torch.autograd.grad(list(outputs.values()), sources, along)

    def ready(self, phase: str) -> Sequence[Contender]:
        return [backend for backend in self.entered if backend.reason is None]

    def cost(self, phase: str) -> tuple[int, int]:
        """Inputs are read once, as far as they must be, and outputs written once; the backward pass
        reads the inputs, unless it does without, and the outputs' gradients, and writes the inputs'
        gradients."""
        case, tensors = self.case, self.sets[0]
        flops, outputs = case.flops(), _bytes(self.expected.directions)
        moved = _bytes(tensors) - case.unread_bytes(tensors) + outputs
        if phase == "forward" or not case.backward_flops:
            return flops, moved
        inputs = _bytes({name: tensors[name] for name in case.inputs})
        backward = inputs + (moved if case.backward_reads_inputs else outputs)
        return (1 + case.backward_flops) * flops, moved + backward

    def sizes(self) -> dict[str, Any]:
        return self.case.sizes

    def notes(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        floors = ", ".join(
            f"{phase} {self.rates.floor_ms(*self.cost(phase)):.4g} ms" for phase in self.phases
        )
        return [
            f"floors, at what the device did in this run (matrix product {self.rates}): {floors}",
            f"{len(self.sets)} sets of inputs in rotation; cold is the first call in this process, "
            "with caches on disk as they were; peak memory is beyond inputs and weights",
        ]


@dataclass
class _Backend(Contender):
    """One backend. reason: why it is not timed, or no longer. bound: one for each set of inputs."""

    implementation: str = ""
    reason: str | None = None
    is_asked_for: bool = False
    failed: bool = False
    worst: parity.Error | None = None
    bound: list[BoundBackend] = field(default_factory=list)

    def drop(self, reason: str, failed: bool = True) -> None:
        self.reason, self.failed = reason, failed
        self.bound.clear()

    def entry(self, surface: str) -> dict[str, Any]:
        """What the receipt says of it under `backends`."""
        return {
            "surface": surface,
            "requested": self.name if self.is_asked_for else dispatch.AUTO,
            "observed": self.name if self.reason is None else None,
            "reason": str(self.worst) if self.reason is None else f"{self.name}: {self.reason}",
            "implementation": self.implementation,
        }


def _case(surface: str, recipe: Recipe, variant: str | None) -> Case:
    case = case_class(surface).of(recipe)
    if case is None:
        raise BenchError(f"recipe {recipe.name} has no layer for a bench of {surface}")
    if variant is None:
        return case
    if variant not in case.variants:
        known = ", ".join(case.variants) or "none"
        raise BenchError(f"{surface} has no variant {variant!r}; its variants: {known}")
    return case.as_variant(variant)


def _backends(
    case: Case, workload: dispatch.Workload, chosen: str, against: Sequence[str]
) -> list[_Backend]:
    surface = case.surface
    verdicts = dispatch.verdicts(surface, workload)
    for name in against:
        dispatch.check_requests({surface: name}, "--against")
        if name == dispatch.AUTO or verdicts[name] is not None:
            reason = verdicts.get(name) or "name a backend, not auto"
            raise BenchError(f"--against {name}: {reason}")
    candidates, served = list(REGISTRY[surface].backends), (*against, chosen)
    if not against:
        candidates += case.yardsticks
    found = []
    for backend in candidates:
        reason = backend.supports(workload)
        if against and reason is None and backend.name not in served:
            reason = "not asked for"
        found.append(_Backend(backend.name, implementation=backend.benched, reason=reason,
                              is_asked_for=backend.name in against))  # fmt: skip
    return found


def _inputs(case: Case, dtype: torch.dtype, device: str, seed: int) -> Tensors:
    tensors = parity.drawn(case, dtype, device, seed)
    return {n: t.requires_grad_() if n in case.inputs else t for n, t in tensors.items()}


def _bytes(tensors: Tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _set_count(clock: Clock, size: int) -> int:
    """Sets of inputs that together are at least twice the last cache, so that none stays in it."""
    cache = 2**25
    if clock.device == "cuda":
        cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, min(16, -(-2 * cache // max(1, size))))


def _warm_device(clock: Clock, dtype: torch.dtype) -> None:
    """Start what no backend should pay for: context, allocator, cuBLAS, autograd."""
    a = torch.randn(64, 64, device=clock.device).to(dtype).requires_grad_()
    (a @ a).sum().backward()
    clock.wait()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:300]
