"""What the planner says of collectives where tensor or pipeline parallelism splits the model."""

import pytest

from megacpp_mcore.planner.activations import Sizes
from megacpp_mcore.planner.rates import h200
from megacpp_mcore.planner.step import micro_batch
from megacpp_mcore.recipe import load_recipe

RATES = h200()
LAYERS, EXPERT_LAYERS = 54, 23  # of nam56r, with those of MTP


def of_a_micro_batch(name, *overrides, stage=0):
    recipe = load_recipe("nam56r", ["launch.nproc_per_node=2", *overrides])
    tokens = recipe.schedule.micro_batch_size * recipe.model.seq_length
    found = micro_batch(recipe, RATES, Sizes.of(recipe), stage)
    return found[name], 2 * tokens * recipe.model.hidden_size


def test_a_layer_under_tensor_parallelism_gathers_or_scatters_its_tokens_five_times():
    seconds, row_bytes = of_a_micro_batch(
        "tensor_parallel", "parallel.tensor_model_parallel_size=2",
        "parallel.sequence_parallel=true",
        "parallel.expert_tensor_parallel_size=1",
    )  # fmt: skip
    ring = row_bytes / 2 / RATES["nvlink"] + RATES["nvlink_latency"]
    assert seconds == pytest.approx(LAYERS * 5 * ring)


@pytest.mark.parametrize("vpp", [1, 2])
def test_a_pipeline_stage_sends_a_micro_batch_on_and_its_gradient_back(vpp):
    pattern = {1: "A" * 4 + "|" + "A" * 4, 2: "|".join(["AA"] * 4)}[vpp]
    seconds, row_bytes = of_a_micro_batch(
        "pipeline", "parallel.pipeline_model_parallel_size=2", f"model.pattern={pattern}",
        "model.depth=8", "mtp.mtp_num_layers=0", "mtp.pattern=", "launch.cuda_graph_impl=none",
    )  # fmt: skip
    assert seconds == pytest.approx(
        2 * vpp * (row_bytes / RATES["nvlink"] + RATES["nvlink_latency"])
    )


def test_ranks_that_share_a_row_of_tokens_exchange_each_their_own_part_of_it():
    seconds, row_bytes = of_a_micro_batch(
        "exchange", "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true",
        "parallel.expert_tensor_parallel_size=1", "parallel.expert_model_parallel_size=2",
        "backends.moe_dispatch=alltoall",
    )  # fmt: skip
    sent = row_bytes / 2 * 4 / 2  # half of the tokens, to 4 experts each, of which half are away
    expected = EXPERT_LAYERS * 4 * (sent / RATES["nvlink"] + RATES["nvlink_latency"])
    assert seconds == pytest.approx(expected)
