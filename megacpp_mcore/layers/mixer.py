"""Base class of the M and R mixers: projections, float32 parameters, checkpoints, recomputation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from megacpp_mcore.layers.precision import fp8_compatible_linear
from megacpp_mcore.layers.recompute import recomputed


@dataclass
class MixerSubmodules:
    """in_proj: a column-parallel linear. out_proj: a row-parallel linear."""

    in_proj: ModuleSpec | type
    out_proj: ModuleSpec | type


class RecurrentMixer(MegatronModule):
    """A token mixer between two projections, with its own parameters split over ranks on axis 0.

    recompute: what the backward pass recomputes, "core" (everything between the projections),
    "mixer" (the projections, too) or None. A subclass fills in `fp32_params` and `sections`.
    """

    def __init__(self, config, pg_collection, recompute: str | None) -> None:
        super().__init__(config)
        self.tp_group = pg_collection.tp
        self.recompute = recompute
        # Names of parameters that stay at least float32 when the model is cast to 16 bits.
        self.fp32_params: tuple[str, ...] = ()
        # Weight -> rows of each of its parts on this rank; parts are split over ranks separately.
        self.sections: dict[str, Mapping[str, int]] = {}

    def _add_in_proj(
        self, linear: Any, columns: int, parts: Mapping[str, int], name, padding: int = 0
    ) -> None:
        """A column-parallel linear. parts: name -> rows on this rank; padding: rows of zeros."""
        rows = sum(parts.values()) + padding
        self.in_proj = build_module(
            fp8_compatible_linear(linear, self.config, columns, rows),
            columns, rows * self.tp_group.size(), init_method=self.config.init_method,
            gather_output=False, skip_bias_add=False, tp_comm_buffer_name="fc1",
            **self._common("in_proj", name),
        )  # fmt: skip
        self.sections["in_proj.weight"] = parts
        self.padding = {"in_proj.weight": padding}
        if padding and self.config.perform_initialization:
            with torch.no_grad():
                self.in_proj.weight[-padding:].zero_()
        # Resharding tools read the parts from here.
        self.in_proj.weight.partition_sizes = [*parts.values(), *([padding] if padding else [])]

    def _add_out_proj(self, linear: Any, columns: int, rows: int, name) -> None:
        """A row-parallel linear. columns: summed over the ranks."""
        self.out_proj = build_module(
            fp8_compatible_linear(linear, self.config, columns // self.tp_group.size(), rows),
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

    def _maybe_recompute(self, part: str, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, recomputed in the backward pass if `recompute` is `part`."""
        if self.recompute != part:
            return function(*args)
        return recomputed(self.config, self.tp_group, function, *args)

    def set_for_recompute_input_layernorm(self) -> None:
        """Megatron calls this when the norm before the mixer is recomputed under FP8."""
        from megatron.core.extensions.transformer_engine import set_save_original_input

        set_save_original_input(self.in_proj)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        """As torch's, but `fp32_params` are not cast to 16 bits."""
        parameters = [getattr(self, name) for name in self.fp32_params]
        kept = parameters + [p.grad for p in parameters if p.grad is not None]

        def apply(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            narrow = applied.is_floating_point() and applied.dtype.itemsize < 4
            if narrow and any(x is tensor for x in kept):
                return tensor.to(applied.device)
            return applied

        return super()._apply(apply, recurse)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
        """Own parameters split on axis 0, and weights in `sections` part by part, so that a
        checkpoint loads at any tensor parallelism."""
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
    """Megatron's factory for a tensor with parts along axis 0, without its rows of padding."""
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
