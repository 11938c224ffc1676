"""What the planner says of expert parallelism, by the dispatcher that exchanges the tokens."""

import random
from dataclasses import replace

import pytest

from megacpp_mcore.hybrid.letters.experts import routed_rows, share_that_arrives
from megacpp_mcore.planner.activations import Sizes, bytes_per_token
from megacpp_mcore.planner.backends import Serving
from megacpp_mcore.planner.memory import memory
from megacpp_mcore.planner.pipeline import kinds_of
from megacpp_mcore.planner.rates import h200
from megacpp_mcore.planner.step import step
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.surfaces.registry import REGISTRY

RATES = h200()
LAYERS = 23  # E of nam56r, with MTP's


def over(ranks, *overrides, nodes=1):
    words = [
        f"parallel.expert_model_parallel_size={ranks}", f"launch.nproc_per_node={ranks // nodes}",
        f"launch.nnodes={nodes}", "schedule.global_batch_size=32", *overrides,
    ]  # fmt: skip
    return load_recipe("nam56r", words)


def by(dispatcher, ranks, *overrides):
    return over(ranks, f"backends.moe_dispatch={dispatcher}", *overrides)


@pytest.mark.parametrize(
    ("recipe", "dispatcher", "in_order"),
    [
        (over(1), "unmoved", True),
        (over(2), "allgather", True),
        (over(4), "alltoall", False),
        (over(2, nodes=2), "alltoall", False),
        (over(2, "backends.moe_experts=grouped_mm"), "alltoall", False),
        (by("allgather", 4), "allgather", True),
        (by("allgather", 4, "backends.moe_experts=te"), "allgather", False),
        (by("deepep", 4), "deepep", True),
    ],
)
def test_the_dispatcher_is_the_one_that_a_layer_would_choose(recipe, dispatcher, in_order):
    serving = Sizes.of(recipe).serving
    assert (serving["moe_dispatch"], serving.gathers_tokens) == (dispatcher, in_order)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_tokens_that_arrive_are_those_with_an_expert_there(ranks):
    recipe, chance = by("deepep", ranks), random.Random(ranks)
    draws, here = 40_000, range(16 // ranks)
    met = sum(any(e in here for e in chance.sample(range(16), 4)) for _ in range(draws)) / draws
    share = share_that_arrives(recipe, Sizes.of(recipe))
    assert met == pytest.approx(share, abs=4 * (share * (1 - share) / draws) ** 0.5)
    gathered = by("allgather", ranks)
    assert share_that_arrives(gathered, Sizes.of(gathered)) == 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_gather_keeps_every_token_and_as_many_rows_as_these_could_fill(ranks):
    """No routing changes it. fc1's output, bf16, is gated; a row has three numbers of its own."""
    recipe, tokens, topk = by("allgather", ranks), 4 * 4096, min(4, 16 // ranks)
    row = 2 * 2 * 896 + 3 * 4
    one_rank = over(1, f"schedule.global_batch_size={32 * ranks}")
    more = tokens * (ranks * (2 * 3584 + topk * row) - 4 * row)
    for skew in (0.0, 0.5):
        kept, unsplit = memory(recipe, skew).activations, memory(one_rank, skew).activations
        assert kept["E"] - unsplit["E"] == pytest.approx(LAYERS * more)


@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("shared", [1024, None])
def test_what_a_layer_keeps_of_its_own_tokens_under_tensor_parallelism(etp, shared):
    """Two ranks have half of the rows of a sequence each, and of every expert or of the tokens."""
    recipe = over(
        1, "launch.nproc_per_node=2", "parallel.tensor_model_parallel_size=2",
        "parallel.sequence_parallel=true", f"parallel.expert_tensor_parallel_size={etp}",
        "launch.environment.CUDA_DEVICE_MAX_CONNECTIONS=1",
        f"moe.moe_shared_expert_intermediate_size={'null' if shared is None else shared}",
    )  # fmt: skip
    [layer] = [x for x, _ in kinds_of(recipe, 0) if x.letter == "E" and x.mtp_depth is None]
    both_norms, router = (2 * 2 * 3584 + 4) / 2, 4 * 4 * 16 / 2
    rows = 4 * etp / 2 * (3 * 4 + 2 * 2 * 896 / etp)
    expected = both_norms + router + rows + 3 * 2 * (shared or 0) / 2
    assert bytes_per_token(recipe, Sizes.of(recipe), layer) == expected


def test_all_to_all_keeps_the_rows_of_the_fullest_rank():
    recipe = by("alltoall", 4)
    rows = LAYERS * 4 * 4096 * routed_rows(recipe, Sizes.of(recipe), None)
    even, uneven = (memory(recipe, skew).activations["E"] for skew in (0.0, 0.5))
    assert uneven - even == pytest.approx(rows / 2)


@pytest.mark.parametrize(
    "words",
    [
        ('recompute.moe=["layer"]',),
        ("parallel.recompute_granularity=full", "parallel.recompute_method=uniform",
         "parallel.recompute_num_layers=1"),
    ],
    ids=["E", "every layer"],
)  # fmt: skip
def test_recomputed_layers_keep_nothing_of_the_exchange(words):
    split, whole = (memory(over(ranks, *words), 0.5).activations["E"] for ranks in (2, 1))
    assert split == whole


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_that_travel(ranks):
    """A token's 7,168 bytes to each other rank by all-gather, by DeepEP where an expert is; by
    all-to-all once for each of its four experts. NCCL's all-gather has a rate of its own."""
    batches, row, tokens = 32 // (4 * ranks), 2 * 3584, 4 * 4096
    each = 4 * batches * LAYERS * tokens * row / RATES["nvlink"]
    share = share_that_arrives(by("deepep", ranks), Sizes.of(by("deepep", ranks)))
    found = {name: step(by(name, ranks), RATES).exchange for name in
             ("allgather", "deepep", "alltoall")}  # fmt: skip
    own = RATES["nvlink"] / RATES["nvlink_allgather"]
    expected = {"allgather": own * (ranks - 1), "deepep": (ranks - 1) * share,
                "alltoall": (ranks - 1) / ranks * 4}  # fmt: skip
    for name, times in expected.items():
        assert found[name] == pytest.approx(each * times, rel=0.02), name
    assert step(by("allgather", ranks), RATES).moved < step(by("alltoall", ranks), RATES).moved


def test_a_backend_that_auto_passes_over_is_not_assumed(monkeypatch):
    surface, recipe = REGISTRY["norm"], load_recipe("nam56r")
    name = Serving(recipe)["norm"]
    opt_in = (replace(b, opt_in=b.name == name) for b in surface.backends)
    monkeypatch.setitem(REGISTRY, "norm", replace(surface, backends=tuple(opt_in)))
    assert Serving(recipe)["norm"] != name
    named = load_recipe("nam56r", [f"backends.norm={name}"])
    assert Serving(named)["norm"] == name
