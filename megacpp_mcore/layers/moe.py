"""Megatron's MoE layer, with our own dispatcher when all experts are on this rank.

Without expert parallelism, three steps of Megatron's all-to-all dispatcher are unnecessary: sorting
the token chunks of other ranks (here an identity that reads and writes all permuted tokens in each
direction), copying the token counts of the experts to the host, and waiting for that copy. On an
H200 the sort took 0.9 ms in a layer of 16,384 tokens. The wait leaves the GPU idle until the host
has caught up, and prevents capturing the layer in a CUDA graph.
"""

from dataclasses import replace

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megacpp_mcore import dispatch
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.moe_experts.readers import Readers


class MoELayerError(MegacppError):
    """A MoE layer that cannot run as the recipe requests."""


class LocalTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Permutes tokens by expert and back; all experts are local and no token is dropped.

    counts_on_device: the experts read their token counts on the device, so nothing is copied to the
    host. Otherwise they get the counts on the host, as from Megatron's dispatcher.
    """

    def __init__(self, *args, counts_on_device: bool, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.counts_on_device = counts_on_device

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """routing_map (tokens, experts), bool -> token count of each expert, (experts,) int64."""
        self.num_out_tokens = routing_map.size(0) * self.config.moe_router_topk
        self.num_global_tokens_per_local_expert = None  # of the chunk sort, which there is none of
        if not self.counts_on_device:
            self._maybe_update_cuda_sync_point("before_finish")
        return routing_map.sum(dim=0)

    def dispatch_postprocess(
        self, global_input_tokens: Tensor, global_probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens from `dispatch_preprocess`, which are already sorted by expert."""
        counts = self._maybe_dtoh_and_synchronize("before_finish", self.tokens_per_expert)
        self.tokens_per_expert = None
        return global_input_tokens, counts, global_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The experts' output, unchanged."""
        return hidden_states

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert=None):
        if self.counts_on_device:
            return tokens_per_expert
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)


class UnmovedTokenDispatcher(LocalTokenDispatcher):
    """Moves nothing: for experts that take tokens in their order, with the router's map."""

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """hidden_states [s, b, h] -> [s * b, h], and probs as they are."""
        self.hidden_shape = hidden_states.shape
        self.routing_map = routing_map
        return hidden_states.view(-1, self.hidden_shape[-1]), probs


# What a run and its receipt say where Megatron's dispatcher, which the recipe names, is replaced.
_LOCAL = dispatch.Decision(
    surface="moe_dispatch",
    requested="alltoall",
    observed="local",
    reason="every expert is on this rank: the same tokens in the same order, without the sort of "
    "chunks from other ranks",
    implementation=f"{__name__}:LocalTokenDispatcher",
)
_UNMOVED = replace(
    _LOCAL,
    observed="unmoved",
    reason="every expert is on this rank, and the experts read the router's map themselves",
    implementation=f"{__name__}:UnmovedTokenDispatcher",
)


class MegacppMoELayer(MoELayer):
    """Megatron's MoELayer, with LocalTokenDispatcher when that computes the same: then recorded.

    Raises MoELayerError for launch.cuda_graph_impl = "full_iteration" if the host must know how
    many tokens an expert gets, which is impossible in a captured step.
    """

    def __init__(self, config, *args, pg_collection=None, **kwargs) -> None:
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        counts_on_device = getattr(self.experts, "counts_on_device", False)
        local = _is_local(self)
        if config.cuda_graph_impl == "full_iteration" and not (local and counts_on_device):
            raise MoELayerError(_not_capturable(self, local))
        self.routed_inside = (
            local and hasattr(self.experts, "routed") and not self.shared_expert_overlap
        )
        self._readers: Readers | None = None
        if self.routed_inside:
            self.experts.take_tokens()
        if local:
            dispatch.record(_UNMOVED if self.routed_inside else _LOCAL)
            dispatcher = UnmovedTokenDispatcher if self.routed_inside else LocalTokenDispatcher
            self.token_dispatcher = dispatcher(
                self.num_local_experts,
                self.local_expert_indices,
                config=config,
                pg_collection=pg_collection or get_default_pg_collection(),
                counts_on_device=counts_on_device,
            )
            if self.use_shared_expert and self.shared_expert_overlap:
                self.token_dispatcher.set_shared_experts(self.shared_experts)

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor | None:
        """The first of the steps of a forward pass."""
        if self.routed_inside:
            self._readers = self.experts.readers(hidden_states)
            hidden_states = self._readers.shared
        return super().shared_experts_compute(hidden_states)

    def route(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.routed_inside:
            hidden_states = self._readers.router
        return super().route(hidden_states, padding_mask)

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        if self.routed_inside:
            return hidden_states, probs
        return super().dispatch(hidden_states, probs)

    def routed_experts_compute(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The experts' output, or where they take the shared expert's, too, what they need."""
        if self.routed_inside:
            self.token_dispatcher.probs = probs
            return hidden_states, None
        return super().routed_experts_compute(hidden_states, probs)

    def combine(self, output: Tensor) -> Tensor:
        return output if self.routed_inside else super().combine(output)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """The sum of the experts and the shared expert, [s, b, h]."""
        if not self.routed_inside:
            return super().postprocess(output, shared_expert_output)
        dispatcher, found = self.token_dispatcher, self._readers
        if shared_expert_output is not None:
            shared_expert_output = shared_expert_output.view_as(output)
        routing = dispatcher.routing_map, dispatcher.probs
        # Nothing of this forward pass outlives its graph.
        dispatcher.routing_map = dispatcher.probs = self._readers = None
        output = self.experts.routed(output, *routing, shared_expert_output, found.rows, found)
        return output.view(dispatcher.hidden_shape)


def _is_local(layer: MoELayer) -> bool:
    """Whether LocalTokenDispatcher computes what the layer's own dispatcher does."""
    config, dispatcher = layer.config, layer.token_dispatcher
    return (
        type(dispatcher) is MoEAlltoAllTokenDispatcher
        and dispatcher.ep_size == 1
        and dispatcher.tp_size == 1
        and config.moe_expert_capacity_factor is None
        and not config.moe_pad_expert_input_to_capacity
        and not config.moe_router_padding_for_quantization
        and config.cuda_graph_impl in ("none", "full_iteration")
    )


def _not_capturable(layer: MoELayer, local: bool) -> str:
    start = 'launch.cuda_graph_impl = "full_iteration": '
    if local:
        return start + (
            f"the experts {type(layer.experts).__name__} read the tokens of each expert on the "
            'host; set backends.moe_experts = "grouped_mm", or cuda_graph_impl = "none"'
        )
    return start + (
        "tokens are exchanged between ranks or dropped, by counts that the host reads; it needs "
        'moe_token_dispatcher_type = "alltoall" with expert_model_parallel_size = 1, '
        "expert_tensor_parallel_size = 1 and no moe_expert_capacity_factor, or "
        'cuda_graph_impl = "none"'
    )
