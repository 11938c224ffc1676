"""The bench: turns and times, what is kept of a backend that fails, receipts and the command."""

import functools
import itertools
import json
import os
import re
import sys
import time
from dataclasses import replace

import pytest
import torch

from megacpp_mcore import bench, cli, dispatch, receipts
from megacpp_mcore.bench import clock as clocks
from megacpp_mcore.bench import layer, model, operator, runner
from megacpp_mcore.bench.variants import Variant
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.norm import rms_norm
from megacpp_mcore.surfaces.backend import Backend
from megacpp_mcore.surfaces.registry import REGISTRY
from megacpp_mcore.surfaces.support import always
from megacpp_mcore.surfaces.workload import Workload
from megacpp_mcore.training import one_process
from megacpp_mcore.training.cpu.megatron_setup import single_process

SMALL = [
    "model.hidden_size=32", "model.seq_length=32", "model.num_attention_heads=4",
    "schedule.micro_batch_size=2", "schedule.global_batch_size=2", "m2rnn.k_head_dim=8",
]  # fmt: skip


@functools.cache
def rates_once(device, dtype):
    return clocks.measure_rates(clocks.clock_for(device), dtype)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Few samples, this machine's rates measured once, and the environment as it was."""
    monkeypatch.setattr(
        operator, "measure_rates", lambda clock, dtype: rates_once(clock.device, dtype)
    )
    monkeypatch.setattr(operator, "_SECONDS_A_PHASE", 0.01)
    monkeypatch.setattr(model, "_SECONDS_A_PHASE", 0.01)
    monkeypatch.setattr(layer, "_SECONDS_A_PHASE", 0.01)
    for name in ("MEGACPP_RECIPE", "MEGACPP_BACKENDS", "RANK", "WORLD_SIZE", "LOCAL_RANK",
                 "PET_NNODES", "PET_NPROC_PER_NODE"):  # fmt: skip
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    dispatch.forget()


def bench_operator(surface, recipe, against=(), variant=None):
    return runner.run(operator.OperatorTarget(surface, recipe, against, variant), lambda said: None)


class FakeClock(clocks.Clock):
    """A call takes as long as it says; what was asked is kept."""

    device = "cpu"

    def __init__(self):
        self.taken = []

    def wait(self):
        pass

    def cold(self, call):
        return call()

    def sample(self, call):
        milliseconds = call()
        self.taken.append(milliseconds)
        return milliseconds


class TestTurns:
    def test_calls_take_turns_and_slow_ones_fewer(self):
        clock = FakeClock()
        samples = clocks.interleave(clock, {"a": lambda turn: 10.0, "b": lambda turn: 40.0}, 0.8)
        assert {name: len(taken.ms) for name, taken in samples.items()} == {"a": 40, "b": 10}
        # b comes every fourth round, before or after the a of that round
        rounds = [clock.taken[start : start + 5] for start in range(0, 50, 5)]
        assert all(taken.count(40.0) == 1 for taken in rounds)
        assert {taken.index(40.0) for taken in rounds} == {0, 1}
        assert samples["a"].rounds == [*range(40)] and samples["b"].rounds == [*range(0, 40, 4)]

    def test_calls_meet_in_as_many_rounds_as_the_slower_one_is_in(self):
        calls = {
            name: lambda turn, ms=ms: ms for name, ms in (("a", 19.0), ("b", 24.0), ("c", 90.0))
        }
        taken = clocks.interleave(FakeClock(), calls, 2.0)
        a, b, c = (taken[name].rounds for name in "abc")
        assert len(a) > len(b) > len(c) and {*c} < {*b} < {*a}
        # and evenly: no stretch of three times the mean distance is without the slowest
        assert max(after - before for before, after in itertools.pairwise(c)) < 3 * len(a) / len(c)

    def test_never_fewer_than_a_comparison_needs_nor_more_than_enough(self):
        calls = {"slow": lambda turn: 1e6, "fast": lambda turn: 1e-6}
        samples = clocks.interleave(FakeClock(), calls, 1.0)
        assert {n: len(s.ms) for n, s in samples.items()} == {
            "slow": clocks.FEWEST, "fast": clocks.MOST,
        }  # fmt: skip

    def test_inputs_rotate_and_the_first_calls_are_not_samples(self):
        turns = []
        clocks.interleave(FakeClock(), {"a": lambda turn: turns.append(turn) or 200.0}, 1.0)
        assert turns[:2] == [0, 1]
        assert turns[2:] == [1, 2, 3, 4, 5]

    def test_the_hosts_clock_measures(self):
        clock = clocks.clock_for("cpu")
        assert 9 < clock.sample(lambda: time.sleep(0.01)) < 100
        assert clock.peak_memory_bytes(lambda: None) is None

    def test_cuda_events_stand_behind_a_pause_as_long_as_the_host_needs(self, monkeypatch):
        """The queue, as the device would see it."""
        queue, host_s = [], 0.004

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                queue.append("event")

            def elapsed_time(self, end):
                return 1.25

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: queue.append("wait"))
        monkeypatch.setattr(torch.cuda, "_sleep", queue.append)
        clock = clocks.clock_for("cuda")

        def call():
            queue.append("call")
            time.sleep(host_s)

        assert clock.sample(call) == clock.sample(call) == 1.25
        waits = [index for index, entry in enumerate(queue) if entry == "wait"]
        first, second = queue[: waits[1] + 1], queue[waits[1] + 1 :]
        for order, at_least_ms in ((first, 1.0), (second, 1.5 * host_s * 1000)):
            kinds = [entry if isinstance(entry, str) else "pause" for entry in order]
            assert kinds == ["wait", "pause", "event", "call", "event", "wait"]
            assert order[1] >= at_least_ms * 2e6

    def test_the_floor_is_the_longer_of_operations_and_bytes(self):
        rates = clocks.Rates(flops_per_s=1e12, bytes_per_s=1e9)
        assert rates.floor_ms(2e9, 0) == pytest.approx(2.0)
        assert rates.floor_ms(2e9, 5e6) == pytest.approx(5.0)
        assert str(rates) == "1 TFLOP/s, copy 1 GB/s"

    def test_rates_of_this_machine(self):
        rates = clocks.measure_rates(clocks.clock_for("cpu"), torch.float32)
        assert 1e8 < rates.flops_per_s < 1e14 and 1e8 < rates.bytes_per_s < 1e12


class TestRecipe:
    def test_nam56r_becomes_one_process(self):
        recipe = bench.load_for_bench("nam56r")
        assert recipe.world_size == 1 and recipe.schedule.global_batch_size == 4
        assert recipe.parallel.expert_model_parallel_size == 1
        assert recipe.parallel.use_distributed_optimizer  # one rank can have it

    def test_what_is_asked_for_is_kept(self):
        recipe = bench.load_for_bench("nam56r", ["schedule.micro_batch_size=2", "model.depth=13"])
        assert (recipe.schedule.global_batch_size, recipe.plan.depth) == (2, 13)

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
    words = [word for override in SMALL for word in ("--set", override)]
    assert cli.main(["bench", "norm", "--recipe", "nam56r-tiny", *words, "--json"]) == 0
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
        words = [word for override in SMALL for word in ("--set", override)]
        assert cli.main(["bench", "norm", "--recipe", "nam56r-tiny", *words]) == 1
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


def missing_package(package):
    raise ImportError("No module named 'tomlkit'")


def times(factor):
    return lambda x: factor * x


def gradient_times(factor):
    """The values as they are."""
    return lambda x: x + (factor - 1) * (x - x.detach())


class TestLayer:
    words = tuple(word for override in SMALL for word in ("--set", override))

    def bench(self, path, *arguments):
        status = cli.main(["bench", "layer", *arguments, "--recipe", "nam56r-tiny", *self.words,
                           "--receipt", str(path)])  # fmt: skip
        return status, json.loads(path.read_text())

    @pytest.mark.parametrize(("name", "pattern"), [("*", "*"), ("M", "M"), ("R", "G"), ("E", "E")])
    def test_every_layer_has_both_phases(self, name, pattern, tmp_path):
        status, receipt = self.bench(tmp_path / "layer.json", name)
        assert status == 0 and receipt["problem"]["sizes"]["pattern"] == pattern
        forward, backward = receipt["rows"]
        assert (forward["phase"], backward["phase"]) == ("forward", "forward_backward")
        assert backward["flops"] == 3 * forward["flops"] > 0

    def test_inputs_are_not_the_rows_of_a_weight(self):
        """One seed for both makes them the same numbers on a CPU."""
        recipe = bench.load_for_bench("nam56r-tiny", [*layer.layer_overrides("M"), *SMALL])
        with single_process(recipe.schedule.seed, "cpu"):
            built = layer._Layer("recipe", Variant(recipe), "cpu")
        x = torch.nn.functional.normalize(built.sets[0].flatten(0, -2), dim=-1)
        width = x.shape[-1]
        weights = [p for p in built.model.parameters() if p.dim() == 2 and p.shape[1] == width]
        rows = torch.nn.functional.normalize(torch.cat(weights), dim=-1)
        assert len(rows) > 500 and (x @ rows.T).abs().max() < 0.9

    def test_backends_inside_an_mla_layer_with_the_same_weights(self, tmp_path):
        against = ["mla_rope=megatron,core_attention=reference", "mla_rope=reference"]
        status, receipt = self.bench(tmp_path / "layer.json", "A", "--against", *against)
        assert status == 0 and receipt["baseline"] == against[0]
        assert {row["backend"] for row in receipt["rows"]} == {"recipe", *against}
        observed = {(b["surface"], b["observed"]) for b in receipt["backends"]}
        expected = {"mla_rope": ("megatron", "reference"), "core_attention": ("sdpa", "reference")}
        assert {(surface, name) for surface in expected for name in expected[surface]} <= observed
        for row in receipt["rows"]:
            is_baseline = row["backend"] == against[0]
            assert (row["error"] is None) == is_baseline
            assert is_baseline or 0 < row["error"] <= row["tolerance"] < 1e-4

    @pytest.mark.parametrize("change", [times(1.01), times(float("nan")), gradient_times(1.05)])
    def test_a_backend_that_is_wrong(self, change, tmp_path, monkeypatch, capsys):
        from megacpp_mcore.kernels.mla_rope import unfused

        def wrong(*args, right=unfused.mla_rope, **options):
            return tuple(map(change, right(*args, **options)))

        surface = REGISTRY["mla_rope"]
        entry = Backend("wrong", "megacpp_mcore.kernels.mla_rope.unfused:wrong", always)
        monkeypatch.setattr(unfused, "wrong", wrong, raising=False)
        backends = (*surface.backends, entry)
        monkeypatch.setitem(REGISTRY, "mla_rope", replace(surface, backends=backends))
        dispatch.forget()
        status, receipt = self.bench(tmp_path / "layer.json", "A", "--against", "mla_rope=wrong")
        assert status == 1 and "recipe: " in capsys.readouterr().err
        assert all(r["error"] > r["tolerance"] for r in receipt["rows"] if r["error"] is not None)

    def test_packed_documents(self, tmp_path):
        packed = ["--set", "data.dataloader_inter_document_masking=true"]
        status, receipt = self.bench(tmp_path / "layer.json", "+", *packed)
        assert status == 0 and receipt["problem"]["sizes"]["documents_a_row"] == 8

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["layer", "Q"], "layer 'Q' is unknown; choose A, +, "),
            (["layer"], "takes the name of a layer"),
            (["norm", "A"], "takes the name of a layer"),
            (["layer", "A", "--against", "mla_rope=fast"], "unknown backend 'fast'"),
            (["layer", "A", "--against", "te"], "not of the form surface=backend"),
        ],
    )
    def test_refusals(self, arguments, message, capsys):
        assert cli.main(["bench", *arguments, "--recipe", "nam56r-tiny", *self.words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
class TestCommand:
    def test_a_model_step(self, tmp_path, capsys):
        path = tmp_path / "model.json"
        words = [word for override in SMALL for word in ("--set", override)]
        status = cli.main(["bench", "model", "--recipe", "nam56r-tiny", "--layers", "2", *words,
                           "--receipt", str(path)])  # fmt: skip
        out = capsys.readouterr().out
        assert status == 0 and "tokens/s" in out
        receipt = json.loads(path.read_text())
        assert [row["phase"] for row in receipt["rows"]] == ["forward", "forward_backward", "step"]
        assert receipt["problem"]["sizes"]["pattern"] == "+E/+E"
        assert receipt["problem"]["sizes"]["tokens"] == 64
        observed = {entry["surface"]: entry["observed"] for entry in receipt["backends"]}
        assert observed["core_attention"] == "sdpa"
        forward, backward, step = (row["flops"] for row in receipt["rows"])
        assert backward == step == 3 * forward > 0

    @pytest.mark.parametrize(
        ("change", "wrong"), [(times(1.0), False), (times(1.1), True), (gradient_times(1.05), True)]
    )
    def test_models_side_by_side(self, change, wrong, tmp_path, monkeypatch, capsys):
        """With the same weights; a model whose loss or gradients are others is wrong."""
        from megacpp_mcore.kernels.mla_rope import unfused

        def changed(*args, right=unfused.mla_rope, **options):
            return tuple(map(change, right(*args, **options)))

        surface = REGISTRY["mla_rope"]
        entry = Backend("changed", "megacpp_mcore.kernels.mla_rope.unfused:changed", always)
        monkeypatch.setattr(unfused, "changed", changed, raising=False)
        backends = (*surface.backends, entry)
        monkeypatch.setitem(REGISTRY, "mla_rope", replace(surface, backends=backends))
        dispatch.forget()
        path, other = tmp_path / "model.json", "mla_rope=changed"
        words = [word for override in SMALL for word in ("--set", override)]
        status = cli.main(["bench", "model", "--recipe", "nam56r-tiny", "--layers", "1", *words,
                           "--against", other, "--receipt", str(path)])  # fmt: skip
        receipt = json.loads(path.read_text())
        assert receipt["baseline"] == other
        phases = ("forward", "forward_backward", "step")
        rows = {(row["backend"], row["phase"]): row for row in receipt["rows"]}
        assert list(rows) == [(name, phase) for phase in phases for name in ("model", other)]
        observed = {b["observed"] for b in receipt["backends"] if b["surface"] == "mla_rope"}
        assert observed == {"megatron", "changed"}
        row = rows["model", "step"]
        assert (status, row["error"] > row["tolerance"]) == (int(wrong), wrong)
        assert ("from mla_rope=changed, allowed" in capsys.readouterr().err) == wrong
        assert rows[other, "step"]["error"] is None

    def test_a_model_beside_itself_with_another_key(self, tmp_path, monkeypatch):
        from megacpp_mcore.bench import model

        path, other = tmp_path / "model.json", "recompute.mamba3=mixer,mamba3_scan=reference"
        built = []
        build = model.build
        monkeypatch.setattr(model, "build", lambda c: built.append(build(c)) or built[-1])
        words = [word for override in SMALL for word in ("--set", override)]
        status = cli.main(["bench", "model", "--recipe", "nam56r-tiny", *words, "--layers", "1",
                           "--set", "model.pattern=M", "--against", other,
                           "--receipt", str(path)])  # fmt: skip
        receipt = json.loads(path.read_text())
        assert (status, receipt["baseline"]) == (0, other)
        assert receipt["recipe"]["content"]["recompute"]["mamba3"] is None
        mixers = [model.decoder.layers[0].mixer for model, _ in built]
        assert [mixer.recompute for mixer in mixers] == [None, "mixer"]
        assert [r["backend"] for r in receipt["rows"] if r["error"] == 0] == ["model"] * 3

    def test_a_step_that_fails_leaves_the_other_rows_and_status_1(self, monkeypatch, capfd):
        def fails(bare, args):
            raise RuntimeError("no optimizer today")

        monkeypatch.setattr(one_process, "on_cpu", fails)
        words = [word for override in SMALL for word in ("--set", override)]
        status = cli.main(["bench", "model", "--recipe", "nam56r-tiny", "--layers", "1", *words])
        out, err = capfd.readouterr()
        assert status == 1 and "no step: RuntimeError: no optimizer today" in err
        assert "forward_backward" in out

    def test_a_spec_that_cannot_be_imported_is_refused(self, monkeypatch, capsys):
        """Megatron would build its own stack of Transformer Engine's layers without a word."""
        import megacpp_mcore.training.gpu.model  # noqa: F401  imports our stack, but not the spec

        monkeypatch.setitem(sys.modules, "megacpp_mcore.layers.hybrid_stack", None)
        monkeypatch.delitem(sys.modules, "megacpp_mcore.specs.nam56r", raising=False)
        words = [word for override in SMALL for word in ("--set", override)]
        assert cli.main(["bench", "model", "--recipe", "nam56r-tiny", *words]) == 2
        assert "megacpp_mcore.specs.nam56r cannot be used" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["norms"], "surface 'norms' has no case; choose norm, router_gating, "),
            (["linear"], "surface 'linear' has no case"),
            (["norm", "--layers", "3"], "--layers and --no-optimizer are for `megacpp bench"),
            (["model", "--against", "te"], "not of the form surface=backend"),
            (["model", "--against", "moe.num_experts=8"], "precision and recompute can, and"),
            (["model", "--against", "precision.fp9=hybrid"], "unknown key 'precision.fp9'"),
            (["model", "--against", "precision.bf16=false,norm=fast"], "unknown backend 'fast'"),
            (["model", "--layers", "0"], "--layers 0: at least 1 is needed"),
            (["norm", "--recipe", "nam57"], "unknown recipe 'nam57'"),
            (["m2rnn", "--recipe", "nam56r-tiny", "--set", "model.pattern=AE", "--set",
              "model.depth=2"], "recipe nam56r-tiny has no layer for a bench of m2rnn"),
        ],
    )  # fmt: skip
    def test_refusals(self, arguments, message, capsys):
        assert cli.main(["bench", *arguments]) == 2
        assert message in capsys.readouterr().err

    def test_without_jsonschema_it_says_so_before_anything_runs(self, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "jsonschema", None)
        assert cli.main(["bench", "norm", "--recipe", "nam56r-tiny"]) == 2
        assert "jsonschema is not installed" in capsys.readouterr().err
