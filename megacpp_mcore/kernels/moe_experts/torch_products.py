"""The experts' products by torch's grouped matrix product, which runs everywhere.

x (R, k) and dy (R, n): rows sorted by expert; w (E, n, k); ends (E,): where its rows end
"""

from torch import Tensor
from torch.nn.functional import grouped_mm

ALIGN = 1  # of an expert's first row


def forward(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """x w^T: (R, n)."""
    return grouped_mm(x, w.transpose(-1, -2), offs=ends)


def input_gradient(dy: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """dy w: (R, k)."""
    return grouped_mm(dy, w, offs=ends)


def weight_gradient(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """dy^T x of each expert's rows: (E, n, k)."""
    return grouped_mm(dy.t(), x, offs=ends)


def add_weight_gradient(total: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> None:
    """total (E, n, k) += dy^T x, in total's dtype."""
    total.add_(weight_gradient(dy, x, ends))
