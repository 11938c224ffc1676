"""The experts' products by torch's grouped matrix product, which runs everywhere, and the norm in
front of the layer with what reads it: the router's logits forward, the tokens' gradient backward.

x (R, k) and dy (R, n) are rows sorted by expert, or tokens that a routing gathers; w (E, n, k); the
rows of expert e end at ends[e].
"""

from torch import Tensor
from torch.nn.functional import grouped_mm

from megacpp_mcore.kernels.main_grad import fp32_product
from megacpp_mcore.kernels.moe_experts.routing import Gathered, Routing, rows_of, sum_gradients
from megacpp_mcore.kernels.norm.triton import rms_norm_backward, rms_norm_forward

NAME = "torch"
ALIGN = 1  # of an expert's first row


def forward(x: Tensor | Gathered, w: Tensor, ends: Tensor) -> Tensor:
    """x w^T: (R, n)."""
    return grouped_mm(rows_of(x), w.transpose(-1, -2), offs=ends)


def input_gradient(dy: Tensor | Gathered, w: Tensor, ends: Tensor) -> Tensor:
    """dy w: (R, k)."""
    return grouped_mm(rows_of(dy), w, offs=ends)


def weight_gradient(
    dy: Tensor | Gathered, x: Tensor | Gathered, ends: Tensor, during_exchange: bool = False
) -> Tensor:
    """dy^T x of each expert's rows: (E, n, k). during_exchange: ranks exchange tensors meanwhile,
    to which a part of the GPU may be left."""
    return grouped_mm(rows_of(dy).t(), rows_of(x), offs=ends)


def add_weight_gradient(
    total: Tensor, dy: Tensor | Gathered, x: Tensor | Gathered, ends: Tensor, overwrite: bool,
    during_exchange: bool = False,
) -> None:  # fmt: skip
    """total (E, n, k) += dy^T x, in total's dtype; overwrite: whatever total holds is replaced."""
    store(total, weight_gradient(dy, x, ends), overwrite)


def store(total: Tensor, gradient: Tensor, overwrite: bool) -> None:
    """total += gradient, or with overwrite total = gradient."""
    if overwrite:
        total.copy_(gradient)
    else:
        total.add_(gradient)


def norm_and_logits(
    x: Tensor, weight: Tensor, eps: float, gate: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """y = rms_norm(x, weight, eps) (..., h), 1 / root mean square of x's rows (t,), and the
    router's logits y gate^T (t, E), the last two in float32. gate (E, h): the router's weight.
    """
    y, rstd = rms_norm_forward(x, weight, eps)
    return y, rstd, fp32_product(y.reshape(-1, y.shape[-1]), gate.t())


def tokens_gradient(
    d_rows: Tensor, routing: Routing, d_shared: Tensor | None, d_logits: Tensor, gate: Tensor,
    x: Tensor, d_residual: Tensor, weight: Tensor, rstd: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x (t, h) and weight (h,), where the experts' tokens are rms_norm(x, weight)
    and x is also the residual.

    The tokens' gradient is what `sum_gradients` adds up. d_residual (t, h): the residual's. rstd
    (t,): 1 / root mean square of x's rows.
    """
    dy = sum_gradients(d_rows, routing, d_shared, d_logits, gate)
    return rms_norm_backward(x, dy, d_residual, weight, rstd)
