"""Token dispatchers of our own: on one rank, and by all-gather.

Without expert parallelism, three steps of Megatron's all-to-all dispatcher are unnecessary: sorting
the token chunks of other ranks (here an identity that reads and writes all permuted tokens in each
direction), copying the token counts of the experts to the host, and waiting for that copy. On an
H200 the sort took 0.9 ms in a layer of 16,384 tokens. The wait leaves the GPU idle until the host
has caught up, and prevents capturing the layer in a CUDA graph.
"""

from collections.abc import Callable

import torch
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)
from torch import Tensor

from megacpp_mcore.layers.exchange import AllGather, Pending, ReduceScatter, begun, ended


class LocalTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Permutes tokens by expert and back; all experts are local and no token is dropped.

    counts_on_device: the experts read their token counts on the device, so nothing is copied to the
    host. Otherwise they get the counts on the host, as from Megatron's dispatcher.
    """

    def __init__(self, *args, experts, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.counts_on_device = getattr(experts, "counts_on_device", False)

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


class GatheredTokenDispatcher(MoEAllGatherTokenDispatcher):
    """Every rank of the group gets every token, in order, and adds up what the experts return.

    Experts that `routed` get the tokens as they are, with the map and weights of this rank's
    experts: nothing is sorted, and no size depends on the routing. The tokens travel while the
    router computes (`begin`), and their sums return while the shared expert does. Other experts,
    and those after a router that pads, get what Megatron's dispatcher delivers.
    """

    def __init__(self, *args, experts, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        # A router that pads what an expert gets gives a token more than topk experts.
        padded = self.config.moe_pad_expert_input_to_capacity
        self.delivers_whole = hasattr(experts, "routed") and not padded
        self._tokens: tuple[Tensor, Pending] | None = None
        self.on_gradient: Callable[[Tensor], None] | None = None

    def begin(self, hidden_states: Tensor) -> None:
        """Send the tokens [s, b, h], before the router has seen them."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        self._tokens = begun(tokens, AllGather(self.tp_ep_group))

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [t, h], probs [t, E] -> tokens [ranks t, h], probs [ranks t, local experts]."""
        if not self.delivers_whole:
            return super().token_dispatch(hidden_states, probs)
        # One exchange for both: -1 where a token does not go to an expert.
        marked = probs.masked_fill(~self.routing_map, -1.0)
        marked = ended(*begun(marked, AllGather(self.tp_ep_group)))
        first = self.local_expert_indices[0]
        marked = marked[:, first : first + self.num_local_experts]
        self.routing_map = marked.detach() >= 0
        tokens, self.on_gradient = ended(*self._tokens), self._tokens[1].begin_backward
        self._tokens = None
        return tokens, marked.clamp(min=0)

    def begin_combine(self, output: Tensor) -> tuple[Tensor, Pending]:
        """The sums [ranks t, h] of this rank's experts, sent to the tokens' ranks."""
        return begun(output, ReduceScatter(self.tp_ep_group))

    def end_combine(self, sums: Tensor, pending: Pending) -> Tensor:
        """[t, h]."""
        return ended(sums, pending)


def chosen_experts(routing_map: Tensor, probs: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """map and probs [t, E] -> experts [t, topk] int64, -1 where a token has fewer, their probs."""
    values, chosen = probs.masked_fill(~routing_map, -1.0).topk(topk, dim=-1, sorted=False)
    return chosen.masked_fill(values.detach() < 0, -1), values.clamp(min=0)


def as_map(chosen: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The reverse of `chosen_experts`: [t, topk] each -> (map, probs), [t, experts] each."""
    column = torch.where(chosen < 0, experts, chosen)
    shape = (chosen.shape[0], experts + 1)
    marks = torch.zeros(shape, dtype=torch.bool, device=chosen.device).scatter_(1, column, True)
    probs = weights.new_zeros(shape).scatter(1, column, weights)
    return marks[:, :experts], probs[:, :experts]
