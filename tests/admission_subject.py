"""A backend under test, and its values compared with the definition's."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from admission_probes import poisoned_memory

from megacpp_mcore import dispatch
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.case import BoundBackend, Case, Tensors, case_class
from megacpp_mcore.kernels.parity import Truth
from megacpp_mcore.surfaces.backend import REFERENCE, Backend, load
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.training.cpu.megatron_setup import single_process

_DTYPES = (torch.float32, torch.bfloat16)
_SEED = "MEGACPP_TEST_SEED"
BY_CHANCE = 1.5  # times the bound: beyond it an error is wrong whatever it is with other inputs


@dataclass(frozen=True)
class Subject:
    """A backend under test on one device.

    beyond_dispatch: dispatch would not serve it on this device; what it is made of runs all the
    same, so that it can be tested where there is no GPU.
    """

    surface: str
    backend: str
    device: str
    beyond_dispatch: bool = False

    @property
    def entry(self) -> Backend:
        (entry,) = (b for b in REGISTRY[self.surface].backends if b.name == self.backend)
        return entry

    def reason(self, case: Case, dtype: torch.dtype) -> str | None:
        """Why dispatch would not serve the case in this dtype."""
        return dispatch.verdicts(self.surface, case.workload(self.device, dtype))[self.backend]

    def takes(self, case: Case, dtype: torch.dtype) -> bool:
        if _name(dtype) in self.entry.skips:
            return False
        return self.beyond_dispatch or self.reason(case, dtype) is None

    def bind(self, case: Case, dtype: torch.dtype) -> BoundBackend:
        return case.bind(load(self.entry.benched), self.device, dtype)

    def samples(self, start: str) -> Iterator[tuple[str, Case, torch.dtype]]:
        """The small cases whose name starts with `start`, in each dtype that is served.

        Those of whole tiles are a GPU's kernels': on a CPU there would be the reference alone.
        """
        for name, case in case_class(self.surface).samples().items():
            if name.endswith("tiles") and (self.backend, self.device) == (REFERENCE, "cpu"):
                continue
            for dtype in _DTYPES:
                if name.startswith(start) and self.takes(case, dtype):
                    yield f"{name}, {dtype}", case, dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compare(
    subject: Subject,
    start: str,
    *,
    arrange: Callable[[torch.Tensor], torch.Tensor] | None = None,
    direction: Callable[[torch.Tensor], torch.Tensor] | None = None,
    may_refuse: bool = False,
    poison: bool = False,
) -> None:
    """Parity of the samples whose name starts with `start`.

    Each region of each tensor is judged by what rounding does to the definition there, which says
    of a few draws how far another may be off. What is beyond that by less than BY_CHANCE must be
    within it with other inputs.
    arrange: another layout for inputs and gradients. direction: a gradient instead of random ones,
    for which whole tensors alone are judged. may_refuse: a MegacppError is an answer, too. poison:
    fresh memory holds NaN during the call.
    """

    def judged(case: Case, dtype: torch.dtype, seed: int) -> list[parity.Error] | None:
        """None: the backend refuses it."""
        tensors = parity.drawn(case, dtype, subject.device, seed)
        bound = subject.bind(case, dtype)
        if may_refuse and _refuses(bound, tensors):
            return None
        truth = truth_of(case, dtype, subject.device, seed)
        if direction is not None:
            given = {n: direction(y).to(y.device) for n, y in truth.directions.items()}
            truth = parity.truth_of(case, tensors, dtype, torch.float64, given)
        if arrange is not None:
            tensors = {n: arrange(t) for n, t in tensors.items()}
            rearranged = {n: arrange(d) for n, d in truth.directions.items()}
            truth = replace(truth, directions=rearranged)
        with poisoned_memory(subject.device) if poison else contextlib.nullcontext():
            values = parity.run(case, bound, tensors, truth.directions)
        return parity.errors(case, values, truth, dtype)

    with single_process(0, subject.device):
        tested = 0
        for what, case, dtype in subject.samples(start):
            for attempt in range(2):
                seed = fresh_seed(attempt)
                errors = judged(case, dtype, seed)
                if not (errors and 1 < errors[0].share <= BY_CHANCE and _SEED not in os.environ):
                    break
            assert_within(f"{what}, {_SEED}={seed}", errors or [])
            tested += 1
    # What dispatch does not serve, it has refused.
    assert tested or may_refuse, f"no {start!r} sample is served on {subject.device}"


_SEEDS = [int.from_bytes(os.urandom(3)) for _ in range(2)]


def fresh_seed(attempt: int = 0) -> int:
    """The same for all checks of a process, which so have one truth; or what a failure printed."""
    return int(os.environ.get(_SEED) or _SEEDS[attempt])


@functools.lru_cache(maxsize=64)
def truth_of(case: Case, dtype: torch.dtype, device: str, seed: int) -> Truth:
    """What the definition makes of the seed's tensors: most of a check's time."""
    tensors = parity.drawn(case, dtype, device, seed)
    return parity.truth_of(case, tensors, dtype, torch.float64, by_region=True)


def assert_within(what: str, errors: list[parity.Error]) -> None:
    wrong = [str(error) for error in errors if error.share > 1]
    assert not wrong, f"{what}: " + "; ".join(wrong)


def _refuses(bound: BoundBackend, tensors: Tensors) -> bool:
    try:
        bound.put(tensors)
        bound.call(**tensors)
    except MegacppError:
        return True
    return False
