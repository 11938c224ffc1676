"""Megatron's router with a gating product of ours."""

from collections.abc import Callable

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
