"""Bridges for Megatron-Core 0.19.2's DistributedOptimizer, which saves and loads some state wrong.

Only checkpoints are affected, not training. A bridge that has a patch of the patch lane is skipped
if that is applied. Upstream: issue 2777, pull requests 5835 (on the development branch only) and
5077, neither of them in 0.19; issue 1517 for `_regroup`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megacpp_mcore.patching import applied

_MIXED_DTYPES = "optimizer-state-of-mixed-dtypes"
_PADDING = "optimizer-state-behind-padding"


def install() -> None:
    """Fix checkpoints of models with both float32 and 16-bit parameters (as M and R have), and
    loading optimizer state in another parallel layout than it was saved in."""
    from megatron.core.optimizer import ChainedOptimizer
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
    _regroup(ChainedOptimizer, DistributedOptimizer.checkpoint_fully_reshardable_formats)


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


def _regroup(chained_class: Any, reshardable: Iterable[str]) -> None:
    """Load a checkpoint of another number of optimizers than this rank's.

    Experts that are split over ranks have an optimizer of their own, others share the dense one.
    Upstream saves what is not a tensor as the first rank's optimizers have it, numbered if they are
    several, and a rank with another number of them cannot read that.
    """
    load = chained_class.load_state_dict

    def load_regrouped(self, state_dict):
        return load(self, _of_these(self.chained_optimizers, state_dict, set(reshardable)))

    chained_class.load_state_dict = load_regrouped


def _of_these(optimizers: list, state_dict: Any, reshardable: set[str]) -> Any:
    """The state with the saved groups of parameters in the places of this rank's optimizers.

    state_dict: what was saved, {key: value} of one optimizer or {index: {key: value}} of several,
    and with it, in the places of this rank's, the tensors that were loaded, as `param_state`.
    Returned unchanged where both are one or as many, and where the tensors are not stored by the
    parameters' names.
    """
    if not isinstance(state_dict, Mapping):
        return state_dict
    several = len(optimizers) > 1
    here = [state_dict.get(i) for i in range(len(optimizers))] if several else [state_dict]
    saved = [part for part in (state_dict, *state_dict.values()) if _has_groups(part)]
    kinds = {part.get("param_state_sharding_type") for part in saved}
    if len(saved) in (0, len(here)) or kinds - reshardable:
        return state_dict
    groups = [group for part in saved for group in part["optimizer"]["param_groups"]]
    common = {key: value for key, value in saved[0].items() if isinstance(key, str)}
    found = [
        common | {
            "optimizer": common["optimizer"]
            | {"param_groups": [_saved_group(own, groups) for own in optimizer.param_groups]},
            "param_state": part["param_state"],
        }
        for optimizer, part in zip(optimizers, here, strict=True)
    ]  # fmt: skip
    return dict(enumerate(found)) if several else found[0]


def _has_groups(part: Any) -> bool:
    return isinstance(part, Mapping) and "param_groups" in (part.get("optimizer") or ())


def _saved_group(own: Mapping[str, Any], groups: list[Mapping[str, Any]]) -> dict[str, Any]:
    """What was saved of a group of parameters, be it of experts or not: their groups are told apart
    only where they have optimizers of their own. Raises RuntimeError where there is none."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    of_experts = "is_expert_parallel"
    keys = [key for key in param_group_identifier_keys if key != of_experts]

    def identity(group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: group.get(key, group.get(f"pre_{key}")) for key in keys}

    alike = [group for group in groups if identity(group) == identity(own)]
    if not alike:
        raise RuntimeError(
            f"the checkpoint's optimizer has no group of parameters with {identity(own)}: resume "
            "with the multipliers of learning rate and weight decay that it was saved with"
        )
    same = [group for group in alike if group.get(of_experts) == own.get(of_experts)]
    return {**(same or alike)[0], of_experts: own.get(of_experts)}
