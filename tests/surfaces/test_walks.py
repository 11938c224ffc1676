"""What adding a backend or a surface takes: the walks of docs/extending.md, held by the source."""

import ast
import re
from pathlib import Path

import pytest

from megacpp_mcore import catalog, dispatch
from megacpp_mcore.kernels import parity
from megacpp_mcore.kernels.case import case_class
from megacpp_mcore.kernels.norm.case import NormCase
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.recipe.source import RecipeError
from megacpp_mcore.surfaces import norm
from megacpp_mcore.surfaces.backend import REFERENCE, Backend, Surface, load, reference
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.support import always

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = sorted([*(ROOT / "megacpp_mcore").rglob("*.py"), *(ROOT / "specs").rglob("*.py")])
SHARED = {  # constants that stand for one name in every surface
    REFERENCE: "surfaces/backend.py",
    "te": "surfaces/support.py",
}
# A backend's name that is a word for something else in a module of the product.
OTHER_WORDS = {
    "cuda": None,  # the device, in any module
    "local": None,  # an implementation or a rank, in Megatron's words
    "alltoall": {"recipe/schema.py": "a value of moe_token_dispatcher_type"},
    "allgather": {"recipe/schema.py": "a value of moe_token_dispatcher_type"},
    "deepep": {"recipe/schema.py": "a value of moe_flex_dispatcher_backend"},
    "hybridep": {"recipe/schema.py": "a value of moe_flex_dispatcher_backend"},
    "te": {
        "recipe/schema.py": "a value of cross_entropy_fusion_impl",
        "layers/loss.py": "a value of cross_entropy_fusion_impl",
    },
    "megatron": {
        "hybrid/plan.py": "a key of the plan as JSON",
        "training/cpu/megatron_setup.py": "Megatron's logger",
        "commands/recipe_check.py": "a key of the answer as JSON",
        "recipe/answers_cache.py": "the package",
    },
    "triton": {
        "stack/__init__.py": "the package",
        "stack/checks.py": "the package",
        "host/ptxas.py": "the package",
        "surfaces/support.py": "the package",
        "surfaces/linear_cross_entropy.py": "the package",
        "training/gpu/rank_setup.py": "the folder of its cache",
    },
    "mamba_ssm": {
        "training/packages.py": "the package",
        "training/gpu/train.py": "the package",
        "training/gpu/precompile_part.py": "the package",
    },
    "sdpa": {"kernels/core_attention/__init__.py": "a function"},
    "sdpa_cudnn": {"kernels/core_attention/__init__.py": "a function"},
    "sdpa_flash": {"kernels/core_attention/__init__.py": "a function"},
}  # fmt: skip


def literals(path):
    tree = ast.parse(path.read_text())
    return {node.value for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)}  # fmt: skip


def test_a_backends_name_stands_in_its_surfaces_module_alone():
    names = {backend.name for surface in REGISTRY.values() for backend in surface.backends}
    homes = {f"surfaces/{surface.name}.py": {b.name for b in surface.backends}
             for surface in REGISTRY.values()}  # fmt: skip
    strangers = []
    for path in PRODUCT:
        place = path.relative_to(ROOT).as_posix().removeprefix("megacpp_mcore/")
        for name in (literals(path) & names) - homes.get(place, set()):
            elsewhere = OTHER_WORDS.get(name, {})
            if elsewhere is not None and place not in elsewhere and SHARED.get(name) != place:
                strangers.append(f"{place}: {name}")
    assert strangers == []


def test_no_module_of_the_product_takes_a_backend_by_its_place():
    """A backend that is put before another changes what `auto` takes, and nothing else."""
    by_place = re.compile(r"\.backends\[-?\d|\*\w+ = .*\.backends\b")
    assert [path.name for path in PRODUCT if by_place.search(path.read_text())] == []


def test_the_exceptions_are_still_needed():
    for name, places in OTHER_WORDS.items():
        for place in places or ():
            assert name in literals(ROOT / "megacpp_mcore" / place), (name, place)


def test_the_registry_lists_a_module_for_every_surface_and_nothing_else():
    folder = ROOT / "megacpp_mcore/surfaces"
    tree = ast.parse((folder / "registry.py").read_text())
    assert not [node for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef | ast.ClassDef)]  # fmt: skip
    with_a_surface = {p.stem for p in folder.glob("*.py") if "\nSURFACE = " in p.read_text()}
    assert with_a_surface == set(REGISTRY)


class NewNorm:
    """A backend's implementation, as `layers/norm.py` would have it."""

    def __new__(cls, config, hidden_size, eps):
        return load("megacpp_mcore.layers.norm:TorchNorm")(config, hidden_size, eps)


class TestAThrowAway:
    """A surface with a backend of its own, by its module's entry in the registry and nothing else:
    recipes, dispatch, catalog, rules and bench know it."""

    @pytest.fixture
    def surface(self, monkeypatch):
        monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)
        candidate = Backend(
            "candidate", f"{__name__}:NewNorm", always,
            opt_in=True, role="experimental", removes="nothing", fallback=REFERENCE,
            exit_when="this test ends",
            ruled_out=lambda recipe, workload: recipe.model.fp32_residual_connection and "fp32",
        )  # fmt: skip
        surface = Surface(
            "second_norm",
            (candidate, reference("megacpp_mcore.layers.norm:TorchNorm", always)),
            norm.of_recipe,
            case="megacpp_mcore.kernels.norm.case:NormCase",
        )
        monkeypatch.setitem(REGISTRY, surface.name, surface)
        dispatch.forget()
        yield surface
        dispatch.forget()

    def test_a_recipe_may_name_it(self, surface):
        recipe = load_recipe("nam56r-tiny", ["backends.second_norm=candidate"])
        workload = surface.workload(recipe, "cpu")
        assert dispatch.choose("second_norm", workload, recipe.backends).observed == "candidate"
        assert dispatch.choose("second_norm", workload).observed == REFERENCE

    def test_a_recipe_that_it_rules_out_is_refused(self, surface):
        words = ["backends.second_norm=candidate", "model.fp32_residual_connection=true"]
        with pytest.raises(RecipeError, match="must be left out, or name another: fp32"):
            load_recipe("nam56r", words)

    def test_the_catalog_has_it(self, surface):
        rows = catalog.here_and_now(load_recipe("nam56r-tiny"), "cpu", "second_norm")
        assert [(row["backend"], row["serves"], row["reason"]) for row in rows] == [
            ("candidate", False, "can serve where it is named"),
            (REFERENCE, True, "candidate: serves only where it is named"),
        ]

    def test_a_bench_finds_its_case_and_calls_it(self, surface):
        import torch

        assert case_class("second_norm") is NormCase
        case = NormCase.samples()["plain"]
        bound = case.bind(load(surface.backends[0].benched), "cpu", torch.float32)
        tensors = parity.drawn(case, torch.float32, "cpu", seed=0)
        truth = parity.truth_of(case, tensors, torch.float32, torch.float64)
        values = parity.run(case, bound, tensors, truth.directions)
        assert all(e.share < 1 for e in parity.errors(case, values, truth, torch.float32))
