"""The optimizer's step in one pass over a rank's shard: clipping, Adam and 16-bit weights.

Megatron's classes, states and checkpoints stay as they are; only `step` of its optimizer is ours.
Where that cannot do what the configuration asks for, Megatron's own runs, and the receipt says why.
"""

import math
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from megacpp_mcore import dispatch
from megacpp_mcore.kernels import adam
from megacpp_mcore.kernels.adam import Shard, Table

_STATES = ("exp_avg", "exp_avg_sq")
_FUSED, _APART = "fused", "unfused"  # as a decision says it; unfused is Megatron's own


def install(optimizer: Any, wanted: bool) -> None:
    """Let Megatron's optimizer do its steps in one pass, if it can, and record what was decided.

    wanted: the recipe's optimizer.fused_update.
    """
    reason = refusal(optimizer) if wanted else "optimizer.fused_update = false"
    if reason is None:
        optimizer.step = FusedUpdate(optimizer)
    dispatch.record(
        dispatch.Decision(
            surface="optimizer", requested=_FUSED if wanted else _APART,
            observed=_APART if reason else _FUSED, reason=reason or "the recipe's",
            implementation=f"{type(optimizer).__module__}:{type(optimizer).__name__}"
            if reason else f"{__name__}:{FusedUpdate.__name__}",
        )
    )  # fmt: skip


def refusal(optimizer: Any) -> str | None:
    """Why one pass cannot do this optimizer's steps, or None; the same on every rank, whatever its
    shard has: Megatron's own step has collectives that ours has not."""
    if not isinstance(optimizer, ChainedOptimizer):
        return f"{type(optimizer).__name__} is no chain of optimizers"
    config, own = optimizer.config, _own(optimizer)
    if not own or not all(type(one) is DistributedOptimizer for one in own):
        return "parallel.use_distributed_optimizer = false"
    ddp = own[0].ddp_config
    against = {
        f"optimizer = {config.optimizer!r}": config.optimizer != "adam",
        "decoupled_weight_decay = False": not config.decoupled_weight_decay,
        "optimizer_cpu_offload": config.optimizer_cpu_offload,
        "use_precision_aware_optimizer": config.use_precision_aware_optimizer,
        "optimizer_cuda_graph": config.optimizer_cuda_graph,
        "use_megatron_fsdp": ddp.use_megatron_fsdp,
        "weights gathered in FP8 or FP4": ddp.fp8_param_gather or ddp.fp4_param_gather,
        "reuse_grad_buf_for_mxfp8_param_ag": config.reuse_grad_buf_for_mxfp8_param_ag,
        "a loss scale": any(one.grad_scaler for one in own),
        "log_num_zeros_in_grad": config.log_num_zeros_in_grad,
        "grad_norm_skip_threshold": math.isfinite(config.grad_norm_skip_threshold),
        "mtp_detach_heads, whose gradients are clipped by a norm of their own": any(
            chunk.config.mtp_detach_heads for one in own for chunk in one.model_chunks
        ),
    }
    reasons = [name for name, holds in against.items() if holds]
    return f"not with {', '.join(reasons)}" if reasons else None


def _own(chain: ChainedOptimizer) -> list[Any]:
    """The optimizers of a chain that have parameters."""
    return [one for one in chain.chained_optimizers if not getattr(one, "is_stub_optimizer", False)]


class FusedUpdate:
    """`step` of a chain of DistributedOptimizers."""

    def __init__(self, chain: ChainedOptimizer) -> None:
        self.chain = chain
        self._shards = [_Shards(one) for one in _own(chain)]

    @torch.no_grad()
    def __call__(self) -> tuple[bool, Any, None]:
        """Megatron's three values: the update was done, the gradient norm, no count of zeros."""
        chain = self.chain
        chain.grad_norms_by_group = {}
        chain.prepare_grads()
        norm = chain.get_grad_norm()
        for shards in self._shards:
            shards.update(_clipping_factor(norm, chain.config.clip_grad, shards.device))
        for optimizer in _own(chain):
            if not optimizer.ddp_config.overlap_param_gather:
                optimizer.start_param_sync_for_bucket_group_subset()
        return True, norm, None


def _clipping_factor(norm: Any, most: float, device: torch.device) -> Tensor:
    """As Megatron's clip_grad_by_total_norm_fp32 has it, on the device."""
    if not most > 0:
        return torch.ones((), device=device)
    if not isinstance(norm, Tensor):
        return torch.full((), min(1.0, most / (norm + 1e-6)), device=device)
    return (most / (norm.float() + 1e-6)).clamp(max=1.0)


class _Shards:
    """What one DistributedOptimizer updates, and the tables of addresses for its launches."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self.optimizer = optimizer
        # This rank's part of a parameter in float32 -> those of its gradient and its 16-bit weight.
        self._ends: dict[Tensor, tuple[Tensor, Tensor | None]] = {}
        self._copied: list[tuple[Tensor, Tensor]] = []  # float32 weights that are not the shard
        pairs = (
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        )
        for parameters, shards in (groups for pair in pairs for groups in zip(*pair, strict=True)):
            for parameter, shard in zip(parameters, shards, strict=True):
                gradient, weight = self._gradient_and_weight(parameter)
                narrow = weight.dtype != torch.float32
                self._ends[shard] = gradient, weight if narrow else None
                if not narrow and weight.data_ptr() != shard.data_ptr():
                    self._copied.append((weight, shard))
        self._tables: dict[tuple, Table] = {}
        self.device = next(iter(self._ends)).device

    def _gradient_and_weight(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of the parameter's gradient and of its weight, in Megatron's buffers."""
        optimizer = self.optimizer
        ranges = optimizer._get_model_param_range_map(parameter)
        own, there = ranges["param"], ranges["gbuf_world_in_bucket"]
        buffer, _, bucket = optimizer.model_param_gbuf_map[parameter]
        weights = optimizer.buffers[buffer].buckets[bucket].param_data.view(-1)
        gradients = parameter.main_grad.view(-1)
        return gradients[own.start : own.end], weights[there.start : there.end]

    def update(self, factor: Tensor) -> None:
        """One step of Adam on gradients times factor."""
        inner = self.optimizer.optimizer
        for number, group in enumerate(inner.param_groups):
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            launches: dict[tuple, list[Shard]] = {}
            for parameter in group["params"]:
                shard = self._shard(parameter, inner.state[parameter])
                kinds = shard.gradient.dtype, getattr(shard.weight, "dtype", None)
                launches.setdefault((number, *kinds), []).append(shard)
            for key, shards in launches.items():
                adam.adam_(
                    self._table(key, shards), factor, lr=float(group["lr"]), betas=group["betas"],
                    eps=group["eps"], weight_decay=group["weight_decay"], step=group["step"],
                )  # fmt: skip
        for weight, shard in self._copied:
            weight.copy_(shard)

    def _shard(self, parameter: Tensor, state: dict[str, Tensor]) -> Shard:
        for name in _STATES:
            if name not in state:
                state[name] = torch.zeros_like(parameter)
        gradient, weight = self._ends[parameter]
        return Shard(gradient, parameter, *(state[name] for name in _STATES), weight)

    def _table(self, key: tuple, shards: list[Shard]) -> Table:
        """The launch's table, rebuilt where a tensor has moved, as when a checkpoint is loaded."""
        known = self._tables.get(key)
        if known is None or known.addresses != adam.addresses(shards):
            known = self._tables[key] = adam.table_of(shards)
        return known
