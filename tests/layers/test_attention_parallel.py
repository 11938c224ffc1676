"""Tensor and sequence parallelism of the GQA layer."""

import pytest
import torch
from layer_ranks import HIDDEN, SEQ, TwoRanks, packed, run_both

HEADS, DIM = 8, 4
# groups, batch, document bounds, sequence parallel
CASES = {
    "plain": (4, 2, None, False),
    "sp": (4, 2, None, True),
    "documents-sp": (2, 1, [0, 3, 10], True),
}


def build(name, tp, sequence_parallel):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.attention import SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType

    from megacpp_mcore.layers.attention import SelfAttention
    from megacpp_mcore.layers.core_attention import ReferenceCoreAttention
    from megacpp_mcore.layers.settings import PluginSettings, attach

    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=HEADS, kv_channels=DIM,
        num_query_groups=CASES[name][0], add_bias_linear=False, attention_dropout=0.0,
        apply_rope_fusion=False, use_cpu_initialization=True, tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
    )  # fmt: skip
    submodules = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=ReferenceCoreAttention,
        linear_proj=RowParallelLinear,
    )  # fmt: skip
    collection = ProcessGroupCollection.use_mpu_process_groups()
    config = attach(config, PluginSettings(backends={"rope_qk": "reference"}))
    return SelfAttention(config, submodules, 1, AttnMaskType.causal, pg_collection=collection)


def call(name, layer, hidden):
    frequencies = 100.0 ** (-torch.arange(0, DIM, 2) / DIM)
    angles = torch.arange(SEQ)[:, None] * frequencies
    table = torch.cat([angles, angles], -1)[:, None, None]
    documents = packed(CASES[name][2])
    return layer(hidden, None, rotary_pos_emb=table, packed_seq_params=documents)[0]


def part(key, whole, layer, rank):
    return whole.chunk(2, dim=1 if key == "linear_proj.weight" else 0)[rank]


def check(rank, folder):
    cases = {name: case[3] for name, case in CASES.items()}
    TwoRanks(cases, build, call, part, sums=4, batch=lambda n: CASES[n][1]).check(rank, folder)


@pytest.mark.slow
def test_two_ranks_are_one(tmp_path):
    run_both(check, tmp_path)
