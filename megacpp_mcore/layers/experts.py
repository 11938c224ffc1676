"""Routed experts on torch's grouped matrix product, in Megatron's slot for them.

The interface and the checkpoint are those of Megatron's TEGroupedMLP and SequentialMLP: sharded
keys `experts.linear_fc1.weight` and `experts.linear_fc2.weight`, one shard per expert. A model
saved with one implementation loads with another. In memory, all local experts of a layer share one
parameter, which the grouped product reads in place.
"""

from collections.abc import Callable

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.tensor_parallel.layers import (
    _initialize_affine_weight_cpu,
    _initialize_affine_weight_gpu,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor

from megacpp_mcore import dispatch
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels import main_grad
from megacpp_mcore.kernels.moe_experts import (
    experts_grouped_mm,
    hopper_products,
    torch_products,
    weighted_swiglu,
)
from megacpp_mcore.kernels.moe_experts.activation import SQUARED_RELU, SWIGLU
from megacpp_mcore.kernels.moe_experts.fused import (
    Experts,
    experts_routed,
    experts_sorted,
)
from megacpp_mcore.kernels.moe_experts.readers import Readers, readers, readers_of_norm
from megacpp_mcore.kernels.moe_experts.routing import allocated
from megacpp_mcore.layers.param_gather import wait_for_param_gather
from megacpp_mcore.surfaces.moe_experts import FUSED, GROUPED_MM

# Fields of Megatron's config without a recipe key -> the one value that both classes support.
# Values that a recipe can set are refused earlier, by dispatch (`surfaces.moe_experts`).
_SERVED = {
    "activation_func_clamp_value": None, "glu_linear_offset": 0.0,
    "moe_mlp_glu_interleave_size": None, "moe_latent_size": None, "use_te_activation_func": False,
    "use_transformer_engine_op_fuser": False, "fp4": None,
    "delay_wgrad_compute": False, "gtp_weight_remat_size": 1,
    "fine_grained_activation_offloading": False, "moe_paged_stash": False,
    "overlap_dispatch_backward_with_experts_wgrad": False,
}  # fmt: skip


class ExpertsError(MegacppError):
    """A config or a checkpoint layout that the grouped experts do not support."""


class GroupedMMExperts(MegatronModule):
    """The local experts of a MoE layer. SwiGLU, no bias, bf16 (fp16 and fp32 run too).

    counts_on_device: token counts are read on the device; no host copy is needed.
    Raises ExpertsError, which names every unsupported field of the config.
    """

    counts_on_device = True
    backend, served = GROUPED_MM, _SERVED

    def __init__(self, num_local_experts: int, config, pg_collection=None, name=None) -> None:
        super().__init__(config)
        self._check(config)
        self.num_local_experts = num_local_experts
        self.ep_group = pg_collection.ep
        self.tp_group = pg_collection.expt_tp
        self.dp_group = pg_collection.expt_dp
        hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
        build = (num_local_experts, config, self.tp_group)
        halves = 2 if config.gated_linear_unit else 1
        self.linear_fc1 = _Weights(*build, (halves * ffn, hidden), 0, config.init_method, halves)
        self.linear_fc2 = _Weights(*build, (hidden, ffn), 1, config.output_layer_init_method, 1)

    def _check(self, config) -> None:
        differing = [
            f"{field} is {getattr(config, field)!r}, supported: {value!r}"
            for field, value in self.served.items()
            if getattr(config, field) != value
        ]
        if differing:
            raise ExpertsError(
                f"the moe_experts backend {self.backend!r} does not support: "
                f"{'; '.join(differing)}. Change it, or use the backend 'te' or 'reference'"
            )

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """tokens [t, h] sorted by expert, counts [local experts], probs [t] -> [t, h], no bias."""
        output = experts_grouped_mm(
            permuted_local_hidden_states, tokens_per_expert, *self._weights(), permuted_probs,
            activation=self._activation,
        )  # fmt: skip
        return output, None

    def _activation(self, h: Tensor, probs: Tensor) -> Tensor:
        if not self.config.bias_activation_fusion:
            return weighted_swiglu(h, probs)
        store = self.config.activation_func_fp8_input_store
        return weighted_bias_swiglu_impl(h, None, probs.unsqueeze(-1), store)

    def _weights(self) -> tuple[Tensor, Tensor]:
        """fc1's and fc2's, as the last update left them."""
        linears = self.linear_fc1, self.linear_fc2
        w1, w2 = (wait_for_param_gather(linear).weight for linear in linears)
        return w1, w2

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict:
        """Megatron's keys. Raises ExpertsError for metadata with singleton_local_shards."""
        if (metadata or {}).get("singleton_local_shards", False):
            raise ExpertsError(
                "singleton_local_shards (a checkpoint with one key per expert) is not supported by "
                f"the moe_experts backend {self.backend!r}; use 'te' or 'reference'"
            )
        first = self.ep_group.rank() * self.num_local_experts
        total = self.ep_group.size() * self.num_local_experts
        axis, data_rank = len(sharded_offsets), self.dp_group.rank()
        experts = [(axis, first + i, total) for i in range(self.num_local_experts)]
        sharded = {}
        for name, weights in self.named_children():
            key, local = f"{prefix}experts.{name}", f"{prefix}{name}"
            sharded[f"{local}.weight"] = weights.factory(
                f"{key}.weight", tuple(sharded_offsets), experts, (0, 0, data_rank)
            )
            # Empty: the other implementations keep their FP8 state under these keys.
            for i, expert in enumerate(experts):
                sharded[f"{local}._extra_state{i or ''}"] = make_sharded_object_for_checkpoint(
                    None,
                    f"{key}._extra_state",
                    (*sharded_offsets, expert),
                    (0, self.tp_group.rank(), data_rank),
                )
        return sharded


class FusedExperts(GroupedMMExperts):
    """GroupedMMExperts with kernels of our own around the products, and on Hopper for them.
    SwiGLU or, where the config is not gated, squared ReLU.

    Where every expert is local, a MoE layer calls `routed` with tokens as they are; `forward` takes
    what a dispatcher delivers. Weight gradients are added to main_grad with or after each product
    where the config has gradient_accumulation_fusion; the first of a step may be written there.
    """

    backend, served = FUSED, _SERVED | {"activation_func_fp8_input_store": False}
    products = torch_products

    def __init__(self, num_local_experts: int, config, *args, **kwargs) -> None:
        super().__init__(num_local_experts, config, *args, **kwargs)
        # Of a token's experts, those that can be here: what rows are allocated for.
        self._topk = min(config.moe_router_topk, num_local_experts)
        if config.gradient_accumulation_fusion:
            for linear in self.children():
                main_grad.overwrites(linear.weight)

    def take_tokens(self) -> None:
        """Choose and record the products of a MoE layer that will call `routed`."""
        why_not = hopper_products.reason(self.config.params_dtype, self.num_local_experts)
        self.products = torch_products if why_not else hopper_products
        dispatch.record(dispatch.Decision(
            surface="moe_products",
            requested=dispatch.AUTO,
            observed=self.products.NAME,
            reason=f"{hopper_products.NAME}: {why_not}" if why_not else "first in order",
            implementation=f"{self.products.__name__}:forward",
        ))  # fmt: skip

    def readers(self, hidden_states: Tensor, gate: Tensor | None = None) -> Readers:
        """The readers of a MoE layer's tokens [s, b, h]. gate: as of `readers.readers`."""
        return readers(hidden_states, self._rows(hidden_states), self._unread(), gate)

    def readers_of_norm(
        self, norm: torch.nn.Module, hidden_states: Tensor, gate: Tensor
    ) -> tuple[Readers, Tensor]:
        """The readers of norm's output, and its input [s, b, h] as the residual. norm and gate:
        gathered, where data parallelism gathers parameters."""
        size = self._rows(hidden_states)
        return readers_of_norm(hidden_states, norm.weight, norm.eps, size, self._unread(), gate)

    def _rows(self, hidden_states: Tensor) -> int:
        tokens = hidden_states.shape[:-1].numel()
        return allocated(tokens, self._topk, self.num_local_experts, self.products.ALIGN)

    def routed(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor,
        addend: Tensor | None = None, residual: Tensor | None = None, rows: Tensor | None = None,
        hidden: Tensor | None = None, found: Readers | None = None,
        on_gradient: Callable[[Tensor], None] | None = None,
    ) -> Tensor:  # fmt: skip
        """tokens [t, h], map and probs [t, experts] -> [t, h], the experts' sum plus addends.

        addend, residual, on_gradient: as of experts_routed. found: the tokens' readers; rows and
        hidden: its own. Recomputation sees only tensors that are positional arguments of their own.

        Raises HookError for hooks of this module, which is not called.
        """
        wait_for_param_gather(self)
        return experts_routed(
            hidden_states, routing_map, probs, self._experts(), self._topk, addend, residual, rows,
            hidden, found, on_gradient,
        )  # fmt: skip

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """As of GroupedMMExperts."""
        rows = permuted_local_hidden_states, tokens_per_expert, permuted_probs
        return experts_sorted(*rows, self._experts()), None

    def _experts(self) -> Experts:
        return self._of(*self._weights())

    def _unread(self) -> Experts:
        """The same before their weights are gathered, for gradients alone."""
        return self._of(self.linear_fc1.weight, self.linear_fc2.weight)

    def _of(self, w1: Tensor, w2: Tensor) -> Experts:
        fused = self.config.gradient_accumulation_fusion
        activation = SWIGLU if self.config.gated_linear_unit else SQUARED_RELU
        return Experts(w1, w2, fused, self.products, activation)


class _Weights(torch.nn.Module):
    """One weight (experts, out, in); axis `split` of (out, in) is split over the expert TP ranks.

    Every expert is initialised like Megatron's parallel linears. parts: 2 for a gated fc1, which
    holds this rank's rows of the gate first, then its rows of the up projection; otherwise 1.
    """

    def __init__(
        self, experts: int, config, group, shape: tuple[int, int], split: int,
        init_method: Callable[[Tensor], object], parts: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.parts = parts
        self.split, self.ranks, self.rank = split, group.size(), group.rank()
        local = [size // self.ranks if axis == split else size for axis, size in enumerate(shape)]
        on_cpu = config.use_cpu_initialization
        device = "cpu" if on_cpu else torch.cuda.current_device()
        weight = torch.empty(experts, *local, dtype=config.params_dtype, device=device)
        for expert in weight if config.perform_initialization else ():
            if on_cpu:
                _initialize_affine_weight_cpu(
                    expert, *shape, local[split], split, init_method,
                    params_dtype=config.params_dtype, rank=self.rank, world_size=self.ranks,
                    skip_set_tensor_parallel_attributes=True,
                )  # fmt: skip
            else:
                _initialize_affine_weight_gpu(expert, init_method, split, is_expert=True)
        self.weight = torch.nn.Parameter(weight)
        set_tensor_model_parallel_attributes(self.weight, True, split + 1, 1)
        other_groups = config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        self.weight.allreduce = not (config.expert_model_parallel_size > 1 or other_groups)

    def _load_from_state_dict(self, state_dict, prefix, *arguments) -> None:
        """Drops the `_extra_state` of a checkpoint that another implementation wrote."""
        for key in [key for key in state_dict if key.startswith(f"{prefix}_extra_state")]:
            del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def factory(
        self, key: str, offsets: tuple, experts: list[tuple[int, int, int]],
        replica_id: tuple[int, int, int],
    ) -> ShardedTensorFactory:  # fmt: skip
        """The weight as Megatron's shards: one per expert, gate and up projection separately."""
        prepended = len(offsets) + 1
        parts = self.parts

        def build(key, tensor, replica_id, flattened_range):
            if flattened_range is not None:
                raise ExpertsError(f"{key}: flattened shards are not supported for expert weights")
            axis = prepended + self.split
            return [
                ShardedTensor.from_rank_offsets(
                    key, part, *offsets, expert,
                    (axis, index * self.ranks + self.rank, parts * self.ranks),
                    replica_id=replica_id, prepend_axis_num=prepended,
                )
                for expert, weight in zip(experts, tensor, strict=True)
                for index, part in enumerate(weight.chunk(parts))
            ]  # fmt: skip

        def merge(shards: list[Tensor]) -> Tensor:
            return torch.stack(shards).reshape(len(experts), -1, shards[0].shape[-1])

        return ShardedTensorFactory(key, self.weight, build, merge, replica_id)
