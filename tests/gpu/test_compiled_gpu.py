"""The mixers' arithmetic on Inductor, named in the recipe: losses, gradients, graphs, documents."""

import pytest
import torch
from recompute_slice import GPU_SIZES, train_once

from megacpp_mcore import dispatch
from megacpp_mcore.dispatch import DispatchError
from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.m2rnn_prep.case import M2RNNPrepCase
from megacpp_mcore.kernels.mamba3_prep.case import Mamba3PrepCase
from megacpp_mcore.recipe import load_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

SIZES = [*GPU_SIZES, "model.pattern=MRM", "model.depth=3"]
NAMED = ["backends.mamba3_prep=inductor", "backends.m2rnn_prep=inductor"]
AGAIN = ["recompute.mamba3=mixer", "recompute.m2rnn=core"]
FP8 = ["precision.fp8=hybrid", "precision.fp8_recipe=tensorwise"]
# Some 16 roundings to bf16 a block, there and back, in each of the two; independent ones turn a
# vector by the root of their number times half an epsilon.
FAR = (2 * 3 * 2 * 16) ** 0.5 * torch.finfo(torch.bfloat16).eps / 2


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    dispatch.forget()
    yield
    dispatch.forget()


def trained(*overrides):
    return train_once(load_recipe("nam56r-tiny", [*SIZES, *overrides]), "cuda")[0]


@pytest.mark.parametrize("more", [[], AGAIN, FP8], ids=["plain", "again", "fp8"])
def test_losses_and_gradients_are_those_of_the_plain_model(more):
    precision = FP8 if more is FP8 else []
    expected = trained(*precision)
    dispatch.forget()
    found = trained(*NAMED, *more)
    served = {d.surface: (d.requested, d.observed) for d in dispatch.decisions()}
    assert served["mamba3_prep"] == served["m2rnn_prep"] == ("inductor", "inductor")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        distance = (found[name].float() - value.float()).norm()
        assert distance <= FAR * value.float().norm(), name


@pytest.mark.parametrize("build", [
    lambda b, s: (Mamba3PrepCase(b, s, 56, 8, 64), "mamba3_prep", 1),
    lambda b, s: (M2RNNPrepCase(b, s, 44, 64, 16, documents=5), "m2rnn_prep", 2),
], ids=["M", "R"])  # fmt: skip
def test_rows_of_any_length_are_served_by_two_graphs_a_function(build):
    """At NAM56R's widths; packed documents of R, whose number and lengths no graph knows."""
    for seed, tokens in enumerate((1024, 384, 1000, 77, 1024)):
        case, surface, functions = build(1, tokens)
        problem = case.workload("cuda", torch.bfloat16)
        implementation = dispatch.choose(surface, problem, {surface: "inductor"}).load()
        tensors = parity.drawn(case, torch.bfloat16, "cuda", seed)
        truth = parity.truth_of(case, tensors, torch.bfloat16, torch.float64)
        bound = case.bind(implementation, "cuda", torch.bfloat16)
        values = parity.run(case, bound, tensors, truth.directions)
        errors = parity.errors(case, values, truth, torch.bfloat16)
        assert [str(e) for e in errors if e.share > 1] == [], tokens
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2 * functions


def test_what_cannot_be_compiled_is_refused_with_the_reason(monkeypatch):
    case = Mamba3PrepCase(1, 8, 4, 2, 8)
    problem = case.workload("cuda", torch.bfloat16)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(DispatchError, match="switched off in this process; unset"):
        dispatch.choose("mamba3_prep", problem, {"mamba3_prep": "inductor"})
