"""Checkpoints of Megatron's distributed optimizer, as far as a machine without a GPU goes."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer import ChainedOptimizer
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
    monkeypatch.setattr(ChainedOptimizer, "load_state_dict", ChainedOptimizer.load_state_dict)
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


KIND = "param_state_sharding_type"


class Taking:
    """An optimizer with groups of these kinds, and what it is given to load."""

    def __init__(self, *groups: dict) -> None:
        self.param_groups, self.config, self.taken = groups, None, None

    def load_state_dict(self, state: dict) -> None:
        self.taken = state


def kind(wd_mult: float, experts: bool, **others) -> dict:
    return {"wd_mult": wd_mult, "is_expert_parallel": experts, **others}


def saved(*groups: dict, sharding: str = "fully_reshardable", **others) -> dict:
    return {"optimizer": {"param_groups": [*groups]}, KIND: sharding, **others}


def chained(monkeypatch, *optimizers: Taking) -> ChainedOptimizer:
    monkeypatch.setattr(ChainedOptimizer, "_synchronize_steps", lambda self: None)
    return ChainedOptimizer([*optimizers])


def test_the_groups_of_one_optimizer_go_to_several(monkeypatch):
    """Another expert-parallel size, and a pipeline whose first stage has no experts."""
    dense = Taking(kind(1.0, False), kind(0.0, False))
    experts = Taking(kind(1.0, True))
    state = saved(kind(0.0, False, lr=0.2), kind(1.0, False, lr=0.1), grad_scaler={"scale": 2})
    tensors = {0: {"param_state": "dense"}, 1: {"param_state": "experts"}}
    chained(monkeypatch, dense, experts).load_state_dict(state | tensors)
    shared = {KIND: "fully_reshardable", "grad_scaler": {"scale": 2}}
    assert dense.taken == shared | {"param_state": "dense", "optimizer": {
        "param_groups": [kind(1.0, False, lr=0.1), kind(0.0, False, lr=0.2)]
    }}  # fmt: skip
    assert experts.taken == shared | {"param_state": "experts", "optimizer": {
        "param_groups": [kind(1.0, True, lr=0.1)]
    }}  # fmt: skip


def test_the_groups_of_several_optimizers_go_to_one(monkeypatch):
    """What only the experts had, too; what both had is the dense parameters'."""
    one = Taking(kind(1.0, False), kind(0.0, False))
    state = {0: saved(kind(0.0, False, lr=0.2)), 1: saved(kind(1.0, True, lr=0.1),
                                                          kind(0.0, True, lr=0.3))}  # fmt: skip
    chained(monkeypatch, one).load_state_dict(state | {"param_state": "all"})
    assert one.taken == {KIND: "fully_reshardable", "param_state": "all", "optimizer": {
        "param_groups": [kind(1.0, False, lr=0.1), kind(0.0, False, lr=0.2)]
    }}  # fmt: skip


def test_the_groups_of_as_many_optimizers_are_taken_as_they_are(monkeypatch):
    one, dense, experts = Taking(kind(1.0, False)), Taking(kind(1.0, False)), Taking()
    state = saved(kind(1.0, False), param_state="all")
    chained(monkeypatch, one).load_state_dict(state)
    assert one.taken is state
    two = {0: saved(kind(1.0, False), param_state="dense"), 1: saved(param_state="experts")}
    chained(monkeypatch, dense, experts).load_state_dict(two)
    assert (dense.taken, experts.taken) == (two[0], two[1])
    # Megatron's of several, outside of distributed checkpoints
    chained(monkeypatch, dense, experts).load_state_dict([two[1], two[0]])
    assert (dense.taken, experts.taken) == (two[1], two[0])


def test_tensors_that_are_not_stored_by_name_are_left_to_megatron(monkeypatch):
    state = saved(kind(1.0, False), sharding="dp_reshardable") | {0: {}, 1: {}}
    with pytest.raises(RuntimeError, match="Expected 2 entries"):
        chained(monkeypatch, Taking(), Taking()).load_state_dict(state)


def test_a_group_that_was_not_saved_is_named(monkeypatch):
    one = Taking(kind(1.0, False, lr_mult=0.5))
    state = {0: saved(kind(1.0, False)), 1: saved(kind(1.0, True)), "param_state": None}
    with pytest.raises(RuntimeError, match=r"no group of parameters with .*'lr_mult': 0.5"):
        chained(monkeypatch, one).load_state_dict(state)
