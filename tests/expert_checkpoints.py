"""A checkpoint of one kind of experts, loaded by another."""

import torch
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_outplace,
    extract_matching_values,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)

PREFIX = "mlp.experts."


def load_from(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """What Megatron's distributed checkpointing does by way of files, which takes 40 s a test.

    Every shard of target's is the one of source's with that key and place, which must be there.
    """
    saved = source.sharded_state_dict(PREFIX)
    apply_factories(saved)
    shards = {
        (shard.key, shard.global_offset): shard.data.detach().clone()
        for shard in nested_values(saved)
        if isinstance(shard, ShardedTensor)
    }
    wanted = target.sharded_state_dict(PREFIX)
    factories, _ = extract_matching_values(
        wanted, lambda x: isinstance(x, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(wanted)

    def found(shard):
        if not isinstance(shard, ShardedTensor):
            return None  # FP8's state
        return shards[shard.key, shard.global_offset].view(shard.data.shape)

    state = apply_factory_merges(dict_list_map_outplace(found, wanted), factories)
    state = {n.removeprefix(PREFIX): v for n, v in state.items() if v is not None}
    left = target.load_state_dict(state, strict=False)
    missing = [name for name in left.missing_keys if "_extra_state" not in name]
    assert not missing and not left.unexpected_keys
