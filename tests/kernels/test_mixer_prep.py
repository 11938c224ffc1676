"""The mixers' arithmetic under torch.compile: the definition's values at any length, few graphs."""

import shutil

import pytest
import torch

from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.case import case_class
from megacpp_mcore.kernels.m2rnn_prep.case import M2RNNPrepCase
from megacpp_mcore.kernels.mamba3_prep.case import Mamba3PrepCase
from megacpp_mcore.surfaces.registry import REGISTRY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("g++"), reason="no g++: Inductor cannot build for a CPU"),
]

# (batch, tokens), the first and every other: one graph for the first, one for all lengths.
ROWS = [(2, 16), (2, 24), (2, 7), (2, 33), (2, 24), (2, 19)]
CASES = {
    "mamba3_prep": (lambda b, s: Mamba3PrepCase(b, s, 6, 2, 8, decay_floor=0.6), 1),
    "m2rnn_prep": (lambda b, s: M2RNNPrepCase(b, s, 3, 5, 4, documents=2), 2),
}


@pytest.fixture
def compiling():
    """torch.compile compiles, which the CPU lane turns off; yields how many graphs it has made."""
    with torch._dynamo.config.patch(disable=False):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
        torch._dynamo.reset()


def bound(surface, case, backend):
    (found,) = (b for b in REGISTRY[surface].backends if b.name == backend)
    module, name = found.implementation.split(":")
    implementation = getattr(__import__(module, fromlist=[name]), name)
    return case.bind(implementation, "cpu", torch.float32)


def far(surface, case, backend, seed):
    tensors = parity.drawn(case, torch.float32, "cpu", seed)
    truth = parity.truth_of(case, tensors, torch.float32, torch.float64)
    values = parity.run(case, bound(surface, case, backend), tensors, truth.directions)
    return [str(e) for e in parity.errors(case, values, truth, torch.float32) if e.share > 1]


@pytest.mark.parametrize("surface", CASES)
def test_any_length_has_the_definitions_values_on_two_graphs_a_function(surface, compiling):
    build, functions = CASES[surface]
    for seed, rows in enumerate(ROWS):
        assert far(surface, build(*rows), "inductor", seed) == [], rows
        assert functions <= compiling() <= 2 * functions, rows
    assert compiling() == 2 * functions


def test_the_reference_is_never_compiled(compiling):
    for surface in CASES:
        case = case_class(surface).samples()["plain"]
        assert far(surface, case, "reference", 0) == []
    assert compiling() == 0


def test_what_no_graph_can_hold_is_an_error(compiling):
    from megacpp_mcore.kernels.inductor import compiled

    def asks_the_device(x):
        return x + 1 if x.sum().item() > 0 else x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(asks_the_device)(torch.ones(3))
