"""As test_loss.py, the vocabulary split over two tensor-parallel gloo processes."""

import contextlib

import pytest
from ranks import run_ranks

OVERRIDES = [
    "parallel.tensor_model_parallel_size=2", "launch.nproc_per_node=2", "mtp.mtp_num_layers=2",
    "data.data_path=null", "data.mock_data=true",
    "launch.environment.CUDA_DEVICE_MAX_CONNECTIONS=1",
    "backends.mla_rope=reference",  # Megatron's own is wrong, and refused, over two ranks
]  # fmt: skip
LAYOUTS = {
    "tp": [],
    "sp": ["parallel.sequence_parallel=true"],
    "sp-tied": [
        "parallel.sequence_parallel=true", "model.untie_embeddings_and_output_weights=false",
    ],
}  # fmt: skip


def check(overrides):
    """Losses, log and gradients of this rank's shards are Megatron's, from the same weights."""
    from loss_models import assert_same, batches, megatrons_step, models, run

    from megacpp_mcore.layers.loss import head_losses
    from megacpp_mcore.training.cpu.step import forward_step

    ours, megatrons = models(*OVERRIDES, *overrides)
    assert ours.tp_group.size() == 2
    for per_token in (False, True):
        for model in (ours, megatrons):
            model.config.calculate_per_token_loss = per_token
        expected = run(megatrons, megatrons_step, batches())
        assert_same(run(ours, forward_step, batches()), expected)
        assert_same(run(ours, megatrons_step, batches()), expected)
    ours.parallel_output = False
    assert head_losses(ours) is None


def check_layouts(rank, folder):
    from megatron.core import parallel_state, tensor_parallel

    # The embedding asks for the CUDA state of dropout, of which there is none here.
    tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext
    parallel_state.initialize_model_parallel(2)
    for overrides in LAYOUTS.values():
        check(overrides)


@pytest.mark.slow
def test_two_ranks_are_megatrons_two(tmp_path):
    run_ranks(check_layouts, tmp_path)
