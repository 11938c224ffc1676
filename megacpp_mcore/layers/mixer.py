"""What the M and the R mixer share: projections, float32 parameters, checkpoints, recomputation."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from megacpp_mcore.layers.precision import fitting_linear
from megacpp_mcore.layers.recompute import recomputed


class RecurrentMixer(MegatronModule):
    """A token mixer between two projections, every own parameter split over the ranks on axis 0.

    recompute: what the backward pass makes again, "core" (all between the projections), "mixer"
    (the projections too) or None. A subclass fills in `wide` and `sections`.
    """

    def __init__(self, config, pg_collection, recompute: str | None) -> None:
        super().__init__(config)
        self.tp_group = pg_collection.tp
        self.recompute = recompute
        # Own parameters that stay at least float32 when the model is cast to 16 bits.
        self.wide: tuple[str, ...] = ()
        # Weight -> rows of its parts on this rank: each part is split on its own.
        self.sections: dict[str, Mapping[str, int]] = {}

    def _add_in_proj(
        self, linear: Any, columns: int, parts: Mapping[str, int], name, padding: int = 0
    ) -> None:
        """A column-parallel linear whose rows are `parts`, and on every rank `padding` zeros."""
        rows = sum(parts.values()) + padding
        self.in_proj = build_module(
            fitting_linear(linear, self.config, columns, rows),
            columns, rows * self.tp_group.size(), init_method=self.config.init_method,
            gather_output=False, skip_bias_add=False, tp_comm_buffer_name="fc1",
            **self._common("in_proj", name),
        )  # fmt: skip
        self.sections["in_proj.weight"] = parts
        self.padding = {"in_proj.weight": padding}
        if padding and self.config.perform_initialization:
            with torch.no_grad():
                self.in_proj.weight[-padding:].zero_()
        # How resharding tools know of the parts.
        self.in_proj.weight.partition_sizes = [*parts.values(), *([padding] if padding else [])]

    def _add_out_proj(self, linear: Any, columns: int, rows: int, name) -> None:
        """A row-parallel linear. columns: of all ranks."""
        self.out_proj = build_module(
            fitting_linear(linear, self.config, columns // self.tp_group.size(), rows),
            columns, rows, init_method=self.config.output_layer_init_method,
            input_is_parallel=True, skip_bias_add=True, tp_comm_buffer_name="fc2",
            **self._common("out_proj", name),
        )  # fmt: skip

    def _common(self, part: str, name: str | None) -> dict[str, Any]:
        return {
            "config": self.config,
            "bias": False,
            "is_expert": False,
            "tp_group": self.tp_group,
            "name": f"{name}.{part}" if name else None,
        }

    def _again(self, part: str, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, made again in the backward pass where `recompute` is `part`."""
        if self.recompute != part:
            return function(*args)
        return recomputed(self.config, self.tp_group, function, *args)

    def set_for_recompute_input_layernorm(self) -> None:
        """Megatron asks for it where the norm before us is recomputed under FP8."""
        from megatron.core.extensions.transformer_engine import set_save_original_input

        set_save_original_input(self.in_proj)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        """Module casts and moves, without the cast to 16 bits for the `wide` parameters."""
        parameters = [getattr(self, name) for name in self.wide]
        kept = parameters + [p.grad for p in parameters if p.grad is not None]

        def apply(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            narrow = applied.is_floating_point() and applied.dtype.itemsize < 4
            if narrow and any(x is tensor for x in kept):
                return tensor.to(applied.device)
            return applied

        return super()._apply(apply, recurse)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
        """Every own parameter split on axis 0, and each of `sections` part by part.

        So a checkpoint loads under any tensor parallelism.
        """
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own = dict(self.named_parameters(recurse=False))
        sharded = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, child in self.named_children():
            sharded |= sharded_state_dict_default(
                child, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        for name, parts in self.sections.items():
            sharded[prefix + name] = _sections_factory(
                sharded[prefix + name], parts, self.padding.get(name, 0)
            )
        return sharded


def _sections_factory(
    whole: ShardedTensor, parts: Mapping[str, int], padding: int
) -> ShardedTensorFactory:
    """Megatron's factory of a tensor in parts along axis 0; rows of padding are not saved."""
    if not padding:
        return _split_tensor_factory(whole, list(parts.values()), list(parts), 0)
    without_data = whole.without_data()

    @torch.no_grad()
    def build(key: str, tensor: Tensor, replica_id, flattened_range) -> list[ShardedTensor]:
        own = replace(
            without_data, key=key, data=tensor, dtype=tensor.dtype, replica_id=replica_id,
            flattened_range=flattened_range,
        )  # fmt: skip
        shards, start = [], 0
        for name, rows in parts.items():
            for shard in own.narrow(0, start, rows):
                shard.key = f"{shard.key}.{name}"
                shards.append(shard)
            start += rows
        return shards

    @torch.no_grad()
    def merge(shards: list[Tensor]) -> Tensor:
        return torch.cat((*shards, shards[0].new_zeros(padding, *shards[0].shape[1:])))

    return ShardedTensorFactory(whole.key, whole.data, build, merge, whole.replica_id)
