"""Checkpoints of Megatron-Core 0.19.2's DistributedOptimizer, where it saves or loads wrong state.

Its training is right. A patch of the lane makes each bridge needless, and where that is applied it
is not laid. Upstream: issue 2777, pull requests 5835, 5929 and 5077, none of them in 0.19.
"""

from typing import Any

import torch

from megacpp_mcore.patching import applied

_MIXED_DTYPES = "optimizer-state-of-mixed-dtypes"
_PADDING = "optimizer-state-behind-padding"


def install() -> None:
    """Let a model with float32 and 16-bit parameters, as M and R make it, be saved and loaded; and
    let an optimizer's state be loaded at another layout than it was saved at."""
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
    """The optimizer's groups have the float32 parameters before the 16-bit ones, and their state is
    looked up at the place that each had before."""
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
    """What is loaded for a float32 parameter is copied into a view of it: autograd refuses that."""
    copy = optimizer_class._set_main_param_and_optimizer_states
    optimizer_class._set_main_param_and_optimizer_states = torch.no_grad()(copy)


def _keep_padding(optimizer_class: Any) -> None:
    """The state of all buckets is joined without the padding between them, and each parameter's cut
    out of it at its place with padding: from the second bucket on, at other parameters' elements.
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
