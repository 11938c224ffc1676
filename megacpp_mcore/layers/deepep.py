"""DeepEP's exchange within a host, with Megatron's interface of a token dispatcher.

Megatron's own adapter asks DeepEP for the size of an RDMA buffer, which stops a build without
NVSHMEM, and keeps one Buffer that it makes again for another group. Here a group has one Buffer,
for NVLink alone, made with the first layer. DeepEP: https://github.com/deepseek-ai/DeepEP, v1.2.1.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import permute, unpermute
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from megacpp_mcore.kernels.backward_pass import no_second_derivative
from megacpp_mcore.layers.exchange import Begun, Pending, begun, ended
from megacpp_mcore.layers.moe_dispatchers import as_map, chosen_experts

# Multiprocessors that copy, of an H200's 132. With DeepEP's own 20 an exchange between two H200s
# takes twice as long (docs/deepep.md).
_SMS = 48
_links: dict[dist.ProcessGroup, "Link"] = {}


@dataclass
class Link:
    """A group's Buffer, and how it is called."""

    buffer: Any
    sending: Any
    returning: Any

    def dispatch(self, x: Tensor, chosen: Tensor, weights: Tensor, experts: int, worst: int):
        """tokens [t, h], experts [t, k], weights [t, k] -> tokens [r, h], local experts [r, k] (-1:
        of another rank), weights [r, k], tokens of each local expert on the host, handle.

        worst: 0, or the rows that are allocated without waiting for how many there are; those that
        none arrives for have no expert, and the counts are empty.
        """
        to_rank, _, to_expert, goes, _ = self.buffer.get_dispatch_layout(chosen, experts)
        return self.buffer.dispatch(
            x, topk_idx=chosen, topk_weights=weights, num_tokens_per_rank=to_rank,
            is_token_in_rank=goes, num_tokens_per_expert=to_expert, num_worst_tokens=worst,
            config=self.sending,
        )[:5]  # fmt: skip

    def resend(self, x: Tensor, handle: tuple) -> Begun:
        """tokens [t, h] to where `dispatch` sent them, [r, h]."""
        x = x.contiguous()
        sent = self.buffer.dispatch(x, handle=handle, config=self.sending, async_finish=True)
        return sent[0], sent[5].current_stream_wait

    def combine(self, y: Tensor, handle: tuple) -> Begun:
        """[r, h] -> [t, h], the sum of a token's rows on all ranks, in float32."""
        y = y.contiguous()
        sums, _, event = self.buffer.combine(y, handle, config=self.returning, async_finish=True)
        return sums, event.current_stream_wait

    def combine_with_weights(self, y: Tensor, weights: Tensor, handle: tuple):
        """As `combine`, and [r, k] weights -> [t, k]; both are there."""
        weights = weights.contiguous()
        y = y.contiguous()
        return self.buffer.combine(y, handle, topk_weights=weights, config=self.returning)[:2]


def link_of(group: dist.ProcessGroup, hidden_size: int, sms: int | None = None) -> Link:
    """The group's, made where there is none yet: then every rank of the group must call."""
    if group not in _links:
        from deep_ep import Buffer

        Buffer.set_num_sms(sms or _SMS)
        ranks, row = group.size(), 2 * hidden_size
        configs = Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)
        size = max(config.get_nvl_buffer_size_hint(row, ranks) for config in configs)
        _links[group] = Link(Buffer(group, size, 0, explicitly_destroy=True), *configs)
    return _links[group]


def close() -> None:
    """Destroy every Buffer, a step that all ranks of a group take together.

    Left to the interpreter's end, one rank would wait for another that has gone.
    """
    while _links:
        _, link = _links.popitem()
        link.buffer.destroy()


class DeepEPTokenDispatcher(MoETokenDispatcher):
    """Sends a token once to each rank that has one of its experts, and adds up what returns.

    Experts that `routed` get the tokens in the order of arrival, with their map and weights; others
    get them sorted by expert. Sizes are those of `surfaces.moe_dispatch`.
    """

    def __init__(
        self, num_local_experts: int, local_expert_indices: list[int], config, pg_collection=None,
        *, experts,
    ) -> None:  # fmt: skip
        super().__init__(config=config, pg_collection=pg_collection)
        self.num_local_experts = num_local_experts
        self.delivers_whole = hasattr(experts, "routed")
        self.waits = True  # for the number of tokens; else room for as many as there can be
        sms = config.moe_flex_dispatcher_num_sms
        self.link = link_of(self.ep_group, config.hidden_size, sms)
        self._handle: tuple | None = None
        self._counts: Tensor | None = None

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """tokens [s, b, h], map and probs [t, E] -> tokens [t, h], weights [t, k]."""
        self.hidden_shape = hidden_states.shape
        self._chosen, weights = chosen_experts(routing_map, probs, self.config.moe_router_topk)
        return hidden_states.view(-1, self.hidden_shape[-1]), weights

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [t, h], weights [t, k] -> tokens [r, h], probs [r, local experts]."""
        chosen, self._chosen = self._chosen, None
        experts = self.config.num_moe_experts
        worst = 0 if self.waits else len(hidden_states) * self.ep_size
        tokens, weights, chosen, counts, self._handle = _Dispatch.apply(
            hidden_states, probs, chosen, self.link, experts, worst
        )
        self._counts = torch.tensor(counts)
        self.routing_map, probs = as_map(chosen, weights, self.num_local_experts)
        return tokens, probs

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [r, h] -> tokens [rows, h] sorted by expert, counts on the host, probs [rows]."""
        self._shape, counts = hidden_states.shape, self._counts
        tokens, probs, self._mapping, *_ = permute(
            hidden_states, self.routing_map, probs=probs, num_out_tokens=int(counts.sum()),
            fused=self.config.moe_permute_fusion,
        )  # fmt: skip
        return tokens, counts, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """[rows, h] -> [r, h]: the sums of each token's rows."""
        sums = unpermute(
            hidden_states, self._mapping, restore_shape=self._shape, routing_map=self.routing_map,
            fused=self.config.moe_permute_fusion,
        )  # fmt: skip
        self._mapping = self.routing_map = None
        return sums

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """[r, h] -> [t, h]."""
        return self.end_combine(*self.begin_combine(hidden_states))

    def begin_combine(self, output: Tensor) -> tuple[Tensor, Pending]:
        """The sums [r, h] of this rank's experts, sent to the tokens' ranks."""
        handle, self._handle, self._counts = self._handle, None, None
        return begun(output, _Return(self.link, handle))

    def end_combine(self, sums: Tensor, pending: Pending) -> Tensor:
        """[t, h]."""
        return ended(sums, pending)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """[t, h] -> [s, b, h]."""
        return hidden_states.view(self.hidden_shape)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, chosen, link, experts, worst):
        x, weights = x.contiguous(), weights.float().contiguous()
        tokens, chosen, weights, counts, handle = link.dispatch(x, chosen, weights, experts, worst)
        ctx.link, ctx.handle = link, handle
        ctx.mark_non_differentiable(chosen)
        return tokens, weights, chosen, counts, handle

    @staticmethod
    @no_second_derivative
    def backward(ctx, d_tokens, d_weights, *_):
        dx, d_weights = ctx.link.combine_with_weights(d_tokens, d_weights, ctx.handle)
        return dx, d_weights, None, None, None, None


@dataclass
class _Return:
    """The sums of a token's rows, and backward its gradient to each of them."""

    link: Link
    handle: tuple

    def forward(self, x: Tensor) -> Begun:
        return self.link.combine(x, self.handle)

    def backward(self, gradient: Tensor) -> Begun:
        return self.link.resend(gradient, self.handle)
