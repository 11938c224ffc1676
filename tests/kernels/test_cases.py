"""Cases ask dispatch what the layers ask, and parity tells right from wrong."""

import math

import pytest
import torch

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.case import BoundBackend, case_class
from megacpp_mcore.kernels.norm.case import NormCase
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.surfaces.registry import REGISTRY

SURFACES = [name for name, surface in REGISTRY.items() if surface.case]
GQA = ["attention.kind=gqa"]
EAGER = ["launch.cuda_graph_impl=none"]  # as a bench calls
MIMO = ["mamba3.variant=mimo"]


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [("nam56r-tiny", []), ("nam56r-tiny", GQA), ("nam56r-tiny", MIMO), ("nam56r", EAGER)],
)
def test_a_recipes_case_asks_what_its_layers_ask(surface, recipe, overrides):
    loaded = load_recipe(recipe, overrides)
    dtype = torch.bfloat16 if loaded.precision.bf16 else torch.float32
    case = case_class(surface).of(loaded)
    for device in ("cpu", "cuda"):
        workload = case.workload(device, dtype) if case else None
        assert workload == REGISTRY[surface].workload(loaded, device)


def test_nam56rs_sizes():
    recipe = load_recipe("nam56r")
    cases = {surface: case_class(surface).of(recipe) for surface in SURFACES}
    sizes = {surface: case.sizes for surface, case in cases.items() if case}
    attention = {"batch": 4, "seq": 4096, "heads": 56, "groups": 56, "dqk": 128, "dv": 64,
                 "documents": 0}  # fmt: skip
    assert sizes["core_attention"] == attention
    assert sizes["moe_experts"]["tokens"] == 4 * 4096 * 4
    assert sizes["linear_cross_entropy"]["vocab_size"] == 65536
    assert sizes["m2rnn"]["heads"] == 44 and sizes["mamba3_scan"]["heads"] == 56
    # What the baselines were measured against: 3.79 TFLOP forward and backward, causal halves.
    moe = case_class("moe_experts").of(recipe)
    assert 3 * moe.flops() == pytest.approx(3.79e12, rel=0.01)
    assert 3 * case_class("linear_cross_entropy").of(recipe).flops() == pytest.approx(
        23.1e12, rel=0.01
    )


def test_a_recipe_without_the_layer_has_no_case():
    overrides = ["model.pattern=M", "model.depth=2", "mtp.mtp_num_layers=0", "mtp.pattern="]
    recipe = load_recipe("nam56r", [*overrides, "parallel.expert_model_parallel_size=1"])
    absent = {surface for surface in SURFACES if case_class(surface).of(recipe) is None}
    assert absent == {
        "core_attention", "rope_qk", "mla_rope", "mla_up", "moe_experts", "router_gating",
        "router_topk", "m2rnn", "m2rnn_core",
    }  # fmt: skip


def test_a_surface_without_a_case_is_refused():
    with pytest.raises(MegacppError, match="surface 'linear' has no case; choose norm, "):
        case_class("linear")


@pytest.mark.parametrize("surface", SURFACES)
def test_samples_are_drawn_in_the_dtypes_of_a_bf16_model(surface):
    case = case_class(surface).samples()["plain"]
    tensors = parity.drawn(case, torch.bfloat16, "cpu", seed=0)
    for name in case.inputs:
        expected = torch.float32 if name in case.fp32_tensors else torch.bfloat16
        assert tensors[name].dtype == expected, name
    again = parity.drawn(case, torch.bfloat16, "cpu", seed=0)
    other = parity.drawn(case, torch.bfloat16, "cpu", seed=1)
    first = case.inputs[0]
    assert torch.equal(tensors[first], again[first])
    assert not torch.equal(tensors[first], other[first])


class SumCase(NormCase):
    """x + bias + residual, rounded after each sum."""

    inputs = ("x", "residual", "bias")

    def reference(self, x, residual, bias):
        return {"y": x + bias + residual}

    def roundings(self, name):
        return 2

    def terms(self, name):
        return 2

    def sums(self, directions, x, residual, bias):
        return {"y": float((x.abs() + residual.abs() + bias.abs()).amax())}


class TestErrors:
    """On the norm: what is found, and what it is called."""

    case = NormCase(2, 8, 16)

    def found(self, change, dtype=torch.float32):
        tensors = parity.drawn(self.case, dtype, "cpu", seed=0)
        truth = parity.truth_of(self.case, tensors, dtype, torch.float64)
        bound = BoundBackend(lambda **given: change(self.case.reference(**given)))
        values = parity.run(self.case, bound, tensors, truth.directions)
        return {error.name: error for error in parity.errors(self.case, values, truth, dtype)}

    def test_the_definition_is_within_its_own_tolerance(self):
        for dtype in (torch.float32, torch.bfloat16):
            errors = self.found(lambda y: y, dtype)
            assert errors.keys() == {"y", "residual", "dx", "dweight"}
            assert all(error.share < 1 for error in errors.values())

    def test_a_bf16_rounding_in_a_float32_result_is_found(self):
        errors = self.found(lambda y: {"y": y["y"].bfloat16().float()})
        assert errors["y"].share > 1 and "error" in str(errors["y"])

    def test_a_thousandth_of_a_gradient_is_found(self):
        errors = self.found(lambda y: {"y": y["y"] * 1.001 - y["y"].detach() * 0.001})
        assert errors["y"].share < 1
        assert errors["dx"].share > 1 and errors["dweight"].share > 1

    @pytest.mark.parametrize(
        ("change", "name", "what"),
        [
            (lambda y: {"y": y["y"] / 0}, "y", "256 of 256 values are not finite"),
            (lambda y: {"y": y["y"].double()}, "y", "torch.float64, expected torch.float32"),
            (lambda y: {"y": y["y"].detach() + (y["y"] * 0).sum()}, "dx", "error 1.0"),
        ],
    )
    def test_what_is_wrong_is_named(self, change, name, what):
        assert what in str(self.found(change)[name])

    def test_a_missing_gradient_is_infinitely_wrong(self):
        tensors = parity.drawn(self.case, torch.float32, "cpu", seed=0)
        truth = parity.truth_of(self.case, tensors, torch.float32, torch.float64)
        values = {n: v.float() for n, v in truth.values.items() if n != "dx"}
        (worst, *_) = parity.errors(self.case, values, truth, torch.float32)
        assert (worst.name, worst.error, worst.what) == ("dx", math.inf, "there is none")

    def test_a_truth_that_cancels_is_judged_by_the_other_values(self):
        truth = parity.Truth({"y": torch.ones(2).double(), "dx": torch.tensor([1e-17]).double()},
                             {"y": torch.ones(2)})  # fmt: skip
        values = {"y": torch.ones(2), "dx": torch.tensor([2e-8])}
        found = {e.name: e for e in parity.errors(self.case, values, truth, torch.float32)}
        assert found["dx"].error == pytest.approx(2e-8)

    def test_terms_that_cancel_have_the_size_of_the_terms(self):
        """2 + 1.0078125 is 3 in bf16: all that is left of it beside -3 is lost."""
        case = SumCase(1, 1, 5)
        tensors = {"x": 2.0, "bias": 1.0078125, "residual": -3.0}
        tensors = {name: torch.full((1, 1, 5), value).bfloat16() for name, value in tensors.items()}
        tensors["bias"] = tensors["bias"][0, 0]
        truth = parity.truth_of(case, tensors, torch.bfloat16, torch.float64)
        bound = BoundBackend(lambda x, residual, bias: {"y": (x + bias) + residual})
        values = parity.run(case, bound, tensors, truth.directions)
        found = {e.name: e for e in parity.errors(case, values, truth, torch.bfloat16)}
        assert found["y"].error > 0 and found["y"].share <= 1
        values["y"] += 0.125
        assert parity.errors(case, values, truth, torch.bfloat16)[0].share > 1

    def test_parameters_of_a_backend_get_the_values_and_give_the_gradients(self):
        """As two slices of one tensor, the way experts hold their weights."""
        slices = [torch.nn.Parameter(torch.zeros(8)) for _ in range(2)]
        bound = BoundBackend(lambda x, weight: {"y": x * torch.cat(slices)}, {"weight": slices})
        tensors = parity.drawn(self.case, torch.float32, "cpu", seed=0)
        directions = {"y": torch.ones(8, 2, 16)}
        values = parity.run(self.case, bound, tensors, directions)
        assert torch.equal(values["y"], tensors["x"] * tensors["weight"])
        torch.testing.assert_close(values["dweight"], tensors["x"].sum((0, 1)))
