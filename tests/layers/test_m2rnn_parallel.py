"""Tensor and sequence parallelism of the M2RNN mixer."""

import pytest
import torch
from layer_ranks import HIDDEN, TwoRanks, packed, run_both

from megacpp_mcore.hybrid.block_settings import M2RNNSettings

SETTINGS = M2RNNSettings(k_head_dim=6, v_head_dim=3, num_heads=4, chunk_size=4)
# batch, document bounds, sequence parallel
CASES = {"plain": (2, None, False), "sp": (2, None, True), "documents-sp": (1, [0, 3, 7], True)}


def build(name, tp, sequence_parallel):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig

    from megacpp_mcore.layers.m2rnn import M2RNNMixer
    from megacpp_mcore.layers.mixer import MixerSubmodules

    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel, use_cpu_initialization=True,
    )  # fmt: skip
    mixer = M2RNNMixer(
        config,
        MixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
        layer_number=1,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        settings=SETTINGS,
    )
    for key, parameter in mixer.named_parameters() if tp > 1 else ():
        # Every parameter is split, none replicated: Megatron has no gradient to sum over TP.
        assert parameter.tensor_model_parallel, key
        assert not getattr(parameter, "sequence_parallel", False), key
    return mixer


def call(name, mixer, hidden):
    return mixer(hidden, packed_seq_params=packed(CASES[name][1]))[0]


def part(key, whole, mixer, rank):
    """The layout, said once more."""
    s = SETTINGS
    values = s.num_heads * s.v_head_dim
    qkv = [s.k_head_dim, s.k_head_dim, values]
    sections = {
        "in_proj.weight": [*qkv, values, s.num_heads],  # and padding, which is not split
        "conv1d_weight": qkv,
        "conv1d_bias": qkv,
    }
    if key == "out_proj.weight":
        return whole.chunk(2, dim=1)[rank]
    sizes = sections.get(key, [whole.shape[0]])
    parts = whole[: sum(sizes)].split(sizes)
    own = torch.cat([part.chunk(2)[rank] for part in parts])
    if key != "in_proj.weight":
        return own
    return torch.cat((own, own.new_zeros(-len(own) % 16, own.shape[1])))


def clear_padding(mixer):
    assert mixer.layout.padding > 0
    mixer.in_proj.weight[-mixer.layout.padding :].zero_()


def check(rank, folder):
    cases = {name: case[2] for name, case in CASES.items()}
    two = TwoRanks(
        cases, build, call, part, sums=5, batch=lambda name: CASES[name][0], settle=clear_padding
    )
    initial = {
        key: p.detach().clone() for key, p in two.built(1, seed=1)["plain"].named_parameters()
    }
    for key, parameter in two.built(2, seed=1)["plain"].named_parameters():
        if "proj" not in key:  # Megatron's linears cut their whole by rows, whatever the parts
            assert torch.equal(parameter, part(key, initial[key], None, rank)), key
    two.check(rank, folder)


@pytest.mark.slow
def test_two_ranks_are_one(tmp_path):
    run_both(check, tmp_path)
