"""Tensor and sequence parallelism of the Mamba-3 mixer."""

import pytest
import torch
from layer_ranks import HIDDEN, TwoRanks, run_both

from megacpp_mcore.hybrid.block_settings import Mamba3Settings

# settings, groups (2 split over the ranks, 1 and 3 do not: B and C are gathered), sequence parallel
CASES = {
    "siso-split": (Mamba3Settings(chunk_size=4), 2, False),
    "siso-split-sp": (Mamba3Settings(chunk_size=4), 2, True),
    "siso-gathered-sp": (Mamba3Settings(chunk_size=4), 3, True),
    "mimo-gathered": (Mamba3Settings(variant="mimo", mimo_rank=2), 1, False),
    "mimo-split-sp": (Mamba3Settings(variant="mimo", mimo_rank=2), 6, True),
}


def build(name, tp, sequence_parallel):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig

    from megacpp_mcore.layers.mamba3 import Mamba3Mixer
    from megacpp_mcore.layers.mixer import MixerSubmodules

    settings, groups, _ = CASES[name]
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel, use_cpu_initialization=True, mamba_num_heads=6,
        mamba_head_dim=3, mamba_state_dim=8, mamba_num_groups=groups,
    )  # fmt: skip
    mixer = Mamba3Mixer(
        config,
        MixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
        HIDDEN,
        layer_number=1,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        settings=settings,
    )
    for key, parameter in mixer.named_parameters() if tp > 1 else ():
        is_whole = key.endswith("_norm.weight")
        assert getattr(parameter, "tensor_model_parallel", False) is not is_whole, key
        # A norm's gradient is complete on each rank: Megatron must not sum it once more.
        assert not getattr(parameter, "sequence_parallel", False), key
    return mixer


def call(name, mixer, hidden):
    return mixer(hidden)[0]


def part(key, whole, mixer, rank):
    """The layout, said once more."""
    if key.endswith("_norm.weight"):
        return whole
    if key == "out_proj.weight":
        return whole.chunk(2, dim=1)[rank]
    if key == "in_proj.weight":
        sizes = [2 * rows for rows in mixer.layout.in_proj]  # and padding, which is not split
        parts = whole[: sum(sizes)].split(sizes)
        own = torch.cat([part.chunk(2)[rank] for part in parts])
        return torch.cat((own, own.new_zeros(-len(own) % 16, own.shape[1])))
    return whole.chunk(2)[rank]


def clear_padding(mixer):
    if padding := mixer.layout.padding:
        mixer.in_proj.weight[-padding:].zero_()


def check(rank, folder):
    cases = {name: sequence_parallel for name, (_, _, sequence_parallel) in CASES.items()}
    TwoRanks(cases, build, call, part, sums=5, settle=clear_padding).check(rank, folder)


@pytest.mark.slow
def test_two_ranks_are_one(tmp_path):
    run_both(check, tmp_path)
