"""`megacpp recipe plan`: legal layouts, what memory does as they change, refusals, both outputs."""

import dataclasses
import importlib
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from megacpp_mcore.cli import main
from megacpp_mcore.hybrid import letters
from megacpp_mcore.hybrid.letters.experts import routed_rows
from megacpp_mcore.planner import PlanError
from megacpp_mcore.planner.activations import Sizes, bytes_per_token
from megacpp_mcore.planner.memory import kept_of_stage, memory
from megacpp_mcore.planner.pipeline import layers_of, micro_batches, name_of, planned_of
from megacpp_mcore.planner.rates import h200
from megacpp_mcore.planner.search import RECOMPUTE, plan, words_of
from megacpp_mcore.planner.step import Link, adding_gradients, flops_of, micro_batch, step
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.recipe.check import check

EXAMPLES = Path(__file__).parents[2] / "examples"
GIB = 2**30
RATES = h200()
SMALL = ("model.depth=12",)  # as many layers as the pattern has letters


def planned(gpus, overrides=(), name="nam56r", nodes=None, budget=RATES.usable_memory):
    return plan(name, overrides, gpus, nodes, budget, RATES)


@pytest.fixture(scope="module")
def four():
    return planned(4)


@pytest.mark.parametrize(
    ("name", "gpus", "overrides"),
    [
        ("nam56r", 4, ()),
        ("nam56r", 2, ("parallel.overlap_param_gather=false", *SMALL)),
        ("nam56r-quarter", 2, ("attention.kind=gqa",)),
        ("nam56r-quarter", 3, ("schedule.global_batch_size=48",)),
        ("nam56r", 4, ("launch.cuda_graph_impl=full_iteration",
                       "schedule.check_for_nan_in_loss_and_grad=false", *SMALL)),
    ],
)  # fmt: skip
def test_every_layout_loads_with_its_words_and_is_what_was_measured(name, gpus, overrides):
    found = planned(gpus, overrides, name)
    assert found.layouts
    for layout in found.layouts:
        loaded = load_recipe(name, (*overrides, *layout.words))
        assert loaded == layout.recipe
        assert loaded.world_size == gpus
        assert memory(loaded, RATES["skew"]) == layout.memory
        assert step(loaded, RATES) == layout.step
        assert layout.memory.total <= found.budget
    times = [layout.step.total for layout in found.layouts]
    assert times == sorted(times)


def test_megatrons_own_validation_takes_a_layout_of_each_kind(four):
    """What the recipe's rules leave to Megatron, the search does not ask for."""
    kinds = {}
    for layout in four.layouts:
        p = layout.recipe.parallel
        kind = (p.tensor_model_parallel_size, p.expert_tensor_parallel_size,
                layout.recipe.plan.pp, p.expert_model_parallel_size > 1)  # fmt: skip
        kinds.setdefault(kind, layout)
    tight = planned(4, budget=52 * GIB).layouts
    kinds |= {layout.recompute: layout for layout in tight}
    recipes = [load_recipe("nam56r", layout.words) for layout in kinds.values()]
    assert {"inner", "full"} <= kinds.keys()
    with warm.as_sys_executable():
        reports = check(recipes)
    assert [report.refused for report in reports] == [None] * len(recipes)


def test_an_unconnected_recipe_gets_the_variable_that_tensor_parallelism_needs():
    name = "launch.environment.CUDA_DEVICE_MAX_CONNECTIONS"
    for layout in planned(2, (f"{name}=32",)).layouts:
        split = layout.recipe.parallel.tensor_model_parallel_size > 1
        assert (f"{name}=1" in layout.words) == split


def test_layouts_of_every_kind_are_among_them(four):
    seen = {
        key: {layout.recipe.get(key) for layout in four.layouts}
        for key in (
            "parallel.expert_model_parallel_size",
            "parallel.tensor_model_parallel_size",
            "parallel.pipeline_model_parallel_size",
            "schedule.micro_batch_size",
            "parallel.use_distributed_optimizer",
        )
    }
    assert list(map(len, seen.values())) == [3, 3, 3, 5, 2]
    assert {layout.recipe.plan.vpp for layout in planned(8, ("model.depth=16",)).layouts} == {
        1, 2, 4,
    }  # fmt: skip


@pytest.mark.parametrize("bf16", [True, False])
def test_a_layout_does_not_change_the_numbers_of_a_run(bf16):
    key = "precision.grad_reduce_in_bf16"
    found = planned(2, (f"{key}={str(bf16).lower()}",)).layouts
    assert {layout.recipe.precision.grad_reduce_in_bf16 for layout in found} == {bf16}
    assert not any(key in word for layout in found for word in layout.words)


def test_where_nothing_fits_the_gradients_in_bf16_are_named():
    key = "precision.grad_reduce_in_bf16"

    def said(*overrides):
        with pytest.raises(PlanError) as error:
            plan("nam56r", overrides, 1, None, 60 * GIB, RATES)
        return str(error.value)

    fp32, bf16 = said(), said(f"{key}=true")
    needed, halved = (float(re.search(r"takes ([\d.]+) GiB", text)[1]) for text in (fp32, bf16))
    assert f", and {halved} GiB with --set {key}=true, which changes the numbers" in fp32
    assert needed - halved == pytest.approx(
        2 * memory(load_recipe("nam56r"), 0).parameters / GIB, abs=0.1
    )
    assert "changes the numbers" not in bf16


def test_one_host_of_h200s_needs_no_expert_parallelism(four):
    assert four.layouts[0].recipe.parallel.expert_model_parallel_size == 1


def at(*words):
    recipe = load_recipe("nam56r", words)
    return memory(recipe, RATES["skew"])


def layout(gpus, ep=1, **more):
    words = {
        "launch.nproc_per_node": gpus,
        "parallel.expert_model_parallel_size": ep,
        "schedule.micro_batch_size": 1,
    }
    return words_of(words | {key.replace("__", "."): value for key, value in more.items()})


def test_more_data_parallel_ranks_never_take_more_memory():
    sizes = [at(*layout(gpus)).total for gpus in (1, 2, 4, 8, 16, 32)]
    assert sizes == sorted(sizes, reverse=True)
    whole = [
        at(*layout(gpus, parallel__use_distributed_optimizer=False,
                   parallel__overlap_param_gather=False)).total
        for gpus in (2, 4, 8)
    ]  # fmt: skip
    assert len(set(whole)) == 1


def test_expert_parallelism_lowers_weights_and_gradients():
    found = [at(*layout(16, ep)) for ep in (1, 2, 4, 8, 16)]
    for part in ("parameters", "weights", "gradients"):
        sizes = [getattr(memory, part) for memory in found]
        assert sizes == sorted(sizes, reverse=True)
        assert len(set(sizes)) == len(sizes)


def test_each_recomputation_keeps_less_and_takes_longer():
    recipes = [load_recipe("nam56r", words_of(keys)) for keys in RECOMPUTE.values()]
    kept = [sum(memory(recipe, 0.0).activations.values()) for recipe in recipes]
    # The GPU's: a step that recomputes is not captured, and may be as long as the host's launches.
    times = [sum(micro_batch(recipe, RATES, Sizes.of(recipe), 0).values()) for recipe in recipes]
    assert all(more > less for more, less in itertools.pairwise(kept))
    assert times == sorted(times)


def test_tensor_and_pipeline_parallelism_divide_the_model():
    whole = at(*layout(4))
    halves = [
        at(*layout(4, parallel__pipeline_model_parallel_size=2)),
        at(*layout(4, parallel__tensor_model_parallel_size=2, parallel__sequence_parallel=True)),
    ]
    for half in halves:
        assert 0.5 * whole.parameters < half.parameters < 0.6 * whole.parameters


def test_the_products_of_a_step_are_the_same_on_tensor_and_data_parallel_ranks():
    words = "launch.nproc_per_node=2", "schedule.global_batch_size=8"
    tp = "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"
    both = (load_recipe("nam56r", (*words, *own, "launch.cuda_graph_impl=none"))
            for own in ((), (*tp, "launch.environment.CUDA_DEVICE_MAX_CONNECTIONS=1")))  # fmt: skip
    data, tensor = (step(recipe, RATES).products for recipe in both)
    assert tensor == pytest.approx(data)


def test_gradients_that_are_all_reduced_travel_twice():
    """In fp32 there and back, where sharded ones go there and weights come back in bf16."""
    apart = [f"parallel.{key}=false" for key in ("overlap_grad_reduce", "overlap_param_gather")]
    words = ["launch.nproc_per_node=2", "schedule.global_batch_size=8", *apart]
    whole, sharded = (
        step(load_recipe("nam56r", [*words, f"parallel.use_distributed_optimizer={value}"]), RATES)
        for value in ("false", "true")
    )
    assert whole.data_parallel == pytest.approx(4 / 3 * sharded.data_parallel, rel=0.01)


def test_a_slow_hop_lengthens_the_pipelines_sends():
    recipe = load_recipe("nam56r", layout(2, parallel__pipeline_model_parallel_size=2))
    hop = RATES.assumed["nvlink_latency"] | {"value": RATES["nvlink_latency"] + 1.0}
    slow = dataclasses.replace(RATES, assumed={**RATES.assumed, "nvlink_latency": hop})
    more = step(recipe, slow).pipeline - step(recipe, RATES).pipeline
    # A micro batch's activations are sent, and its gradients; the bubble has one micro batch more,
    # in which the host is no longer late.
    assert 2 * micro_batches(recipe) < more <= 2 * (micro_batches(recipe) + 1)


def test_links_between_hosts_are_slower_and_each_hop_costs():
    recipe = load_recipe("nam56r", ["launch.nnodes=8", "schedule.micro_batch_size=1"])
    inside, across = Link.of(recipe, RATES, 8, 1), Link.of(recipe, RATES, 8, 8)
    assert inside.ring(1e9) < across.ring(1e9)
    assert inside.exchange(1e9) < across.exchange(1e9)
    assert inside.ring(1e9, messages=10) > inside.ring(1e9)
    assert Link.of(recipe, RATES, 1, 1).ring(1e9) == 0
    assert Link.of(recipe, RATES, 1, 1).exchange(1e9) == 0


def test_a_captured_step_does_not_wait_for_the_host():
    words = layout(1, schedule__micro_batch_size=1)
    eager, captured = (
        step(load_recipe("nam56r", (*words, f"launch.cuda_graph_impl={impl}")), RATES)
        for impl in ("none", "auto")
    )
    assert eager.host > 0
    assert captured.host == 0 and captured.gaps == 0
    assert captured.total == pytest.approx(eager.total - eager.host)


def test_a_captured_layer_takes_its_kernels_however_small_they_are():
    """A model with next to nothing to compute: its captured step is as long as its layers are
    many, and much shorter than the eager one."""
    small = [
        "model.hidden_size=256", "model.num_attention_heads=4", "model.seq_length=256",
        "moe.moe_ffn_hidden_size=64", "moe.moe_shared_expert_intermediate_size=64",
        "mamba3.mamba_num_heads=8",
    ]  # fmt: skip
    words = layout(1, schedule__micro_batch_size=1)
    steps = {}
    for depth in (12, 24):
        sizes = [*words, *small, f"model.depth={depth}", "mtp.mtp_num_layers=0", "mtp.pattern="]
        recipe = load_recipe("nam56r", sizes)
        steps[depth] = step(recipe, RATES)
        least = micro_batches(recipe) * depth * RATES["captured"]
        assert steps[depth].total == pytest.approx(least + steps[depth].optimizer)
        assert steps[depth].host == 0 < steps[depth].gaps < least
    eager = step(load_recipe("nam56r", [*sizes, "launch.cuda_graph_impl=none"]), RATES)
    assert eager.gaps == 0 and eager.total > 10 * steps[24].total


def test_eight_rows_are_not_worth_their_memory_to_nam56r():
    """docs/layouts.md, "`nam56r` has 4 rows"."""
    words = ["launch.nproc_per_node=8", "precision.grad_reduce_in_bf16=false"]
    recipes = [load_recipe("nam56r", [*words, f"schedule.micro_batch_size={n}"]) for n in (4, 8)]
    assert load_recipe("nam56r").schedule.micro_batch_size == 4
    four, eight = (step(recipe, RATES).total for recipe in recipes)
    assert 0.995 * four < eight < four
    sizes = [memory(recipe, 0.0).total for recipe in recipes]
    assert round((sizes[1] - sizes[0]) / 2**30) == 43
    assert 1 - sizes[1] / RATES.usable_memory < 0.1


def test_what_is_not_fused_is_still_added():
    """Transformer Engine's products add their weight gradients, grouped_mm's experts' do not."""

    def seconds(fused, experts):
        overrides = [f"precision.gradient_accumulation_fusion={fused}"]
        recipe = load_recipe("nam56r", [*overrides, f"backends.moe_experts={experts}"])
        return adding_gradients(recipe, RATES, Sizes.of(recipe), 0)

    unfused = seconds("false", "grouped_mm")
    assert seconds("false", "te") == unfused
    assert 0 == seconds("true", "te") < seconds("true", "grouped_mm") < unfused
    assert seconds("true", "fused_moe") == 0


def test_squared_relu_keeps_half_of_what_swiglu_does_in_the_experts():
    """fc1's output is (rows, f), and (rows, 2 f) where it is gated; the fused experts keep it."""
    gated = load_recipe("nam56r")
    plain = dataclasses.replace(
        gated, model=dataclasses.replace(gated.model, swiglu=False, squared_relu=True)
    )
    sizes, moe = Sizes.of(gated), gated.moe
    saved = routed_rows(gated, sizes, None) - routed_rows(plain, sizes, None)
    assert saved == 2 * moe.moe_router_topk * moe.moe_ffn_hidden_size


def test_a_backend_of_attention_and_experts_has_its_own_rate():
    named = {"core_attention": "sdpa_flash", "moe_experts": "te"}
    base = dataclasses.replace(load_recipe("nam56r"), backends=named)
    faster = dataclasses.replace(
        base, backends={"core_attention": "sdpa_cudnn", "moe_experts": "grouped_mm"}
    )
    assert step(faster, RATES).attention < step(base, RATES).attention
    fused = step(load_recipe("nam56r"), RATES).products
    assert fused < step(faster, RATES).products < step(base, RATES).products


@pytest.mark.parametrize(
    ("gpus", "nodes", "said"),
    [(0, None, "--gpus is 0"), (-1, None, "--gpus is -1"), (6, 4, "--gpus 6"), (8, 0, "over 0")],
)
def test_numbers_that_make_no_sense(gpus, nodes, said):
    with pytest.raises(PlanError, match=said):
        planned(gpus, nodes=nodes)


def test_too_little_memory_names_the_smallest_layout_and_its_bytes():
    with pytest.raises(PlanError) as error:
        planned(2, budget=30 * GIB)
    text = str(error.value)
    assert "fits into 30.0 GiB a GPU" in text
    words = text.rpartition(": ")[2].replace("--set ", "").replace("[]", "").split()
    size = int(text.partition(" GiB (")[2].partition(" bytes")[0].replace(",", ""))
    smallest = memory(load_recipe("nam56r", words), RATES["skew"])
    assert smallest.total == pytest.approx(size, abs=1)
    assert planned(2, budget=size + 1).layouts
    with pytest.raises(PlanError):
        planned(2, budget=size - 1)


def test_no_memory_and_more_gpus_than_rows():
    with pytest.raises(PlanError, match="must be more than 0"):
        planned(2, budget=-GIB)
    with pytest.raises(PlanError, match=r"no layout .* 4096 GPUs .*global_batch_size = 64"):
        planned(4096)


def test_it_needs_no_torch():
    code = "import sys, megacpp_mcore.planner.calibrate; from megacpp_mcore.cli import main; "
    code += "main(['recipe', 'plan', 'nam56r', '--gpus', '1']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_backend_that_the_model_does_not_read_is_refused(capsys):
    words = ["recipe", "plan", "nam56r", "--gpus", "1", "--set"]
    assert main([*words, "backends.rope_qk=triton"]) == 2
    assert "no part of this model asks for rope_qk" in capsys.readouterr().err
    assert main([*words, "backends.mla_rope=triton"]) == 0


def test_a_recipe_of_the_cpu_is_refused():
    with pytest.raises(PlanError, match=r"launch\.device = 'cpu'"):
        planned(1, name="nam56r-tiny")


def test_a_letter_of_ones_own_is_not_known():
    recipe = load_recipe("nam56r")
    layer = dataclasses.replace(recipe.plan.layers[0], letter="X")
    changed = dataclasses.replace(
        recipe, plan=dataclasses.replace(recipe.plan, layers=(layer, *recipe.plan.layers[1:]))
    )
    with pytest.raises(PlanError, match="what a layer X"):
        bytes_per_token(changed, Sizes.of(changed), layer)


@pytest.fixture
def own_block(monkeypatch):
    """examples/own_block.py, whose X stands in a table of this test's own."""
    monkeypatch.setattr(letters, "_table", dict(letters._table))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    own_block = importlib.import_module("own_block")
    letters.register(own_block.X)
    return own_block


WITH_X = ("model.pattern=AEMX", "model.depth=12", "mtp.pattern=AE")


@pytest.mark.slow
def test_a_letter_of_ones_own_is_planned_from_its_entry(own_block, capsys):
    recipe = load_recipe("nam56r", WITH_X)
    [x, *_] = [layer for layer in recipe.plan.layers if layer.letter == "X"]
    hidden, sizes = recipe.model.hidden_size, Sizes.of(recipe)
    # its input and its norm's output in bf16, the norm's factor, and what the entry says
    assert bytes_per_token(recipe, sizes, x) == 2 * 2 * hidden + 4 + own_block.kept(recipe, 0, 0)
    found = planned(4, WITH_X)
    assert {layout.recipe.parallel.tensor_model_parallel_size for layout in found.layouts} == {1}
    words = [word for override in WITH_X for word in ("--set", override)]
    assert main(["recipe", "plan", "nam56r", "--gpus", "2", "--top", "1", *words]) == 0
    assert "activations X" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_letter_whose_entry_does_not_say_what_it_keeps_is_refused(own_block, monkeypatch, capsys):
    [slot] = own_block.X.slots
    silent = dataclasses.replace(own_block.X, slots=(dataclasses.replace(slot, planned=None),))
    monkeypatch.setitem(letters._table, "X", silent)
    words = [word for override in WITH_X for word in ("--set", override)]
    assert main(["recipe", "plan", "nam56r", "--gpus", "2", *words]) != 0
    assert "what a layer X (G) keeps" in (said := " ".join(capsys.readouterr().err.split()))
    assert "planned=Planning(kept=...)" in said


def test_text(capsys):
    asked = ["--set", "parallel.expert_model_parallel_size=2"]
    assert main(["recipe", "plan", "nam56r", "--gpus", "2", "--top", "3", *asked]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    assert "expert parallelism is not needed" in text
    assert "--set parallel.expert_model_parallel_size=1" in text
    assert "note: --set parallel.expert_model_parallel_size is not kept" in text
    assert "ms slower: " in text
    assert [line.split()[0] for line in lines if line[:4].strip().isdigit()] == ["1", "2", "3"]
    assert "activations E" in text


def test_on_paper_the_assumptions_are_printed(capsys):
    words = ["--set", "schedule.global_batch_size=4096", "--set", SMALL[0]]
    assert main(["recipe", "plan", "nam56r", "--gpus", "4096", "--top", "1", *words]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert "on 4096 GPUs of 512 hosts" in out
    assert "On paper" in out and "not kept" not in out
    assert "network" in out
    assert "not measured" in out


def test_json(capsys):
    words = ["recipe", "plan", "nam56r", "--gpus", "2", "--memory", "80", "--top", "0", "--json"]
    searched, kept = "parallel.expert_model_parallel_size", "schedule.global_batch_size"
    assert main([*words, "--set", f"{searched}=2", "--set", f"{kept}=32"]) == 0
    assert json.loads(capsys.readouterr().out)["not_kept"] == [searched]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["not_kept"] == []
    assert found["memory_bytes"] == 80 * GIB
    assert found["fit"] == len(found["layouts"])
    first, second = found["layouts"][:2]
    assert first["slower_because"] is None
    assert second["total_ms"] > first["total_ms"]
    assert sum(second["step_ms"].values()) == pytest.approx(second["total_ms"])
    assert sum(second["memory_bytes"].values()) == pytest.approx(second["total_bytes"], abs=20)
    assert load_recipe("nam56r", second["set"]).world_size == 2
    assert set(found["rates"]) == set(RATES.measured)


def test_it_says_where_expert_parallelism_is_needed(capsys):
    words = ["recipe", "plan", "nam56r", "--gpus", "8", "--memory", "19",
             "--set", "moe.num_experts=128", "--set", "schedule.global_batch_size=8",
             "--set", SMALL[0]]  # fmt: skip
    assert main([*words, "--top", "1"]) == 0
    assert "expert parallelism is needed: without it" in capsys.readouterr().out


@pytest.mark.parametrize("words", [(), ("precision.bf16=false",)], ids=["bf16", "fp32"])
def test_what_is_kept_for_any_batch_is_the_memory_without_activations(words):
    recipe = load_recipe("nam56r", [*words, *SMALL])
    whole = memory(recipe, 0.0)
    expected = whole.weights + whole.gradients + whole.optimizer
    assert kept_of_stage(recipe, 0) == pytest.approx(expected)


def test_depths_of_mtp_that_share_a_layer_have_its_parameters_once():
    one, two = (
        memory(
            load_recipe("nam56r", ["mtp.mtp_use_repeated_layer=true", f"mtp.mtp_num_layers={n}"]), 0
        )
        for n in (1, 2)
    )
    assert one.parameters == two.parameters
    own = memory(load_recipe("nam56r", ["mtp.mtp_num_layers=2"]), 0)
    assert own.parameters > two.parameters


def test_projections_in_fp8_have_the_rate_of_a_run_and_all_other_products_that_of_bf16():
    beside = ["precision.fp8=hybrid", "precision.fp8_recipe=tensorwise",
              "backends.moe_experts=fused_moe"]  # fmt: skip
    plain, named, left = (load_recipe("nam56r", sets) for sets in ([], beside, beside[:2]))
    sizes = [Sizes.of(recipe) for recipe in (plain, named, left)]
    assert [one.serving["moe_experts"] for one in sizes] == ["fused_moe", "fused_moe", "te"]
    assert sizes[1].serving["mla_up"] == sizes[2].serving["mla_up"] == "reference"
    assert (
        named.launch.cuda_graph_impl == "full_iteration" and left.launch.cuda_graph_impl == "none"
    )
    flops = flops_of(plain)
    layers = layers_of(plain, 0)
    routed = [planned_of(layer).experts for layer in layers]
    projections = sum(flops[name_of(layer)][1] for layer in layers)
    projections -= sum(experts.flops(plain) for experts in routed if experts)
    bf16, fp8 = RATES["products"], RATES["products_fp8"]
    saved = projections * sizes[0].tokens * micro_batches(plain) * (1 / bf16 - 1 / fp8)
    assert fp8 > bf16
    assert step(plain, RATES).products - step(named, RATES).products == pytest.approx(saved)
