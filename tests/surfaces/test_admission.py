"""The admission suite finds what it is there to find: every check fails on a norm broken for it."""

import contextlib
from dataclasses import replace

import pytest
import torch
from admission import CHECKS, Subject, admit

from megacpp_mcore import dispatch
from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.case import case_class
from megacpp_mcore.kernels.norm import rms_norm
from megacpp_mcore.kernels.parity import Error
from megacpp_mcore.surfaces.backend import REFERENCE, Backend
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.support import always
from megacpp_mcore.surfaces.workload import Workload


class Norm(torch.nn.Module):
    """One that is right."""

    def __init__(self, config, hidden_size, eps):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class HalfGradient(Norm):
    def forward(self, x):
        y = super().forward(x)
        return (y + y.detach()) / 2


class DropsTheTail(Norm):
    def forward(self, x):
        y = super().forward(x)
        whole = y.shape[0] // 8 * 8
        return torch.cat((y[:whole], torch.zeros_like(y[whole:])))


class NotEmpty(Norm):
    def forward(self, x):
        return super().forward(x) * (x.abs().max() >= 0)


class IgnoresStrides(Norm):
    def forward(self, x):
        packed = torch.empty(x.shape, device="meta").stride()
        return super().forward(x.as_strided(x.shape, packed))


class _Unwritten(torch.autograd.Function):
    """Adds what happens to be in the last row of fresh memory; that is zero in a fresh process."""

    @staticmethod
    def forward(ctx, y):
        memory = torch.empty_like(y)
        memory[:-1] = 0
        return y + memory

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Unwritten(Norm):
    def forward(self, x):
        return _Unwritten.apply(super().forward(x))


@torch.library.custom_op("megacpp_test::negated", mutates_args=())
def negated(x: torch.Tensor) -> torch.Tensor:
    return -x


@negated.register_fake
def _(x):
    return x.new_empty(x.shape, dtype=torch.float64)


negated.register_autograd(lambda ctx, gradient: -gradient)


class WrongFake(Norm):
    def forward(self, x):
        return negated(negated(super().forward(x)))


class BreaksTheGraph(Norm):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


class Noisy(Norm):
    def forward(self, x):
        noise = torch.randn_like(x, requires_grad=False) * torch.finfo(x.dtype).eps / 8
        return super().forward(x + noise)


class WrongInAModel(Norm):
    """Far off only on 96 rows of two, which are in no sample of the norm's case."""

    def forward(self, x):
        y = super().forward(x)
        return y.flip(-1) if y.shape[:2] == (96, 2) else y


# check -> (the norm that is broken for it, what the failure says)
BROKEN = {
    "parity": (HalfGradient, r"dx: error|dweight: error"),
    "odd_shapes": (DropsTheTail, r"odd.*error"),
    "zero_size": (NotEmpty, r"max\(\): Expected reduction dim"),
    "non_contiguous": (IgnoresStrides, r"y: "),
    "poisoned": (Unwritten, r"values are not finite"),
    "opcheck": (WrongFake, r"megacpp_test.negated.default: .*test_faketensor"),
    "graph": (BreaksTheGraph, r"[2-4] graphs, the reference 1"),
    "determinism": (Noisy, r"y differs between two calls"),
    "model_slice": (WrongInAModel, r"cosine below what is allowed: A: losses"),
}


_NORMS = REGISTRY["norm"].backends
SURFACES = [name for name, surface in REGISTRY.items() if surface.case]


def of_tests(recipe, device):
    """What no layer asks, so that no layer is later served by an answer kept from these tests."""
    return Workload.of(device, "any")


def serve(monkeypatch, backends):
    surface = replace(REGISTRY["norm"], backends=backends, workload=of_tests, blocks="A")
    monkeypatch.setitem(REGISTRY, "norm", surface)


@pytest.fixture
def register(monkeypatch):
    """A function that makes a class the norm's backend `candidate`, with its facts."""

    def register(cls, **changes):
        dispatch.forget()  # what an earlier candidate was
        facts = {"fallback": REFERENCE} | changes
        backend = Backend("candidate", f"{__name__}:{cls.__name__}", always, **facts)
        serve(monkeypatch, (backend, *_NORMS))
        return Subject("norm", "candidate", "cpu")

    yield register
    dispatch.forget()


@pytest.mark.parametrize("check", CHECKS)
def test_a_right_backend_passes(check, register):
    admit(register(Norm), check)


@pytest.mark.parametrize("check", BROKEN)
def test_a_broken_backend_fails(check, register):
    cls, message = BROKEN[check]
    with pytest.raises((AssertionError, RuntimeError), match=message):
        admit(register(cls), check)


@pytest.mark.parametrize(
    ("shares", "passes"), [((1.2, 0.9), True), ((1.2, 1.2), False), ((1.6, 0.9), False)]
)
def test_what_is_just_beyond_a_bound_must_be_within_it_with_other_inputs(
    shares, passes, register, monkeypatch
):
    found = iter([share, 1.0] for share in shares)
    monkeypatch.setattr(
        parity, "errors", lambda *judged: [Error("y", share, 1.0) for share in next(found, [0.5])]
    )
    with contextlib.nullcontext() if passes else pytest.raises(AssertionError, match="y: error"):
        admit(register(Norm), "parity")


def test_a_seed_that_is_given_is_judged_once(register, monkeypatch):
    monkeypatch.setenv("MEGACPP_TEST_SEED", "3")
    judged = []
    monkeypatch.setattr(parity, "errors", lambda *_: judged.append(1) or [Error("y", 1.2, 1.0)])
    with pytest.raises(AssertionError, match="MEGACPP_TEST_SEED=3: y: error"):
        admit(register(Norm), "parity")
    assert judged == [1]


def test_a_fallback_that_is_wrong_fails(register, monkeypatch):
    subject = register(Norm, fallback="te")
    wrong = Backend("te", f"{__name__}:HalfGradient", always)
    backends = tuple(wrong if b.name == "te" else b for b in REGISTRY["norm"].backends)
    serve(monkeypatch, backends)
    with pytest.raises(AssertionError, match="dx: error"):
        admit(subject, "fallback")


def test_a_check_that_the_backend_skips_is_skipped_with_its_reason(register):
    with pytest.raises(pytest.skip.Exception, match="graph: it breaks"):
        admit(register(BreaksTheGraph, skips={"graph": "it breaks"}), "graph")


def test_a_dtype_that_the_backend_skips_is_not_asked_for(register):
    class OnlyBf16(Norm):
        def forward(self, x):
            assert x.dtype == torch.bfloat16
            return super().forward(x)

    globals()["OnlyBf16"] = OnlyBf16
    with pytest.raises(AssertionError):
        admit(register(OnlyBf16), "parity")
    admit(register(OnlyBf16, skips={"float32": "only bf16"}), "parity")


def test_what_dispatch_does_not_serve_here_is_skipped_with_its_reason():
    with pytest.raises(pytest.skip.Exception, match="not served on cpu: Transformer Engine"):
        admit(Subject("norm", "te", "cpu"), "parity")


def test_backends_skip_only_what_the_suite_has():
    known = {*CHECKS, "all", "float32", "bfloat16"}
    for surface in SURFACES:
        for backend in REGISTRY[surface].backends:
            assert set(backend.skips) <= known, (surface, backend.name)


@pytest.mark.parametrize("surface", SURFACES)
def test_every_surface_with_a_case_has_samples_for_every_check(surface):
    names = case_class(surface).samples()
    for start in ("plain", "odd", "empty"):
        assert any(name.startswith(start) for name in names)


def test_every_surface_but_linears_and_exchanges_between_ranks_has_a_case():
    assert set(REGISTRY) - set(SURFACES) == {"linear", "moe_dispatch"}
