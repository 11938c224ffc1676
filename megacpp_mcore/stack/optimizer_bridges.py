"""Bridges for Megatron-Core 0.19.2's DistributedOptimizer, which saves and loads some state wrong.

Only checkpoints are affected, not training. Each bridge is skipped if its patch of the patch lane
is applied. Upstream: issue 2777, pull requests 5835 (on the development branch only) and 5077,
neither of them in 0.19.
"""

from typing import Any

import torch

from megacpp_mcore.patching import applied

_MIXED_DTYPES = "optimizer-state-of-mixed-dtypes"
_PADDING = "optimizer-state-behind-padding"


def install() -> None:
    """Fix checkpoints of models with both float32 and 16-bit parameters (as M and R have), and
    loading optimizer state in another parallel layout than it was saved in."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if hasattr(DistributedOptimizer, "megacpp_bridges"):
        return
    DistributedOptimizer.megacpp_bridges = True
    lane = applied("megatron-core")
    if _MIXED_DTYPES not in lane:
        _number_float32_first(DistributedOptimizer)
        _copy_without_gradients(DistributedOptimizer)
    if _PADDING not in lane:
        _keep_padding(DistributedOptimizer)


def _number_float32_first(optimizer_class: Any) -> None:
    """Order each group's float32 parameters before its 16-bit ones, as the optimizer does.

    Upstream looks up their state by the positions before this reordering."""
    build = optimizer_class._build_optimizer_group_ranges

    def build_in_order(cls, param_groups, gbuf_ranges):
        _, ranges = build(param_groups, gbuf_ranges)
        for group in ranges:
            group["params"].sort(key=lambda parameter: parameter.dtype != torch.float32)
        places = {
            parameter: (index, place)
            for index, group in enumerate(ranges)
            for place, parameter in enumerate(group["params"])
        }
        return places, ranges

    optimizer_class._build_optimizer_group_ranges = classmethod(build_in_order)


def _copy_without_gradients(optimizer_class: Any) -> None:
    """Load without autograd, which refuses the copy into a view of a float32 parameter."""
    copy = optimizer_class._set_main_param_and_optimizer_states
    optimizer_class._set_main_param_and_optimizer_states = torch.no_grad()(copy)


def _keep_padding(optimizer_class: Any) -> None:
    """Join the buckets' state with the padding between them.

    Upstream joins it without padding, but slices each parameter's state at its padded offset: from
    the second bucket on, it takes elements of other parameters.
    """
    shard = optimizer_class.sharded_param_state_fully_reshardable

    def shard_with_padding(self, model_sharded_state_dict, is_loading=False, metadata=None):
        join = self.get_parameter_state_dp_zero
        self.get_parameter_state_dp_zero = lambda **how: _padded(self.buffers, join(**how))
        try:
            return shard(self, model_sharded_state_dict, is_loading, metadata)
        finally:
            del self.get_parameter_state_dp_zero

    optimizer_class.sharded_param_state_fully_reshardable = shard_with_padding


def _padded(buffers: list, state: dict | None) -> dict | None:
    """state: buffer index -> dtype -> key -> a tensor of all buckets, joined without padding."""
    if state is None:
        return None
    for index, buffer in enumerate(buffers):
        used = [bucket.numel_unpadded for bucket in buffer.buckets]
        padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
        for tensors in state[index].values():
            for key, joined in tensors.items():
                if isinstance(joined, torch.Tensor):
                    parts = zip(joined.split(used), padding, strict=True)
                    tensors[key] = torch.cat(
                        [piece for part, n in parts for piece in (part, part.new_zeros(n))]
                    )
    return state
