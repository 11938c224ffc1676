"""One surface: every usable backend on one problem, correctness first, then times in turns."""

import functools
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megacpp_mcore import bench, dispatch, receipts
from megacpp_mcore.bench.clock import Clock, Rates, clock_for, interleave, measure_rates
from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.case import Bound, Case, Tensors
from megacpp_mcore.kernels.cases import case_class
from megacpp_mcore.receipts.lane import lane
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.stack import bridges
from megacpp_mcore.surfaces import problems
from megacpp_mcore.surfaces.backend import REFERENCE
from megacpp_mcore.surfaces.registry import REGISTRY

_SECONDS_A_PHASE = 6.0
_PHASES = ("forward", "forward_backward")


@dataclass
class Contender:
    """One backend in the race. bounds: one for each set of inputs. reason: why it is not, or no
    longer, in it."""

    name: str
    implementation: str
    reason: str | None
    is_asked_for: bool = False
    failed: bool = False
    bounds: list[Bound] = field(default_factory=list)
    cold_ms: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: dict[str, int | None] = field(default_factory=dict)
    error: parity.Error | None = None

    def drop(self, reason: str, failed: bool = True) -> None:
        self.reason, self.failed = reason, failed
        self.bounds.clear()


@dataclass(frozen=True)
class Race:
    """What all contenders get: the case and its dtype, sets of inputs, and the gradients to send
    back."""

    case: Case
    dtype: torch.dtype
    clock: Clock
    sets: list[Tensors]
    truth: parity.Truth

    def forward(self, contender: Contender) -> Callable[[int], object]:
        return lambda turn: self.outputs(contender, turn)[0]

    def forward_backward(self, contender: Contender) -> Callable[[int], object]:
        def call(turn: int) -> object:
            return self.gradients(*self.outputs(contender, turn))

        return call

    def outputs(self, contender: Contender, turn: int) -> tuple[Tensors, list[torch.Tensor]]:
        """A forward call, and the tensors that gradients are for."""
        index = turn % len(self.sets)
        tensors, bound = self.sets[index], contender.bounds[index]
        sources = [tensors[n] for n in self.case.inputs if n not in bound.parameters]
        sources += [p for parameters in bound.parameters.values() for p in parameters]
        return bound.call(**tensors), sources

    def gradients(self, outputs: Tensors, sources: list[torch.Tensor]) -> object:
        """The backward call."""
        along = [self.truth.directions[name] for name in outputs]
        return torch.autograd.grad(list(outputs.values()), sources, along)


def bench_surface(
    surface: str,
    recipe: Recipe,
    against: Sequence[str] = (),
    say: Callable[[str], None] = bench.to_stderr,
    variant: str | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Time the backends of `surface` on one micro batch of `recipe`, forward and with backward.

    recipe: from `load_for_bench`. against: backends to time beside the one that dispatch chooses,
    the first of them the baseline; by default all that can serve, and the baseline is the one that
    dispatch chooses. say: told what is being done. variant: of the surface's case, see
    `Case.variants`.

    Returns the bench receipt, and what went wrong with single backends, which then have no rows.
    Raises CaseError and DispatchError for unknown names, BenchError when the recipe has no such
    layer or a backend named in `against` cannot serve, and BenchFailure when nothing was timed.
    """
    bench.check_receipts()
    case = case_class(surface).of(recipe)
    if case is None:
        raise bench.BenchError(f"recipe {recipe.name} has no layer for a bench of {surface}")
    if variant is not None:
        if variant not in case.variants:
            known = ", ".join(case.variants) or "none"
            raise bench.BenchError(f"{surface} has no variant {variant!r}; its variants: {known}")
        case = case.as_variant(variant)
    bridges.before_megatron()
    from megacpp_mcore.training.cpu.megatron_setup import quiet, single_process

    device = problems.current_device()
    dtype = torch.bfloat16 if recipe.precision.bf16 else torch.float32
    problem = case.problem(device, dtype)
    chosen = dispatch.choose(surface, problem, recipe.backends).observed
    contenders = _contenders(case, problem, chosen, against)
    with quiet(), single_process(recipe.schedule.seed, device):
        race = _race(case, dtype, clock_for(device), contenders, say)
        rates = measure_rates(race.clock, dtype)
        rows = _rows(race, contenders, say)
    if not rows:
        reasons = "; ".join(f"{c.name}: {c.reason}" for c in contenders)
        raise bench.BenchFailure(f"no backend of {surface} could be timed: {reasons}")
    timed = {row["backend"] for row in rows}
    baseline = next(name for name in (*against, chosen, REFERENCE, *timed) if name in timed)
    receipt = receipts.bench_receipt(
        problem={"surface": surface, "dtype": str(dtype).removeprefix("torch."),
                 "sizes": case.sizes},
        rows=rows,
        baseline=baseline,
        backends=[_entry(surface, contender) for contender in contenders],
        lane=lane("cpu" if device == "cpu" else None),
        topology=bench.TOPOLOGY,
        environment=environment(recipe),
        recipe=receipts.recipe_entry(recipe.name, recipe.to_dict()),
        notes=_notes(race, rates),
    )  # fmt: skip
    return receipt, [f"{c.name}: {c.reason}" for c in contenders if c.failed]


def environment(recipe: Recipe) -> dict[str, dict[str, str]]:
    """The launch variables of the recipe that this process has, and the forced backends."""
    names = (*recipe.launch.environment, dispatch.ENVIRONMENT_VARIABLE)
    return {"applied": {}, "kept": {n: os.environ[n] for n in names if n in os.environ}}


def _contenders(
    case: Case, problem: dispatch.Problem, chosen: str, against: Sequence[str]
) -> list[Contender]:
    surface = case.surface
    for name in against:
        dispatch.check_requests({surface: name}, "--against")
    verdicts = dispatch.verdicts(surface, problem)
    for name in against:
        if name == dispatch.AUTO or verdicts[name] is not None:
            raise bench.BenchError(
                f"--against {name}: " + (verdicts.get(name) or "name a backend, not auto")
            )
    found = []
    for backend in REGISTRY[surface].backends:
        reason = verdicts[backend.name]
        if against and reason is None and backend.name not in (*against, chosen):
            reason = "not asked for"
        asked = backend.name in against
        found.append(Contender(backend.name, backend.implementation, reason, asked))
    if not against:
        found += [Contender(y.name, y.implementation, y.supports(problem)) for y in case.yardsticks]
    return found


def _race(
    case: Case, dtype: torch.dtype, clock: Clock, contenders: Sequence[Contender],
    say: Callable[[str], None],
) -> Race:  # fmt: skip
    """Draw the inputs, run every contender cold, and drop what is not right."""
    sets = [_leaves(case, parity.drawn(case, dtype, clock.device, seed=0))]
    size = sum(t.numel() * t.element_size() for t in sets[0].values())
    for seed in range(1, _set_count(clock, size)):
        sets.append(_leaves(case, parity.drawn(case, dtype, clock.device, seed)))
    wide = torch.float32 if clock.device == "cuda" else torch.float64
    say(f"the definition in {wide}, on {len(sets)} sets of inputs of {size / 2**20:,.1f} MiB")
    truth = parity.truth_of(case, sets[0], dtype, wide)
    _warm_device(clock, dtype)
    race = Race(case, dtype, clock, sets, truth)
    for contender in contenders:
        if contender.reason is None:
            say(f"{contender.name}: first call, then compared with the definition")
            _guarded(contender, lambda contender=contender: _enter(race, contender))
    return race


def _leaves(case: Case, tensors: Tensors) -> Tensors:
    return {n: t.requires_grad_() if n in case.inputs else t for n, t in tensors.items()}


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


def _enter(race: Race, contender: Contender) -> None:
    """Build the contender, take its cold times, and hold it against the truth."""
    case, clock = race.case, race.clock
    decision = dispatch.Decision(case.surface, "", contender.name, "", contender.implementation)

    for tensors in race.sets:
        bound = case.bind(decision.load(), clock.device, race.dtype)
        bound.put(tensors)
        contender.bounds.append(bound)
    kept: list[Any] = []
    first = clock.cold(lambda: kept.extend(race.outputs(contender, 0)))
    back = clock.cold(lambda: race.gradients(*kept))
    kept.clear()
    contender.cold_ms = {"forward": first, "forward_backward": first + back}
    values = parity.run(case, contender.bounds[0], race.sets[0], race.truth.directions)
    contender.error = parity.errors(case, values, race.truth, race.dtype)[0]
    if contender.error.share > 1:
        contender.drop(f"wrong: {contender.error}")
        return
    for phase in _PHASES:
        call = getattr(race, phase)(contender)
        contender.peak_memory_bytes[phase] = clock.peak_memory_bytes(functools.partial(call, 0))


def _guarded(contender: Contender, work: Callable[[], None]) -> None:
    """A backend that fails is a finding of the bench: it leaves the race with its reason.

    Too little memory for one that nobody named is no failure.
    """
    try:
        work()
    except torch.OutOfMemoryError as error:
        contender.drop(f"out of memory: {_first_line(error)}", failed=contender.is_asked_for)
    except Exception as error:  # whatever a vendor's package raises
        traceback.print_exc()
        contender.drop(f"{type(error).__name__}: {_first_line(error)}")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what it kept would be missing for the next


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:300]


def _rows(
    race: Race, contenders: Sequence[Contender], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Both phases, each interleaved over all that are still in the race."""
    rows = []
    costs = _costs(race)
    for phase in _PHASES:
        running = [c for c in contenders if c.reason is None]
        say(f"{phase}: {', '.join(c.name for c in running) or 'nothing'}, in turns")
        calls = {c.name: getattr(race, phase)(c) for c in running}
        samples = interleave(race.clock, calls, _SECONDS_A_PHASE)
        flops, bytes_floor = costs[phase]
        for contender in running:
            is_reference = contender.name == REFERENCE
            error = None if is_reference else contender.error
            rows.append(
                receipts.bench_row(
                    contender.name, phase, samples[contender.name].ms,
                    rounds=samples[contender.name].rounds,
                    cold_ms=contender.cold_ms[phase],
                    peak_memory_bytes=contender.peak_memory_bytes[phase],
                    error=error.error if error else None,
                    tolerance=error.tolerance if error else None,
                    flops=flops, bytes_floor=bytes_floor,
                )
            )  # fmt: skip
    return rows


def _costs(race: Race) -> dict[str, tuple[int, int]]:
    """phase -> (operations, bytes) that a call needs at least.

    Inputs are read once and outputs written once; the backward pass reads the inputs, unless it
    does without, and the outputs' gradients, and writes the inputs' gradients.
    """
    size = {n: t.numel() * t.element_size() for n, t in race.sets[0].items()}
    outputs = sum(t.numel() * t.element_size() for t in race.truth.directions.values())
    flops, moved = race.case.flops(), sum(size.values()) + outputs
    again = race.case.backward_flops
    inputs = sum(size[name] for name in race.case.inputs)
    backward = inputs + (moved if race.case.backward_reads_inputs else outputs) if again else 0
    return {
        "forward": (flops, moved),
        "forward_backward": ((1 + again) * flops, moved + backward),
    }


def _entry(surface: str, contender: Contender) -> dict[str, Any]:
    served = contender.reason is None
    return {
        "surface": surface,
        "requested": contender.name if contender.is_asked_for else dispatch.AUTO,
        "observed": contender.name if served else None,
        "reason": str(contender.error) if served else f"{contender.name}: {contender.reason}",
        "implementation": contender.implementation,
    }


def _notes(race: Race, rates: Rates) -> list[str]:
    floors = ", ".join(
        f"{phase} {rates.floor_ms(*cost):.4g} ms" for phase, cost in _costs(race).items()
    )
    return [
        bench.ONE_RANK_NOTE,
        f"floors, at what the device did in this run (matrix product {rates}): {floors}",
        f"{len(race.sets)} sets of inputs in rotation; cold is the first call in this process, "
        "with caches on disk as they were; peak memory is beyond inputs and weights",
    ]
