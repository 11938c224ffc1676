"""The planner's memory and step against every committed run, and its rates' origin.

Rates are an H200's; steps of an H100, which multiplies as fast, are held to them as well.
"""

import datetime
import json
from pathlib import Path

import pytest

from megacpp_mcore.planner.activations import Sizes
from megacpp_mcore.planner.calibrate import calibrate, recipe_of
from megacpp_mcore.planner.memory import memory_of_stage
from megacpp_mcore.planner.pipeline import micro_batches
from megacpp_mcore.planner.rates import h200
from megacpp_mcore.planner.step import step
from megacpp_mcore.receipts.reader import warm_median

H200 = Path(__file__).parents[2] / "examples/receipts/h200"
H100 = H200.with_name("h100")
MEMORY, STEP = 0.05, 0.1
RUNS = {
    str(path.relative_to(folder)): document
    for folder in (H200, H100)
    for path in sorted(folder.glob("**/*.json"))
    if (document := json.loads(path.read_text()))["kind"] == "run"
}

YARDSTICK = "Megatron's own blocks, which the planner does not know"
DISTURBED = (
    "beside three other runs on the host its captured steps take 41 to 165 ms, two to nine times "
    "those of `one`, which has twice the micro batches. That is no graph, but a wait for the host "
    "or for the other rank, of which no receipt says the part"
)
CROWDED = (
    "an eager run beside three others on the host: its launches take two to three times those of "
    "the run alone that the rate `host` is of"
)

NO_MEMORY = dict.fromkeys((name for name in RUNS if "yardstick" in name), YARDSTICK)
NO_STEP = {
    **dict.fromkeys((name for name in RUNS if "yardstick" in name), YARDSTICK),
    "layouts-2xh200/dp2.json": DISTURBED,
    "layouts-2xh200/ep2.json": CROWDED,
    "layouts-2xh200/pp2.json": CROWDED,
}  # fmt: skip
# Six of them are what rates are made of.
STEPS = {
    "layouts-2xh200/one.json",
    "run-nam56r-1xh200-graph.json",
    "run-nam56r-1xh200-graph-plain-mr.json",
    "run-nam56r-1xh200-profile.json",
    "run-nam56r-quarter-graph.json",
    "run-nam56r-quarter-graph-before.json",
    "run-nam56r-quarter-graph-plain-mr.json",
    "run-nam56r-2xh200-dp2-graph.json",
    "run-nam56r-2xh200-dp2-graph-again.json",
    "run-nam56r-2xh200-ep2.json",
    "run-nam56r-2xh200-ep2-graph.json",
    "run-nam56r-4xh200-dp4-graph.json",
    "run-nam56r-4xh200-dp4-graph-again.json",
    "run-nam56r-4xh200-dp4-fp8.json",
    "run-nam56r-4xh200-ep4.json",
    "run-nam56r-4xh200-ep4-graph.json",
    "run-nam56r-quarter-2xh100-reduce-bf16.json",
    "run-nam56r-quarter-2xh100-reduce-fp32.json",
    "run-nam56r-quarter-20-fp8-eager.json",
    "run-nam56r-quarter-20-fp8-graph.json",
    "run-nam56r-quarter-40-bf16.json",
    "run-nam56r-quarter-40-fp8.json",
    "run-nam56r-quarter-100-fp8.json",
    "run-nam56r-quarter-100-fused_moe.json",
    "run-nam56r-quarter-100-te.json",
    "run-nam56r-quarter-200-eager.json",
    "run-nam56r-quarter-200-graph.json",
    "run-nam56r-quarter-cold.json",
    "run-nam56r-quarter-short-rows.json",
    "run-nam56r-quarter-warm.json",
    "run-nam56r-quarter-lr2-rational.json",
    "run-nam56r-quarter-lr2-rational-floor-1e-4.json",
    "run-nam56r-quarter-lr2-rational-megatron-init.json",
    "run-nam56r-quarter-lr2-softplus.json",
    "run-nam56r-quarter-lr2-softplus-floor-1e-4.json",
    "run-nam56r-quarter-lr2-softplus-megatron-init.json",
}


def off_by(predicted: float, measured: float) -> float:
    return predicted / measured - 1


def test_every_run_is_held_or_excluded_with_a_reason():
    assert set(RUNS) == STEPS | NO_STEP.keys()
    assert not STEPS & NO_STEP.keys()
    assert NO_MEMORY.keys() <= set(RUNS)


def measured_stage(document: dict) -> int:
    """Memory is that of one rank: the last, where there are pipeline stages."""
    last = document["topology"]["world_size"] - 1
    of_last = f"peak memory, parameters and times are those of rank {last}"
    pp = document["topology"]["pp"]
    assert pp == 1 or of_last in document["notes"]
    return pp - 1


@pytest.mark.parametrize("name", sorted(set(RUNS) - NO_MEMORY.keys()))
def test_memory(name):
    document = RUNS[name]
    result, recipe = document["result"], recipe_of(document)
    needed = memory_of_stage(recipe, Sizes.of(recipe), measured_stage(document), h200()["skew"])
    parameters = result.get("rank_parameters") or result["parameters_on_this_rank"]
    # in_proj of M and R is padded by up to 15 rows, in memory alone; runs before that have none.
    layers = sum(recipe.plan.counts["source"][letter] for letter in "MR")
    padding = 15 * recipe.model.hidden_size * layers
    assert needed.parameters <= parameters <= needed.parameters + padding
    if "optimizer_bytes" in result:
        for own, key in (
            (needed.weights, "parameter_bytes"),
            (needed.gradients, "gradient_bytes"),
            (needed.optimizer, "optimizer_bytes"),
        ):
            assert off_by(own, result[key]) == pytest.approx(0, abs=0.005), key
    found = off_by(needed.total, result["peak_memory_bytes"])
    assert abs(found) <= MEMORY


@pytest.mark.parametrize("name", sorted(STEPS))
def test_step(name):
    predicted = step(recipe_of(RUNS[name]), h200()).total
    assert abs(off_by(predicted, warm_median(RUNS[name], "ms") / 1e3)) <= STEP


def interval(document: dict) -> tuple[datetime.datetime, datetime.datetime]:
    last = document["goodput"]["segments"][-1]
    start = datetime.datetime.fromisoformat(last["started"])
    return start, start + datetime.timedelta(seconds=last["wall_s"])


def beside(name: str) -> int:
    """How many other runs were under way during this one."""
    start, end = interval(RUNS[name])
    others = [interval(document) for other, document in RUNS.items() if other != name]
    return sum(begun < end and start < ended for begun, ended in others)


@pytest.mark.parametrize("name", [name for name, reason in NO_STEP.items() if reason == CROWDED])
def test_a_run_called_crowded_is_eager_beside_others_and_slower_than_one_alone(name):
    assert beside(name) == 3 and beside("run-nam56r-quarter-short-rows.json") == 0
    recipe = recipe_of(RUNS[name])
    assert recipe.launch.cuda_graph_impl == "none"
    assert 2 < warm_median(RUNS[name], "ms") / 1e3 / step(recipe, h200()).total < 3


def test_the_run_called_disturbed_ran_beside_others_and_its_steps_are_not_its_graphs():
    (name,) = (name for name, reason in NO_STEP.items() if reason == DISTURBED)
    assert beside(name) == 3
    single, disturbed = RUNS["layouts-2xh200/one.json"], RUNS[name]
    one, two = (micro_batches(recipe_of(document)) for document in (single, disturbed))
    assert one == 2 * two
    captured = disturbed["series_info"]["cold_steps"][-1]
    steps = [round(ms) for ms in disturbed["series"]["ms"][captured:]]
    assert (min(steps), max(steps)) == (41, 165)
    median = warm_median(single, "ms")
    assert 2 * median < min(steps) and max(steps) > 9 * median


def test_rates_are_those_of_the_committed_receipts():
    """After a new receipt: python -m megacpp_mcore.planner.calibrate examples/receipts/h200."""
    assert calibrate(H200) == h200().measured
    assert all((H200 / entry["receipt"]).exists() for entry in h200().measured.values())
    assert all(entry["why"] for entry in h200().assumed.values())
