"""fc1's weight gradient after the layer's other gradients: then the rows of dx have been freed.

Both at once would be the most memory that a layer takes. H's gradient travels through autograd to a
function that is made before those that sum the tokens' gradients; autograd runs the latest first.
"""

from types import ModuleType

import torch
from torch import Tensor

from megacpp_mcore.kernels.moe_experts.routing import Gathered, Sorted


def hidden(w1: Tensor, size: int, products: ModuleType, left: Sorted) -> Tensor:
    """What stands for H (R, n) in autograd, without memory of its own: it must get H's gradient, of
    which that of w1 (E, n, h) is made. size: R. products: torch_products, or a module with its
    functions. left: where H's backward function leaves x and its routing.
    """
    return _LateGradient.apply(w1, size, products, left)


class _LateGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w1, size, products, left):
        ctx.products, ctx.left = products, left
        return w1.new_empty(()).expand(size, w1.shape[1])

    @staticmethod
    def backward(ctx, dh):
        (x, routing), ctx.left.of_fc1 = ctx.left.of_fc1, None
        dw1 = ctx.products.weight_gradient(dh, Gathered(x, routing), routing.ends)
        return dw1, None, None, None
