"""Operators side by side: what is kept of a backend that fails, receipts and the command."""

import json
import os
import re
from dataclasses import replace

import pytest
import torch
from small_bench import (
    SMALL,
    WORDS,
    quick,  # noqa: F401  a fixture
)

from megacpp_mcore import bench, cli, dispatch, receipts
from megacpp_mcore.bench import clock as clocks
from megacpp_mcore.bench import layer, operator, runner
from megacpp_mcore.bench.variants import variant_of
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.norm import rms_norm
from megacpp_mcore.surfaces.backend import Backend
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.support import always
from megacpp_mcore.surfaces.workload import Workload


def bench_operator(surface, recipe, against=(), variant=None):
    return runner.run(operator.OperatorTarget(surface, recipe, against, variant), lambda said: None)


class TestRecipe:
    def test_nam56r_becomes_one_process(self):
        recipe = bench.load_for_bench("nam56r")
        assert recipe.world_size == 1 and recipe.schedule.global_batch_size == 4
        assert recipe.parallel.expert_model_parallel_size == 1
        assert recipe.parallel.use_distributed_optimizer  # one rank can have it

    def test_a_cpu_benches_the_sizes_of_the_miniature(self, tmp_path):
        out = tmp_path / "norm.json"
        assert cli.main(["bench", "norm", "--against", "reference", "--receipt", str(out)]) == 0
        assert receipts.read(out)["recipe"]["name"] == "nam56r-tiny"

    def test_what_is_asked_for_is_kept(self):
        recipe = bench.load_for_bench("nam56r", ["schedule.micro_batch_size=2", "model.depth=13"])
        assert (recipe.schedule.global_batch_size, recipe.plan.depth) == (2, 13)

    @pytest.mark.parametrize(
        "words",
        [
            ["launch.cuda_graph_impl=full_iteration"],
            ["precision.gradient_accumulation_fusion=true"],
            ["parallel.overlap_grad_reduce=true"],
            ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true",
             "launch.nproc_per_node=2", "schedule.global_batch_size=8"],
        ],
    )  # fmt: skip
    def test_what_a_bench_has_not_is_refused(self, words):
        """The receipt would say it, and nothing of it would be timed."""
        refused = pytest.raises(bench.BenchError, match=f"^{words[0]}: a bench runs in one")
        with refused:
            bench.load_for_bench("nam56r", words)
        if words[0].startswith("precision"):
            with refused:
                variant_of(bench.load_for_bench("nam56r"), f"norm=te,{words[0]}")

    def test_a_recipes_dispatcher_over_ranks_is_replaced_and_an_asked_for_one_refused(
        self, tmp_path
    ):
        path = tmp_path / "deepep.toml"
        flex = 'moe_token_dispatcher_type = "flex"'
        ranks = "[parallel]\nexpert_model_parallel_size = 8\n"
        path.write_text(f'description = "x"\nextends = "nam56r"\n{ranks}[moe]\n{flex}\n')
        recipe = bench.load_for_bench(str(path))
        assert recipe.moe.moe_token_dispatcher_type == "alltoall"
        with pytest.raises(MegacppError, match="there is nothing to exchange"):
            bench.load_for_bench("nam56r", ["moe.moe_token_dispatcher_type=flex"])


@pytest.mark.parametrize("name", ["norm", "moe_experts", "linear_cross_entropy"])
def test_a_surface_is_timed_and_the_receipt_is_valid(name, tmp_path):
    receipt, wrong = bench_operator(name, bench.load_for_bench("nam56r-tiny", SMALL))
    assert wrong == []
    receipts.write(tmp_path / "r.json", receipt)
    rows = receipts.read(tmp_path / "r.json")["rows"]
    assert [(row["backend"], row["phase"]) for row in rows] == [
        ("reference", "forward"), ("reference", "forward_backward"),
    ]  # fmt: skip
    for row in rows:
        assert len(row["samples_ms"]) >= clocks.FEWEST and row["cold_ms"] > 0
        assert row["rounds"] == [*range(row["n"])]
        assert row["flops"] > 0 and row["bytes_floor"] > 0
        assert row["error"] is None
    assert rows[1]["flops"] >= rows[0]["flops"] and rows[1]["cold_ms"] > rows[0]["cold_ms"]
    assert any(note.startswith("floors, at what the device did") for note in receipt["notes"])
    unusable = [entry for entry in receipt["backends"] if entry["observed"] is None]
    assert all(": " in entry["reason"] for entry in unusable)


def test_a_variant_of_a_surfaces_case():
    recipe = bench.load_for_bench("nam56r-tiny", SMALL)
    forms = {
        None: (True, False), "weighted": (True, False), "per_token": (False, False),
        "mean": (True, True),
    }  # fmt: skip
    for variant, form in forms.items():
        receipt, wrong = bench_operator("linear_cross_entropy", recipe, variant=variant)
        sizes = receipt["problem"]["sizes"]
        assert wrong == [] and (sizes["weighted"], sizes["even"]) == form
        known = {entry["implementation"].split(":")[1] for entry in receipt["backends"]}
        assert ("MEAN" in known) == (variant == "mean")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["linear_cross_entropy", "--variant", "sum"],
         "no variant 'sum'; its variants: weighted, per_token, mean"),
        (["norm", "--variant", "weighted"], "norm has no variant 'weighted'; its variants: none"),
        (["model", "--variant", "weighted"], "--variant is for a surface"),
    ],
)  # fmt: skip
def test_a_variant_that_is_none_is_refused(words, message, capsys):
    assert cli.main(["bench", *words, "--recipe", "nam56r-tiny"]) == 2
    assert message in capsys.readouterr().err


def test_backends_side_by_side():
    recipe = bench.load_for_bench("nam56r-tiny", SMALL)
    receipt, wrong = bench_operator("core_attention", recipe)
    assert wrong == [] and receipt["baseline"] == "sdpa"
    rows = {(row["backend"], row["phase"]): row for row in receipt["rows"]}
    assert {backend for backend, _ in rows} == {"sdpa", "reference"}
    row = rows["sdpa", "forward_backward"]
    assert 0 < row["error"] < row["tolerance"]
    assert receipt["problem"]["sizes"]["dqk"] == 32
    assert receipt["recipe"]["content"]["model"]["hidden_size"] == 32


class Norm(torch.nn.Module):
    def __init__(self, config, hidden_size, eps):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class Wrong(Norm):
    def forward(self, x):
        return super().forward(x) * 1.01


class Raises(Norm):
    def forward(self, x):
        raise KeyError("no such tile")


class NeedsTooMuch(Norm):
    def forward(self, x):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 60 GiB\nmore words")


def test_the_recipe_of_the_environment_is_the_default(monkeypatch, capsys):
    words = " ".join(f"--set {override}" for override in SMALL)
    monkeypatch.setenv("MEGACPP_RECIPE", f"nam56r-tiny {words} --set model.hidden_size=48")
    assert cli.main(["bench", "norm", "--set", "model.seq_length=16"]) == 0
    assert "batch 2, seq 16, hidden_size 48" in capsys.readouterr().out


def test_the_receipt_is_printed_as_json(capsys):
    assert cli.main(["bench", "norm", "--recipe", "nam56r-tiny", *WORDS, "--json"]) == 0
    receipt = json.loads(capsys.readouterr().out)
    assert receipt["kind"] == "bench" and receipt["problem"]["surface"] == "norm"


@pytest.mark.parametrize("asked", ["norm", "layer"])
def test_the_recipes_environment_is_set_before_the_device_starts(asked, monkeypatch):
    """CUDA and its allocator read it then. The receipt says who has set what."""
    for name in ("NOTE", "MINE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MINE", "user")
    monkeypatch.setenv("MEGACPP_BACKENDS", "norm=reference")
    seen, choose = [], dispatch.choose
    monkeypatch.setattr(
        dispatch, "choose", lambda *asked: seen.append(os.environ.get("NOTE")) or choose(*asked)
    )
    sets = ["launch.environment.NOTE=recipe", "launch.environment.MINE=recipe"]
    if asked == "layer":
        recipe = bench.load_for_bench("nam56r-tiny", [*layer.layer_overrides("A"), *SMALL, *sets])
        target = layer.LayerTarget(recipe)
    else:
        target = operator.OperatorTarget(asked, bench.load_for_bench("nam56r-tiny", SMALL + sets))
    receipt, _ = runner.run(target, lambda said: None)
    assert set(seen) == {"recipe"}
    kept = {"MINE": "user", "MEGACPP_BACKENDS": "norm=reference"}
    assert receipt["environment"] == {"applied": {"NOTE": "recipe"}, "kept": kept}


def of_tests(recipe, device):
    """What no layer asks, so that no layer is later served by an answer kept from these tests."""
    return Workload.of(device, "any")


class TestFailures:
    @pytest.fixture
    def add(self, monkeypatch):
        def add(name):
            cls = name.title().replace("_", "")
            backend = Backend(name, f"{__name__}:{cls}", always)
            backends = (backend, *REGISTRY["norm"].backends)
            norms = replace(REGISTRY["norm"], backends=backends, workload=of_tests)
            monkeypatch.setitem(REGISTRY, "norm", norms)

        return add

    @pytest.mark.parametrize(
        ("name", "reason", "fails"),
        [
            ("wrong", "wrong: ", True),
            ("raises", "KeyError: 'no such tile'", True),
            (
                "needs_too_much",
                "out of memory: CUDA out of memory. Tried to allocate 60 GiB",
                False,
            ),
        ],
    )
    def test_a_backend_that_fails_has_a_reason_and_no_times(self, add, name, reason, fails, capfd):
        add(name)
        recipe = bench.load_for_bench("nam56r-tiny", SMALL)
        receipt, wrong = bench_operator("norm", recipe)
        assert {row["backend"] for row in receipt["rows"]} == {"reference"}
        assert receipt["baseline"] == "reference"
        entry = receipt["backends"][0]
        assert entry["observed"] is None and reason in entry["reason"]
        assert bool(wrong) is fails
        if fails:
            assert wrong[0].startswith(f"{name}: ")

    def test_too_little_memory_is_a_failure_for_a_backend_that_was_named(self, add):
        add("needs_too_much")
        recipe = bench.load_for_bench("nam56r-tiny", [*SMALL, "backends.norm=reference"])
        _, wrong = bench_operator("norm", recipe, ("needs_too_much",))
        assert wrong and "out of memory" in wrong[0]

    def test_the_command_ends_with_status_1(self, add, capfd):
        add("wrong")
        assert cli.main(["bench", "norm", "--recipe", "nam56r-tiny", *WORDS]) == 1
        out, err = capfd.readouterr()
        assert re.search(r"megacpp: norm: wrong: wrong: d?(y|x|weight): error", err)
        assert "reference" in out

    def test_nothing_that_could_be_timed(self, add, monkeypatch):
        add("raises")
        norms = REGISTRY["norm"]
        only = replace(norms, backends=norms.backends[:1], workload=of_tests)
        monkeypatch.setitem(REGISTRY, "norm", only)
        recipe = bench.load_for_bench("nam56r-tiny", SMALL)
        with pytest.raises(bench.BenchFailure, match=r"no backend of norm could be timed: raises"):
            bench_operator("norm", recipe)


class TestAgainst:
    def test_the_chosen_and_the_named_ones_run_and_the_first_is_the_baseline(self):
        recipe = bench.load_for_bench("nam56r-tiny", SMALL)
        receipt, _ = bench_operator("core_attention", recipe, ("reference",))
        assert receipt["baseline"] == "reference"
        assert {row["backend"] for row in receipt["rows"]} == {"sdpa", "reference"}
        requested = {entry["implementation"].split(":")[1]: entry["requested"]
                     for entry in receipt["backends"]}  # fmt: skip
        assert requested["ReferenceCoreAttention"] == "reference"
        assert requested["SDPACoreAttention"] == "auto"

    @pytest.mark.parametrize(
        ("against", "message"),
        [
            ("te", "--against te: Transformer Engine runs on cuda only"),
            ("flash", "--against: unknown backend 'flash' of surface 'core_attention'"),
            ("auto", "--against auto: name a backend, not auto"),
        ],
    )
    def test_refusals(self, against, message):
        recipe = bench.load_for_bench("nam56r-tiny", SMALL)
        with pytest.raises(MegacppError) as caught:
            bench_operator("core_attention", recipe, (against,))
        assert message in str(caught.value)
