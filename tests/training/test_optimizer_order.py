"""Where Megatron's distributed optimizer looks for the state of a parameter, with mixed dtypes."""

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megacpp_mcore import bridges


@pytest.fixture
def bridged(monkeypatch):
    name = "_build_optimizer_group_ranges"
    monkeypatch.setattr(DistributedOptimizer, name, vars(DistributedOptimizer)[name])
    bridges.optimizer_order()
    bridges.optimizer_order()  # a second model


def test_float32_parameters_come_first_as_they_do_in_the_optimizers_groups(bridged):
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
