"""The bench: contenders are built, checked and timed alternately; a receipt is made.

What is benched is a `Target`: an operator's backends, a layer, or a model.
"""

import importlib.util
import os
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megacpp_mcore import dispatch, receipts
from megacpp_mcore.bench import BenchError
from megacpp_mcore.bench.clock import Call, Clock, clock_for, interleave
from megacpp_mcore.bench.sustained import sustained
from megacpp_mcore.receipts.lane import lane
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.stack import bridges
from megacpp_mcore.surfaces.workload import current_device
from megacpp_mcore.training.environment import apply_environment

_TOPOLOGY = {"world_size": 1, "tp": 1, "pp": 1, "ep": 1, "cp": 1, "dp": 1}
_TRAINED = "forward_backward"  # the phase that a training step repeats
_ONE_RANK_NOTE = "one process: the recipe's model on one device, without any parallelism"


@dataclass
class Contender:
    """One of what a bench compares.

    calls: by phase, called with the number of the turn. cold_ms: by phase, of the first call.
    error, tolerance: None where it is not compared, as what the others are compared with.
    """

    name: str
    calls: Mapping[str, Call] = field(default_factory=dict)
    cold_ms: dict[str, float] = field(default_factory=dict)
    error: float | None = None
    tolerance: float | None = None


@dataclass
class Target(ABC):
    """What is benched: how its contenders are built, checked and called.

    surface: its name in the receipt. seconds: of timing a phase. baseline: the contender that the
    others are judged against. wrong: what went wrong with single contenders. backends: the
    receipt's.
    """

    recipe: Recipe
    surface: str
    seconds: float
    baseline: str = ""
    phases: Sequence[str] = ("forward", "forward_backward")
    dtype: torch.dtype = torch.float32
    wrong: list[str] = field(default_factory=list)
    backends: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.environment = _environment(self.recipe)  # asking for a backend may start CUDA

    @abstractmethod
    def build(self, clock: Clock, say: Callable[[str], None]) -> None:
        """Build the contenders and hold each against what is right. Needs Megatron's groups."""

    @abstractmethod
    def ready(self, phase: str) -> Sequence[Contender]:
        """Those to be timed in `phase`, prepared for it."""

    def peak_memory_bytes(self, contender: Contender, phase: str, clock: Clock) -> int | None:
        """Most memory of one warm call; by default beyond what was in use before it."""
        return clock.peak_memory_bytes(partial(contender.calls[phase], 0))

    def kept_memory_bytes(self, contender: Contender, phase: str, clock: Clock) -> int | None:
        """What a forward pass leaves in memory for its backward pass; None where not measured."""
        return None

    @abstractmethod
    def cost(self, phase: str) -> tuple[int, int | None]:
        """Operations and bytes that one call needs at least."""

    @abstractmethod
    def sizes(self) -> dict[str, Any]:
        """What was timed, as the receipt's `problem` keeps it."""

    @abstractmethod
    def notes(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """What a reader of the receipt must know."""

    def failed(self, phase: str, error: Exception) -> None:
        """Note that `phase` raised `error`; raises it, unless the other phases stand without it."""
        raise error


def to_stderr(message: str) -> None:
    """Progress goes to stderr: stdout is the receipt's."""
    print(message, file=sys.stderr, flush=True)


def run(target: Target, say: Callable[[str], None] = to_stderr) -> tuple[dict[str, Any], list[str]]:
    """Bench `target` in this process, on its GPU where there is one. say: told of the progress.

    Returns the bench receipt, and what went wrong with single contenders, which then may lack rows.
    Raises BenchError where no receipt could be validated in the end, and what the target raises.
    """
    if importlib.util.find_spec("jsonschema") is None:
        raise BenchError(
            "jsonschema is not installed, which validates the receipt; install it (it is one of "
            "megacpp-mcore's dependencies: `pip install 'jsonschema>=4.23'`)"
        )
    recipe, device = target.recipe, current_device()
    bridges.before_megatron()
    from megacpp_mcore.training.cpu.megatron_setup import quiet, single_process

    clock, rows = clock_for(device), []
    with quiet(), single_process(recipe.schedule.seed, device):
        target.build(clock, say)
        for phase in target.phases:
            try:
                rows += _timed(target, phase, clock, say)
            except Exception as error:
                target.failed(phase, error)
    receipt = receipts.bench_receipt(
        problem={"surface": target.surface, "dtype": str(target.dtype).removeprefix("torch."),
                 "sizes": target.sizes()},
        rows=rows,
        baseline=target.baseline,
        backends=target.backends,
        lane=lane("cpu" if device == "cpu" else None),
        topology=_TOPOLOGY,
        environment=target.environment,
        recipe=receipts.recipe_entry(recipe.name, recipe.to_dict()),
        notes=[_ONE_RANK_NOTE, *target.notes(rows)],
    )  # fmt: skip
    return receipt, target.wrong


def _timed(
    target: Target, phase: str, clock: Clock, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The rows of one phase, timed alternating."""
    contenders = target.ready(phase)
    say(f"{phase}: {', '.join(c.name for c in contenders)}, alternating")
    peaks = [target.peak_memory_bytes(contender, phase, clock) for contender in contenders]
    kept = [target.kept_memory_bytes(contender, phase, clock) for contender in contenders]
    calls = {contender.name: contender.calls[phase] for contender in contenders}
    samples = interleave(clock, calls, target.seconds)
    medians = {name: statistics.median(taken.ms) for name, taken in samples.items()}
    loaded = sustained(clock, calls, medians) if phase == _TRAINED else {}
    flops, bytes_floor = target.cost(phase)
    return [
        receipts.bench_row(
            contender.name, phase, samples[contender.name].ms,
            rounds=samples[contender.name].rounds, cold_ms=contender.cold_ms.get(phase),
            peak_memory_bytes=peak, kept_memory_bytes=left, error=contender.error,
            tolerance=contender.tolerance, flops=flops, bytes_floor=bytes_floor,
            **loaded.get(contender.name, {}),
        )
        for contender, peak, left in zip(contenders, peaks, kept, strict=True)
    ]  # fmt: skip


def _environment(recipe: Recipe) -> dict[str, dict[str, str]]:
    """The recipe's variables, set before CUDA starts and reads them, and the forced backends."""
    environment = apply_environment(recipe.launch.environment)
    if forced := os.environ.get(dispatch.ENVIRONMENT_VARIABLE):
        environment["kept"][dispatch.ENVIRONMENT_VARIABLE] = forced
    return environment
