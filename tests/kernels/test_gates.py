"""Every surface's gate refuses wrong results: a gate that cannot is none.

What is changed are the definition's own values in the model's dtype, one tensor at a time.
"""

import dataclasses
import math

import pytest
import torch
from wrong_results import mutated

from megacpp_mcore.kernels import parity, regions
from megacpp_mcore.kernels.case import BoundBackend, case_class
from megacpp_mcore.kernels.core_attention.case import CoreAttentionCase
from megacpp_mcore.surfaces.registry import REGISTRY

SURFACES = [name for name, surface in REGISTRY.items() if surface.case]
DTYPES = (torch.float32, torch.bfloat16)
# Sums of roundings over all later tokens (mamba3.case.random_walk_bound): a right backend may be
# off by as much.
WITHIN_ROUNDINGS = {
    ("mamba3_core", torch.bfloat16, "ddt_bias", "scale, axis 0"),
    ("mamba3_scan", torch.bfloat16, "dangles", "scale, axis 0"),
}


def judged(case, dtype, seed=0):
    """Truth and the definition's values."""
    tensors = parity.drawn(case, dtype, "cpu", seed)
    truth = parity.truth_of(case, tensors, dtype, torch.float64, by_region=True)
    return truth, parity.run(case, BoundBackend(case.reference), tensors, truth.directions)


def shares(case, values, truth, dtype):
    return {error.name: error.share for error in parity.errors(case, values, truth, dtype)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("surface", SURFACES)
def test_wrong_results_are_refused(surface, dtype):
    case, missed = case_class(surface).samples()["plain"], []
    if surface.endswith("_core"):
        # Whole mixers: a parameter's gradient sums roundings of tokens. Of few tokens, one head's
        # may cancel to a hundredth of another's, and zero is then no wrong result.
        more = {"batch": 4 * case.batch} if surface == "m2rnn_core" else {}
        case = dataclasses.replace(case, seq=4 * case.seq, **more)
    truth, values = judged(case, dtype)
    _, others = judged(case, dtype, seed=1)
    assert max(shares(case, values, truth, dtype).values()) <= 1
    for name, value in values.items():
        alone = dataclasses.replace(truth, values={name: truth.values[name]})
        for kind, wrong in mutated(value, others[name]):
            (found,) = shares(case, {name: wrong}, alone, dtype).values()
            if not found > 1 and (surface, dtype, name, kind) not in WITHIN_ROUNDINGS:
                missed.append(f"{kind} of {name}: {found:.2f}")
    assert not missed, "\n".join(missed)


def test_the_small_end_of_a_causal_gradient_is_judged_too():
    """dv of the last tokens, a thousandth of the first's, may not be zero."""
    case = CoreAttentionCase(1, 1024, 2, 2, 16, 8)
    truth, values = judged(case, torch.bfloat16)
    for name in ("dk", "dv"):
        wrong = values[name].clone()
        wrong[-32:] = 0
        rest = truth.values[name]
        assert rest[-32:].abs().max() < rest.abs().max() / 10
        without = dataclasses.replace(truth, rounding={})
        assert shares(case, values | {name: wrong}, without, torch.bfloat16)[name] < 1
        assert shares(case, values | {name: wrong}, truth, torch.bfloat16)[name] > 1


def test_a_gradient_of_the_loss_with_another_sign_and_size_is_refused():
    """As it passed once: weighted, and so small that it was judged by the total."""
    case = case_class("linear_cross_entropy").samples()["plain-weighted"]
    truth, values = judged(case, torch.bfloat16)
    values["dhidden"] = values["dhidden"] * -100
    (worst, *_) = parity.errors(case, values, truth, torch.bfloat16)
    assert worst.name == "dhidden" and worst.share > 10


def test_where_nothing_is_allowed_nothing_is():
    assert regions.Distance(0.1, 0.0, "").share == math.inf
    assert regions.Distance(0.0, 0.0, "").share == 0


def test_a_factor_common_to_many_values_is_refused_below_what_each_may_be_off():
    """And a floor is of the columns that it is given for."""
    truth = torch.randn(256, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = regions.Rounding([regions.Draw.of(truth, truth)] * regions.DRAWS)
    off = truth * (1 + 0.03 * torch.randn(truth.shape).double().sign())
    assert regions.worst(off, truth, exact, 0.06).share <= 1
    assert regions.worst(truth * 1.02, truth, exact, 0.06).share > 1
    # float32's: what is common to all values may be as large as what each is off
    assert regions.worst(truth * (1 + 2e-6), truth, exact, 2.5e-6).share <= 1
    assert regions.worst(truth * (1 + 3e-6), truth, exact, 2.5e-6).share > 1
    floor, wrong = torch.zeros(64).double(), truth.clone()
    floor[:8], wrong[:, :8] = 1.0, 0.0
    assert regions.worst(wrong, truth, exact, 0.06).share > 1
    assert regions.worst(wrong, truth, exact, 0.06, 3 * floor).share <= 1
    wrong[:, 8] = 0
    assert regions.worst(wrong, truth, exact, 0.06, 3 * floor).share > 1
