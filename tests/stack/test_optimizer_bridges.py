"""Checkpoints of Megatron's distributed optimizer, as far as a machine without a GPU goes."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megacpp_mcore.stack import optimizer_bridges

BRIDGED = (
    "_build_optimizer_group_ranges", "_set_main_param_and_optimizer_states",
    "sharded_param_state_fully_reshardable",
)  # fmt: skip


@pytest.fixture(autouse=True)
def bridged(monkeypatch):
    for name in BRIDGED:
        monkeypatch.setattr(DistributedOptimizer, name, vars(DistributedOptimizer)[name])
    if not hasattr(DistributedOptimizer, "megacpp_bridges"):  # another test's model has laid them
        monkeypatch.setattr(DistributedOptimizer, "megacpp_bridges", True, raising=False)
        monkeypatch.delattr(DistributedOptimizer, "megacpp_bridges")
    optimizer_bridges.install()
    optimizer_bridges.install()  # a second model


def test_float32_parameters_come_first_as_they_do_in_the_optimizers_groups():
    """Megatron's groups are [float32 shards..., 16-bit shards...], each in the buffers' order."""
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
    narrow, wide, decayed, wide_2, last = (
        torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes
    )
    groups = [{"params": [narrow, wide, wide_2, last]}, {"params": [decayed]}]
    # One buffer a dtype, each with its buckets; a bucket's map has the parameters in order.
    buffers = [
        {torch.bfloat16: [{"param_map": dict.fromkeys([last])},
                          {"param_map": dict.fromkeys([decayed, narrow])}]},
        {torch.float32: [{"param_map": dict.fromkeys([wide_2, wide])}]},
    ]  # fmt: skip
    places, ranges = DistributedOptimizer._build_optimizer_group_ranges(groups, buffers)
    assert [id(p) for p in ranges[0]["params"]] == [id(p) for p in (wide_2, wide, last, narrow)]
    assert places == {wide_2: (0, 0), wide: (0, 1), last: (0, 2), narrow: (0, 3), decayed: (1, 0)}
    assert [group["orig_group"] for group in ranges] == groups


def test_a_loaded_float32_parameter_arrives():
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    shard = parameter.view(-1)[2:5]  # as Megatron makes it
    optimizer = SimpleNamespace(
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
        model_param_group_index_map={parameter: (0, 0)},
        optimizer=SimpleNamespace(
            param_groups=[{"params": [shard]}], state={shard: {"exp_avg": torch.zeros(3)}}
        ),
    )
    loaded = {"param": torch.ones(3), "exp_avg": torch.full((3,), 2.0)}
    DistributedOptimizer._set_main_param_and_optimizer_states(optimizer, parameter, loaded)
    assert parameter.flatten().tolist() == [0, 0, 1, 1, 1, 0]
    assert optimizer.optimizer.state[shard]["exp_avg"].tolist() == [2, 2, 2]


def test_state_is_found_behind_the_padding_of_the_buckets_before():
    """Two buckets of 3 and 5 elements, padded to 4 and 8; a parameter in each, and one behind."""
    sizes, starts = (3, 2, 3), (0, 4, 6)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    bucket = lambda used, padded: SimpleNamespace(  # noqa: E731
        numel_unpadded=used, grad_data=torch.zeros(padded)
    )
    places = zip(parameters, starts, sizes, (0, 1, 1), strict=True)
    optimizer = SimpleNamespace(
        buffers=[
            SimpleNamespace(
                buckets=[bucket(3, 4), bucket(5, 8)],
                numel_unpadded=8,
                param_index_map={p: (start, start + size, i) for p, start, size, i in places},
            )
        ],
        gbuf_ranges=[{torch.float32: []}],
        get_parameter_state_dp_zero=lambda **how: {
            "buckets_coalesced": True,
            0: {torch.float32: {"exp_avg": torch.arange(8.0), "numel_unpadded": 8}},
        },
    )
    sharded = {str(i): ShardedTensor.from_rank_offsets(str(i), p) for i, p in enumerate(parameters)}
    state = DistributedOptimizer.sharded_param_state_fully_reshardable(
        optimizer, sharded, metadata={}
    )
    found = [state[i]["exp_avg"].data.tolist() for i in range(3)]
    assert found == [[0, 1, 2], [3, 4], [5, 6, 7]]
