"""Megatron's MoE layer, with the token dispatcher that dispatch chooses.

Experts that take tokens in their order get them so where the dispatcher delivers them so: on one
rank without a copy, by all-gather and by DeepEP as they arrive. Then the shared expert computes
while the experts' sums return.
"""

import contextlib
from collections.abc import Iterator

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from megacpp_mcore import dispatch
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.moe_experts.readers import Readers
from megacpp_mcore.layers.moe_dispatchers import UnmovedTokenDispatcher
from megacpp_mcore.layers.norm import is_fused_with_residual
from megacpp_mcore.layers.param_gather import wait_for_param_gather
from megacpp_mcore.layers.router import DispatchedTopKRouter
from megacpp_mcore.layers.settings import plugin_settings
from megacpp_mcore.surfaces import moe_dispatch
from megacpp_mcore.surfaces.workload import current_device


class MoELayerError(MegacppError):
    """A MoE layer that cannot run as the recipe requests."""


class MegacppMoELayer(MoELayer):
    """Megatron's MoELayer; its dispatcher is a backend of the surface `moe_dispatch`.

    Raises DispatchError for a dispatcher that is named and cannot serve, and MoELayerError for
    launch.cuda_graph_impl = "full_iteration" if the host must know how many tokens an expert gets,
    which is impossible in a captured step.
    """

    def __init__(self, config, *args, pg_collection=None, **kwargs) -> None:
        with _megatrons_words(config, moe_dispatch.MEGATRONS[moe_dispatch.ALLGATHER]):
            # One that needs no package and makes no stream; it is replaced below.
            super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        self.token_dispatcher = self._dispatcher(pg_collection or get_default_pg_collection())
        if self.use_shared_expert and self.shared_expert_overlap:
            self.token_dispatcher.set_shared_experts(self.shared_experts)
        self.routed_inside = isinstance(self.token_dispatcher, UnmovedTokenDispatcher)
        self.delivered_whole = getattr(self.token_dispatcher, "delivers_whole", False)
        self._readers: Readers | None = None
        self._tokens: Tensor | None = None
        self._shared: Tensor | None = None
        self._residual: Tensor | None = None
        if self.routed_inside or self.delivered_whole:
            self.experts.take_tokens()

    def _dispatcher(self, groups) -> MoETokenDispatcher:
        config = self.config
        whole_step = config.cuda_graph_impl in ("none", "full_iteration")
        routes = whole_step and hasattr(self.experts, "routed")
        workload = moe_dispatch.workload(
            current_device(), config, routes, moe_dispatch.ranks_of_a_host()
        )
        decision = dispatch.decide(moe_dispatch.NAME, workload, plugin_settings(config).backends)
        if config.cuda_graph_impl == "full_iteration":
            _check_capturable(config, self.experts, decision.observed)
        build = decision.load()
        ours = {"experts": self.experts} if build.__module__.startswith("megacpp_mcore.") else {}
        with _megatrons_words(config, moe_dispatch.MEGATRONS[decision.observed]):
            return build(
                self.num_local_experts,
                self.local_expert_indices,
                config=config,
                pg_collection=groups,
                **ours,
            )

    @property
    def takes_residual(self) -> bool:
        """Whether `forward` can add one: the sum is made here, and no second time."""
        return self.routed_inside and not self.moe_layer_recompute

    def normed(
        self, norm: torch.nn.Module, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor, Readers | None]:
        """The output [s, b, h] of the norm in front of this layer, the residual, and what `forward`
        takes as readers.

        Where the norm is ours and the router's product is plain, one kernel can have the norm and
        that product, and one the norm's backward pass and the sum of the gradients that come to it.
        The norm is not called then, but data parallelism's hooks are; one with others is called.
        """
        if self.takes_residual and is_fused_with_residual(norm):
            # Before the router's parameters, which may be in the next bucket: Megatron gathers and
            # expects them in their order.
            wait_for_param_gather(norm, is_called=True)  # below, where there is no gate
            gate = self._gate(hidden_states)
            if gate is not None:
                readers, residual = self.experts.readers_of_norm(norm, hidden_states, gate)
                return readers.router, residual, readers
        found = norm(hidden_states)
        return *(found if isinstance(found, tuple) else (found, hidden_states)), None

    def _gate(self, hidden_states: Tensor) -> Tensor | None:
        """As of DispatchedTopKRouter.gate."""
        ours = isinstance(self.router, DispatchedTopKRouter)
        return self.router.gate(hidden_states) if ours else None

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: tuple | None = None,
        padding_mask: Tensor | None = None,
        residual: Tensor | None = None,
        readers: Readers | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As Megatron's. residual [s, b, h], where `takes_residual`: added in the experts' sum.
        readers: of hidden_states, as `normed` returns them.

        Raises MoELayerError for a residual that would not be.
        """
        if residual is not None and not (self.takes_residual and intermediate_tensors is None):
            raise MoELayerError("this pass of the MoE layer adds no residual; add it to its output")
        self._residual, self._readers = residual, readers
        try:
            return super().forward(hidden_states, intermediate_tensors, padding_mask)
        finally:
            self._residual = self._readers = None

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor | None:
        """The first of the steps of a forward pass; where `combine` computes it, None."""
        if self.delivered_whole:
            self._tokens = hidden_states
            if hasattr(self.token_dispatcher, "begin"):
                self.token_dispatcher.begin(hidden_states)
            return None
        if self.routed_inside:
            if self._readers is None:
                self._readers = self.experts.readers(hidden_states, self._gate(hidden_states))
            hidden_states = self._readers.shared
        return super().shared_experts_compute(hidden_states)

    def route(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.routed_inside:
            hidden_states = self._readers.router
            if self._readers.logits is not None:
                self.router.computed = self._readers.logits
        return super().route(hidden_states, padding_mask)

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        if self.routed_inside:
            return hidden_states, probs
        return super().dispatch(hidden_states, probs)

    def routed_experts_compute(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The experts' output, or where they take the shared expert's, too, what they need."""
        dispatcher = self.token_dispatcher
        if self.routed_inside:
            dispatcher.probs = probs
            return hidden_states, None
        if self.delivered_whole:
            routing_map, dispatcher.routing_map = dispatcher.routing_map, None
            sent, dispatcher.on_gradient = getattr(dispatcher, "on_gradient", None), None
            return self.experts.routed(hidden_states, routing_map, probs, on_gradient=sent), None
        return super().routed_experts_compute(hidden_states, probs)

    def combine(self, output: Tensor) -> Tensor:
        if self.routed_inside:
            return output
        if not self.delivered_whole:
            return super().combine(output)
        begun = self.token_dispatcher.begin_combine(output)
        tokens, self._tokens = self._tokens, None
        self._shared = super().shared_experts_compute(tokens)
        return self.token_dispatcher.end_combine(*begun)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """The sum of the experts, the shared expert and the residual, [s, b, h]."""
        if not self.routed_inside:
            if self.delivered_whole:
                shared_expert_output, self._shared = self._shared, None
            return super().postprocess(output, shared_expert_output)
        dispatcher, found = self.token_dispatcher, self._readers
        addends = (
            None if x is None else x.reshape(output.shape)
            for x in (shared_expert_output, self._residual)
        )  # fmt: skip
        routing = dispatcher.routing_map, dispatcher.probs
        # Nothing of this forward pass outlives its graph.
        dispatcher.routing_map = dispatcher.probs = self._readers = None
        output = self.experts.routed(output, *routing, *addends, found.rows, found.hidden, found)
        return output.view(dispatcher.hidden_shape)


@contextlib.contextmanager
def _megatrons_words(config, words: moe_dispatch.Words) -> Iterator[None]:
    """Its dispatchers read in the config which they are."""
    found = config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend
    config.moe_token_dispatcher_type = words.type
    config.moe_flex_dispatcher_backend = words.flex or found[1]
    try:
        yield
    finally:
        config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend = found


def _check_capturable(config, experts, dispatcher: str) -> None:
    start = 'launch.cuda_graph_impl = "full_iteration": '
    by_gather = dispatcher == moe_dispatch.ALLGATHER
    known = by_gather or dispatcher in moe_dispatch.ON_ONE_RANK
    if config.moe_expert_capacity_factor is not None or not known:
        raise MoELayerError(
            f"{start}tokens are exchanged between ranks or dropped ({dispatcher}), by counts that "
            "the host reads; it needs expert_model_parallel_size = 1 or backends.moe_dispatch = "
            f'"{moe_dispatch.ALLGATHER}", expert_tensor_parallel_size = 1 and no '
            'moe_expert_capacity_factor, or cuda_graph_impl = "none"'
        )
    if by_gather and not hasattr(experts, "routed"):
        raise MoELayerError(
            f"{start}the experts {type(experts).__name__} take tokens sorted by expert, of which "
            'the host reads the counts; set backends.moe_experts = "fused_moe", or '
            'cuda_graph_impl = "none"'
        )
    if not getattr(experts, "counts_on_device", False):
        raise MoELayerError(
            f"{start}the experts {type(experts).__name__} read the tokens of each expert on the "
            'host; set backends.moe_experts = "grouped_mm", or cuda_graph_impl = "none"'
        )
