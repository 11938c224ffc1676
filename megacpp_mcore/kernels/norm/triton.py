"""RMSNorm whose input also goes on as the residual: one launch forward, two backward.

The gradient that comes back along the residual is added where the norm's own is computed, so that
no separate addition reads and writes the activations. The backward pass reads x, dy and the
residual's gradient once and writes dx once; the gradient of the weight is summed per program in
float32, then over the programs, always in the same order.
"""

import torch
import triton
from torch import Tensor

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.backward_pass import no_second_derivative
from megacpp_mcore.kernels.norm import triton_kernels
from megacpp_mcore.surfaces.norm import MAX_HIDDEN_SIZE

DTYPES = ("bfloat16", "float16", "float32")
_FORWARD_WARPS = 8
# The fastest of those tried on an H200 at 3584, with one program on a multiprocessor.
_BACKWARD_WARPS = 16
_BACKWARD_ROWS, _BACKWARD_VALUES = 4, 16384  # at a time, at most


class RMSNormInputError(MegacppError):
    """An input that the kernels do not support."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `megacpp_mcore.kernels.norm.rms_norm`: x (..., h), weight (h,) -> (..., h) in x's dtype.

    Raises RMSNormInputError for dtypes other than DTYPES, different ones of x and weight, or a
    hidden size beyond MAX_HIDDEN_SIZE.
    """
    check(x, weight)
    return rms_norm_forward(x, weight, eps)[0]


def rms_norm_with_residual(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x, weight, eps), x). Use the second as the residual: x's gradient then is one sum.

    Raises RMSNormInputError as rms_norm does.
    """
    check(x, weight)
    return _WithResidual.apply(x, weight, eps)


def check(x: Tensor, weight: Tensor) -> None:
    """Raise RMSNormInputError for what rms_norm does not take."""
    if x.dtype != weight.dtype or x.dtype not in _TORCH_DTYPES:
        raise RMSNormInputError(
            f"x is {x.dtype} and the weight {weight.dtype}; both must be one of {', '.join(DTYPES)}"
        )
    if x.shape[-1:] != weight.shape or weight.numel() > MAX_HIDDEN_SIZE:
        raise RMSNormInputError(
            f"x is {tuple(x.shape)} and the weight {tuple(weight.shape)}; the weight must have x's "
            f"last size, at most {MAX_HIDDEN_SIZE}"
        )


_TORCH_DTYPES = tuple(getattr(torch, name) for name in DTYPES)


class _WithResidual(torch.autograd.Function):
    """The operator below with a second gradient. An operator cannot return its input."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, rstd = rms_norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.set_materialize_grads(False)
        return y, x.view_as(x)

    @staticmethod
    @no_second_derivative
    def backward(ctx, dy: Tensor | None, d_residual: Tensor | None):
        if dy is None:
            return d_residual, None, None
        x, weight, rstd = ctx.saved_tensors
        return *rms_norm_backward(x, dy, d_residual, weight, rstd), None


@torch.library.custom_op("megacpp::rms_norm", mutates_args=())
def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y as x, and 1 / root mean square of every row, (rows,) in float32."""
    x, y, rstd = x.contiguous(), *_outputs(x)
    hidden = weight.numel()
    if rstd.numel():
        triton_kernels.rms_norm_forward[(rstd.numel(),)](
            x, weight.contiguous(), y, rstd, hidden, eps,
            BLOCK=triton.next_power_of_2(hidden), num_warps=_FORWARD_WARPS,
        )  # fmt: skip
    return y, rstd


def _outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.numel() // max(x.shape[-1], 1)
    return x.new_empty(x.shape), x.new_empty(rows, dtype=torch.float32)


@rms_norm_forward.register_fake
def _(x, weight, eps):
    return _outputs(x)


@torch.library.custom_op("megacpp::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    x: Tensor, dy: Tensor, d_residual: Tensor | None, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of x, d_residual included, and of the weight; x, dy and d_residual (..., h)."""
    x, dy = x.contiguous(), dy.contiguous()
    d_residual = None if d_residual is None else d_residual.contiguous()
    dx, hidden = torch.empty_like(x), weight.numel()
    if not rstd.numel():
        return dx, torch.zeros_like(weight)
    block = triton.next_power_of_2(hidden)
    rows = max(1, min(_BACKWARD_ROWS, _BACKWARD_VALUES // block))
    programs = min(triton.cdiv(rstd.numel(), rows), _programs(x.device))
    partial = x.new_empty(programs, hidden, dtype=torch.float32)
    triton_kernels.rms_norm_backward[(programs,)](
        x, dy, dy if d_residual is None else d_residual, weight.contiguous(), rstd, dx, partial,
        rstd.numel(), hidden, HAS_RESIDUAL=d_residual is not None, ROWS=rows, BLOCK=block,
        num_warps=_BACKWARD_WARPS,
    )  # fmt: skip
    return dx, partial.sum(0).to(weight.dtype)


@rms_norm_backward.register_fake
def _(x, dy, d_residual, weight, rstd):
    return x.new_empty(x.shape), torch.empty_like(weight)


def _save(ctx, inputs, output) -> None:
    x, weight, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def _gradients(ctx, dy, _):
    x, weight, rstd = ctx.saved_tensors
    return *rms_norm_backward(x, dy, None, weight, rstd), None


rms_norm_forward.register_autograd(_gradients, setup_context=_save)


def _programs(device: torch.device) -> int:
    """Programs of the backward kernel. Each loops over rows and writes a partial sum of the
    weight's gradient."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count
