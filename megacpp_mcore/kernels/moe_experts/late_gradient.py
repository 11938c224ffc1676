"""fc1's weight gradient after the layer's other gradients: then the rows of dx have been freed.

Both at once would be the most memory that a layer takes. H's gradient travels through autograd to a
function that is made before those that sum the tokens' gradients; autograd runs the latest first.
"""

import torch
from torch import Tensor

from megacpp_mcore.kernels.backward_pass import no_second_derivative
from megacpp_mcore.kernels.moe_experts.routing import Gathered, Sorted
from megacpp_mcore.kernels.moe_experts.weights import Experts


def hidden(experts: Experts, size: int, left: Sorted) -> Tensor:
    """What stands for H (R, n) in autograd, without memory of its own: it must get H's gradient, of
    which that of w1 is made. size: R. left: where H's backward function leaves x and its routing.
    """
    return _LateGradient.apply(experts.w1, experts, size, left)


class _LateGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w1, experts, size, left):
        ctx.experts, ctx.left = experts, left
        return w1.new_empty(()).expand(size, w1.shape[1])

    @staticmethod
    @no_second_derivative
    def backward(ctx, dh):
        (x, routing), ctx.left.of_fc1 = ctx.left.of_fc1, None
        tokens = Gathered(x, routing)
        return ctx.experts.gradient(ctx.experts.w1, dh, tokens, routing.ends), None, None, None
