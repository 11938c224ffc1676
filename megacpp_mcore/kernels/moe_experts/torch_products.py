"""The experts' products by torch's grouped matrix product, which runs everywhere; the activation in
a kernel of its own.

x (R, k) and dy (R, n) are rows sorted by expert, or tokens that a routing gathers; w (E, n, k); the
rows of expert e end at ends[e].
"""

from torch import Tensor
from torch.nn.functional import grouped_mm

from megacpp_mcore.kernels.moe_experts.activation import activate, activate_backward
from megacpp_mcore.kernels.moe_experts.routing import Gathered, rows_of

NAME = "torch"
ALIGN = 1  # of an expert's first row


def forward(x: Tensor | Gathered, w: Tensor, ends: Tensor) -> Tensor:
    """x w^T: (R, n)."""
    return grouped_mm(rows_of(x), w.transpose(-1, -2), offs=ends)


def up(
    x: Tensor | Gathered, w: Tensor, probs: Tensor, ends: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """h = x w^T, (R, n), and fc2's input of it, (R, f), with the router's weights probs (R,)."""
    h = forward(x, w, ends)
    return h, activate(h, probs, ends, activation)


def input_gradient(
    dy: Tensor | Gathered, w: Tensor, ends: Tensor, needed_later: Gathered | None = None
) -> Tensor:
    """dy w: (R, k). needed_later: what may be copied to its rows meanwhile."""
    return grouped_mm(rows_of(dy), w, offs=ends)


def down_gradient(
    dy: Tensor | Gathered, w: Tensor, h: Tensor, probs: Tensor, ends: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of fc2's output: that of h (R, n), fc2's input (R, f), and the gradient of
    probs (R,), float32."""
    da = input_gradient(dy, w, ends)
    return activate_backward(da, h, probs, ends, activation)


def weight_gradient(dy: Tensor | Gathered, x: Tensor | Gathered, ends: Tensor) -> Tensor:
    """dy^T x of each expert's rows: (E, n, k)."""
    return grouped_mm(rows_of(dy).t(), rows_of(x), offs=ends)


def add_weight_gradient(
    total: Tensor, dy: Tensor | Gathered, x: Tensor | Gathered, ends: Tensor
) -> None:
    """total (E, n, k) += dy^T x, in total's dtype."""
    total.add_(weight_gradient(dy, x, ends))
