"""The experts' weights, and where the gradient of one goes.

It is added to the weight's main_grad, where Megatron asks for it, by the contract of its own
linears: grad_added_to_main_grad is set, and the gradient that autograd gets is not used.
"""

from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from megacpp_mcore.kernels import main_grad
from megacpp_mcore.kernels.moe_experts import torch_products
from megacpp_mcore.kernels.moe_experts.activation import SWIGLU
from megacpp_mcore.kernels.moe_experts.routing import Gathered


class Experts(NamedTuple):
    """w1 (E, 2f, h), or (E, f, h) where the activation is not gated; w2 (E, h, f).

    into_main_grad: add the gradients to the weights' main_grad. products: torch_products, or a
    module with its functions. activation: one of activation.ACTIVATIONS.
    """

    w1: Tensor
    w2: Tensor
    into_main_grad: bool = False
    products: ModuleType = torch_products
    activation: str = SWIGLU

    def gradient(
        self, weight: Tensor, dy: Tensor | Gathered, x: Tensor | Gathered, ends: Tensor,
        during_exchange: bool = False,
    ) -> Tensor | None:  # fmt: skip
        """What autograd gets for w1 or w2.

        dy, x: the gradient of its product's output and the product's input. during_exchange: as of
        torch_products.
        """
        if not self.into_main_grad or not main_grad.takes_gradients(weight):
            return self.products.weight_gradient(dy, x, ends, during_exchange)
        self.products.add_weight_gradient(
            weight.main_grad, dy, x, ends, main_grad.is_due(weight), during_exchange
        )
        return main_grad.handed_on(weight)
