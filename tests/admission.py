"""The admission suite: what a backend must show before a model may run on it.

    test_admission = admission.suite("norm")                        # in tests/kernels/test_norm.py
    test_admission = admission.suite("norm", device="cuda")         # in tests/gpu

makes one test of every check for every backend of the surface. Nothing of a surface is known here
but its case (`megacpp_mcore.kernels.case`), and nothing of a backend but its entry, whose
`skips` say which checks ("all": every one) or dtypes it does not take, and why.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import model_slice
import pytest
import torch
from admission_probes import (
    Graphs,
    deterministic,
    environment,
    graphs,
    operators,
    strided,
    transposed,
)
from admission_subject import Subject, assert_within, compare, fresh_seed, truth_of
from served import anywhere

from megacpp_mcore import dispatch
from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.case import Case
from megacpp_mcore.surfaces.backend import REFERENCE
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.training.cpu.megatron_setup import single_process

_OPCHECK = ("test_schema", "test_autograd_registration", "test_faketensor",
            "test_aot_dispatch_dynamic")  # fmt: skip


def suite(surface: str, device: str = "cpu", beyond_dispatch: tuple[str, ...] = ()) -> Callable:
    """A test of every check for every backend of `surface` on `device`.

    beyond_dispatch: backends to test on this device although dispatch does not serve them on it.
    All but the reference are slow, as kernels run in Triton's interpreter, and so are the checks
    that build a model or compile.
    """
    subjects = [
        pytest.param(
            Subject(surface, backend.name, device, backend.name in beyond_dispatch),
            marks=() if backend.name == REFERENCE else pytest.mark.slow,
        )
        for backend in REGISTRY[surface].backends
    ]

    checks = [
        pytest.param(name, marks=pytest.mark.slow if name in ("graph", "model_slice") else ())
        for name in CHECKS
    ]

    @pytest.mark.parametrize("check", checks)
    @pytest.mark.parametrize("subject", subjects, ids=lambda subject: subject.backend)
    def test_admission(subject: Subject, check: str) -> None:
        admit(subject, check)

    return test_admission


def admit(subject: Subject, check: str) -> None:
    """Run one check; skipped with the reason when the entry, or dispatch on the device, says so."""
    if why := subject.entry.skips.get(check) or subject.entry.skips.get("all"):
        pytest.skip(f"{check}: {why}")
    with single_process(0, subject.device):
        reasons = [subject.reason(case, dtype) for _, case, dtype in _everything(subject.surface)]
    if None not in reasons and not subject.beyond_dispatch:
        pytest.skip(f"not served on {subject.device}: {reasons[0]}")
    CHECKS[check](subject)


def _everything(surface: str) -> Iterator[tuple[str, Case, torch.dtype]]:
    return Subject(surface, REFERENCE, "", beyond_dispatch=True).samples("")


def check_parity(subject: Subject) -> None:
    """Outputs and gradients against the definition in float64, on fresh random inputs."""
    compare(subject, "plain")


def check_odd_shapes(subject: Subject) -> None:
    """The same for sizes that are no multiples of a tile, one token, one expert."""
    compare(subject, "odd")


def check_zero_size(subject: Subject) -> None:
    """Nothing in: nothing out and gradients of zero, or a refusal of ours."""
    compare(subject, "empty", may_refuse=True)


def check_non_contiguous(subject: Subject) -> None:
    """Inputs and gradients in any strides, among NaN that nobody may read."""
    for arrange in (strided, transposed):
        compare(subject, "plain", arrange=arrange)
    compare(subject, "plain", direction=expanded_ones)


def expanded_ones(y: torch.Tensor) -> torch.Tensor:
    """The gradient of a sum, which has one element in memory."""
    return torch.ones((), dtype=y.dtype).expand(y.shape)


def check_poisoned(subject: Subject) -> None:
    """Fresh memory is full of NaN, from the allocator and from torch.empty."""
    for samples in ("plain", "odd"):
        compare(subject, samples, poison=True)


def check_opcheck(subject: Subject) -> None:
    """torch.library.opcheck on every custom operator of ours that a call runs into."""
    with single_process(0, subject.device):
        for what, case, dtype in subject.samples("plain"):
            if dtype != torch.float32 and subject.takes(case, torch.float32):
                continue  # the schema and the fake do not depend on the dtype
            tensors = parity.drawn(case, dtype, subject.device, fresh_seed())
            found = operators(subject.bind(case, dtype), case, tensors)
            overwrites = any(operator._schema.is_mutable for operator, *_ in found)
            for operator, args, kwargs in found:
                tests = set(_OPCHECK)
                if overwrites and not operator._schema.is_mutable:
                    # It would return what the backward pass overwrites; a call of ours, which
                    # does not, is traced in check_graph.
                    tests.remove("test_aot_dispatch_dynamic")
                results = torch.library.opcheck(
                    operator, args, kwargs, test_utils=sorted(tests), raise_exception=False
                )
                failed = {test: result for test, result in results.items() if result != "SUCCESS"}
                assert not failed, f"{what}: {operator}: {failed}"


def check_graph(subject: Subject) -> None:
    """Compiled, a block around the op is cut as around the reference, or less, and only once.

    The graphs are taken and run as they are: no code is generated. In bf16, as the model runs.
    """
    with single_process(0, subject.device):
        name, case, dtype = list(subject.samples("plain"))[-1]
        expected = _graphs_of_the_reference(subject.surface, name, case, dtype, subject.device)
        tensors = parity.drawn(case, dtype, subject.device, fresh_seed())
        found = graphs(subject.bind(case, dtype), case, tensors)
    assert found.count <= expected.count, f"{found.count} graphs, the reference {expected.count}"
    marks, wanted = ([mark for graph in g.around for mark in graph] for g in (found, expected))
    assert marks == wanted, f"around the op stand {marks}, around the reference {wanted}"
    assert len(found.around) <= len(expected.around), f"cut apart around the op: {found.around}"
    assert found.again == found.count, f"a second call made {found.again - found.count} graphs more"


@functools.cache
def _graphs_of_the_reference(
    surface: str, name: str, case: Case, dtype: torch.dtype, device: str
) -> Graphs:
    bound = Subject(surface, REFERENCE, device).bind(case, dtype)
    return graphs(bound, case, parity.drawn(case, dtype, device, fresh_seed()))


def check_fallback(subject: Subject) -> None:
    """MEGACPP_BACKENDS forces its fallback, or for the reference itself: the same values."""
    forced = next(name for name in _fallbacks(subject) if _served(subject, name))
    with (
        single_process(0, subject.device),
        environment(MEGACPP_BACKENDS=f"{subject.surface}={forced}"),
    ):
        for what, case, dtype in subject.samples("plain"):
            decision = dispatch.choose(subject.surface, case.workload(subject.device, dtype))
            assert (decision.requested, decision.observed) == (forced, forced)
            tensors = parity.drawn(case, dtype, subject.device, fresh_seed())
            truth = truth_of(case, dtype, subject.device, fresh_seed())
            served = Subject(subject.surface, decision.observed, subject.device)
            for bound in (subject.bind(case, dtype), served.bind(case, dtype)):
                values = parity.run(case, bound, tensors, truth.directions)
                assert_within(what, parity.errors(case, values, truth, dtype))


def check_determinism(subject: Subject) -> None:
    """In torch's deterministic mode twice the same bits, or a refusal.

    The first call does not count: for the sizes that it meets torch.compile makes one kernel each,
    and from the second size on one for all, which may add up in another order.
    """
    with single_process(0, subject.device):
        for what, case, dtype in subject.samples("plain"):
            tensors = parity.drawn(case, dtype, subject.device, fresh_seed())
            truth = truth_of(case, dtype, subject.device, fresh_seed())
            bound = subject.bind(case, dtype)
            try:
                with deterministic():
                    _, first, second = (
                        parity.run(case, bound, tensors, truth.directions) for _ in range(3)
                    )
            except RuntimeError as error:
                words = str(error).lower()
                assert "deterministic" in words or "no available kernel" in words, error
                continue
            for name, value in first.items():
                assert torch.equal(value, second[name]), f"{what}: {name} differs between two calls"


def check_model_slice(subject: Subject) -> None:
    """A bf16 model of the surface's blocks: loss and gradients point where they should."""
    with _serving(subject):
        found = list(model_slice.cosines(subject.surface, subject.backend, subject.device))
    wrong = [f"{name}: {cosine:.6f} < {least:.6f}" for name, cosine, least in found
             if not cosine >= least]  # fmt: skip
    assert found and not wrong, f"cosine below what is allowed: {'; '.join(wrong)}"


CHECKS: dict[str, Callable[[Subject], None]] = {
    "parity": check_parity,
    "odd_shapes": check_odd_shapes,
    "zero_size": check_zero_size,
    "non_contiguous": check_non_contiguous,
    "poisoned": check_poisoned,
    "opcheck": check_opcheck,
    "graph": check_graph,
    "fallback": check_fallback,
    "determinism": check_determinism,
    "model_slice": check_model_slice,
}


@contextlib.contextmanager
def _serving(subject: Subject) -> Iterator[None]:
    """Dispatch serves the subject, also where it would not."""
    if not subject.beyond_dispatch:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REGISTRY, subject.surface, anywhere(subject.surface, subject.backend))
        yield
    dispatch.forget()  # that it could


def _fallbacks(subject: Subject) -> Iterator[str]:
    """Its fallback and the fallback's own, down to the reference."""
    entries = {entry.name: entry for entry in REGISTRY[subject.surface].backends}
    name = subject.entry.fallback
    while name is not None:
        yield name
        name = entries[name].fallback
    yield REFERENCE


def _served(subject: Subject, backend: str) -> bool:
    other = Subject(subject.surface, backend, subject.device)
    return all(other.takes(case, dtype) for _, case, dtype in subject.samples("plain"))
