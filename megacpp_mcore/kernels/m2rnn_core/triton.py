"""An R block between its projections, with kernels of our own around M2RNN's in CUDA C++.

One kernel before the recurrence (convolution, SiLU, decay) and one after it (skip, gate, norm),
each way. Nothing is copied, split off or concatenated: q, k and v stay one tensor, and every
gradient is written where it lies in that of the projection. Math: `reference.py`.
"""

import torch
from torch import Tensor

from megacpp_mcore.kernels.device_guard import device_of
from megacpp_mcore.kernels.documents import document_starts
from megacpp_mcore.kernels.m2rnn import M2RNNInputError, cuda
from megacpp_mcore.kernels.m2rnn_core import around
from megacpp_mcore.kernels.m2rnn_core.reference import check_inputs, heads_of
from megacpp_mcore.kernels.strides import readable


def m2rnn_core(
    projected: Tensor, conv_weight: Tensor, conv_bias: Tensor, A_log: Tensor, dt_bias: Tensor,
    W: Tensor, D: Tensor, norm_weight: Tensor, *, heads: int, k_dim: int, v_dim: int, eps: float,
    chunk_size: int, grad_clamp: float | None, tanh: str, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`megacpp_mcore.kernels.m2rnn_core.m2rnn_core` on cuda; shapes are described there.

    Sizes and dtypes as `kernels.m2rnn.cuda.m2rnn` takes them. A_log, dt_bias, W and D are float32.
    Raises M2RNNInputError for others.
    """
    sizes = around.Sizes(heads, k_dim, v_dim, eps)
    check_inputs(projected, sizes.parts, cu_seqlens)
    dtype = str(projected.dtype).removeprefix("torch.")
    if reason := cuda.sizes_reason(dtype, k_dim, v_dim, chunk_size):
        raise M2RNNInputError(f"the CUDA kernel of M2RNN does not serve this: {reason}")
    for name, x in {"A_log": A_log, "dt_bias": dt_bias, "W": W, "D": D}.items():
        if x.dtype != torch.float32:
            raise M2RNNInputError(f"{name} is {x.dtype}; the kernels take torch.float32")
    bounds = starts = None
    if cu_seqlens is not None:
        bounds = cu_seqlens.to(device=projected.device, dtype=torch.int32).contiguous()
        starts = document_starts(projected.shape[0], bounds)
    return _forward(
        projected, conv_weight, conv_bias, A_log, dt_bias, W, D, norm_weight, bounds, starts, heads,
        k_dim, v_dim, eps, chunk_size, grad_clamp, tanh == "exact",
    )[0]  # fmt: skip


@torch.library.custom_op("megacpp::m2rnn_core", mutates_args=())
def _forward(
    projected: Tensor, conv_weight: Tensor, conv_bias: Tensor, A_log: Tensor, dt_bias: Tensor,
    W: Tensor, D: Tensor, norm_weight: Tensor, bounds: Tensor | None, starts: Tensor | None,
    heads: int, k_dim: int, v_dim: int, eps: float, chunk_size: int, grad_clamp: float | None,
    exact_tanh: bool,
) -> list[Tensor]:  # fmt: skip
    """The output (s, b, H V), and for the backward pass: the convolved q, k, v (s, b, C), f (b, s,
    H), y (b, s, H, V) and the state before each chunk."""
    sizes = around.Sizes(heads, k_dim, v_dim, eps)
    projected = readable(projected)
    parameters = (x.contiguous() for x in (conv_weight, conv_bias, A_log, dt_bias, D, norm_weight))
    conv_weight, conv_bias, A_log, dt_bias, D, norm_weight = parameters
    with device_of(projected):
        mixed, f = around.before(projected, conv_weight, conv_bias, A_log, dt_bias, starts, sizes)
        q, k, v = heads_of(mixed, k_dim, v_dim)
        y, _, checkpoints = cuda.forward(
            q, k, v, W, f, None, bounds, chunk_size, grad_clamp, exact_tanh
        )
        out = around.after(projected, mixed, y, D, norm_weight, sizes)
    return [out, mixed, f, y, checkpoints]


@_forward.register_fake
def _(
    projected, conv_weight, conv_bias, A_log, dt_bias, W, D, norm_weight, bounds, starts, heads,
    k_dim, v_dim, eps, chunk_size, grad_clamp, exact_tanh,
):  # fmt: skip
    seq, batch, _ = projected.shape
    mixed = projected.new_empty((seq, batch, 2 * k_dim + heads * v_dim))
    f = projected.new_empty((batch, seq, heads), dtype=torch.float32)
    q, k, v = heads_of(mixed, k_dim, v_dim)
    y, _, checkpoints = cuda.forward(
        q, k, v, W, f, None, bounds, chunk_size, grad_clamp, exact_tanh
    )
    return [projected.new_empty((seq, batch, heads * v_dim)), mixed, f, y, checkpoints]


@torch.library.custom_op("megacpp::m2rnn_core_backward", mutates_args=())
def _backward(
    dout: Tensor, projected: Tensor, conv_weight: Tensor, conv_bias: Tensor, A_log: Tensor,
    dt_bias: Tensor, W: Tensor, D: Tensor, norm_weight: Tensor, bounds: Tensor | None,
    starts: Tensor | None, mixed: Tensor, f: Tensor, y: Tensor, checkpoints: Tensor, heads: int,
    k_dim: int, v_dim: int, eps: float, chunk_size: int, grad_clamp: float | None,
) -> list[Tensor]:  # fmt: skip
    """The gradients of projected and W, of D and norm_weight in one, and of the rest in one."""
    sizes = around.Sizes(heads, k_dim, v_dim, eps)
    projected, dout = readable(projected), readable(dout)
    parameters = (x.contiguous() for x in (conv_weight, conv_bias, A_log, dt_bias, D, norm_weight))
    conv_weight, conv_bias, A_log, dt_bias, D, norm_weight = parameters
    dprojected = torch.empty(projected.shape, dtype=projected.dtype, device=projected.device)
    with device_of(projected):
        dy, after = around.after_backward(
            projected, mixed, y, D, norm_weight, dout, dprojected, sizes
        )
        q, k, v = heads_of(mixed, k_dim, v_dim)
        dq, dk, dv, dW, df, _ = cuda.backward(
            dy, None, q, k, v, W, f, bounds, checkpoints, chunk_size, grad_clamp
        )
        before = around.before_backward(
            projected, conv_weight, conv_bias, A_log, dt_bias, starts, D, dq, dk, dv, dy, f, df,
            dprojected, sizes,
        )  # fmt: skip
    return [dprojected, dW, after, before]


@_backward.register_fake
def _(dout, projected, conv_weight, conv_bias, A_log, dt_bias, W, D, *others):
    before = sum(x.numel() for x in (conv_weight, conv_bias, A_log, dt_bias))
    shapes = (W.shape, (2, D.numel()), (before,))
    return [projected.new_empty(projected.shape), *(W.new_empty(shape) for shape in shapes)]


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.bounds, ctx.starts = inputs[:10]
    ctx.options = inputs[10:-1]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # the saved outputs need no gradients
    ctx.save_for_backward(*tensors, *output[1:])


def _gradients(ctx, douts):
    kept = ctx.saved_tensors
    tensors, saved = kept[:8], kept[8:]
    _, conv_weight, conv_bias, *_, norm_weight = tensors
    dprojected, dW, after, before = _backward(
        douts[0], *tensors, ctx.bounds, ctx.starts, *saved, *ctx.options
    )
    sizes = around.Sizes(*ctx.options[:4])
    weight, bias, A_log, dt_bias = around.parameter_gradients(before, conv_weight, sizes)
    return (
        dprojected, weight.to(conv_weight.dtype), bias.to(conv_bias.dtype), A_log, dt_bias, dW,
        after[0], after[1].to(norm_weight.dtype), *(None,) * 9,
    )  # fmt: skip


_forward.register_autograd(_gradients, setup_context=_save)
