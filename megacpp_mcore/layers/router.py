"""Megatron's router with a gating product of ours."""

from collections.abc import Callable

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class GatedRouter(TopKRouter):
    """Megatron's TopKRouter; `product` computes its logits, as `kernels.router_gating` does."""

    def __init__(self, *args, product: Callable[[Tensor, Tensor], Tensor], **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.product = product

    def gating(self, input: Tensor) -> Tensor:
        """Tokens [s, b, h] -> logits [s, b, experts] in float32."""
        if self.weight.device != input.device:  # Megatron makes the weight on the CPU
            self.weight.data = self.weight.data.to(input.device)
        return self.product(input, self.weight)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count each expert's tokens, from which the bias is updated; routing_map [t, experts].

        Megatron's, without torch.compile, which takes seconds in a run's first step to fuse a sum
        with an addition of a number for each expert.
        """
        if self.enable_expert_bias and torch.is_grad_enabled():
            with torch.no_grad():
                if padding_mask is not None:
                    routing_map = routing_map & ~padding_mask
                self.local_tokens_per_expert += routing_map.sum(dim=0)
