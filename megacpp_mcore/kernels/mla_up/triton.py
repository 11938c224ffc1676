"""MLA's up-projections and RoPE in Triton: q, k and v are written once and nothing before them.

By themselves the up-projections write q and kv, and RoPE reads and writes all of it again, both
ways; with latents of few dims that traffic is all there is to it. Here one kernel multiplies,
rotates in float32 and rounds once. The backward pass reads the gradients of q, k and v twice, for
the latents and for the weights, and writes none of their size. Of the activations the latents
alone are saved for it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megacpp_mcore.kernels.backward_pass import no_second_derivative
from megacpp_mcore.kernels.documents import positions
from megacpp_mcore.kernels.main_grad import handed_on, takes_gradients
from megacpp_mcore.kernels.mla_rope.inputs import RotaryTable
from megacpp_mcore.kernels.mla_up import launches
from megacpp_mcore.kernels.mla_up.inputs import MLAUpInputError, check_inputs
from megacpp_mcore.kernels.mla_up.launches import Operands
from megacpp_mcore.kernels.strides import readable
from megacpp_mcore.surfaces.mla_up import MOST

DTYPES = ("bfloat16", "float32")
_TORCH_DTYPES = tuple(getattr(torch, name) for name in DTYPES)


def mla_up(
    q_latent: Tensor, kv_latent: Tensor, k_pos: Tensor, q_weight: Tensor, kv_weight: Tensor,
    rotary: RotaryTable, *, qk_head_dim: int, cu_seqlens: Tensor | None = None,
    interleaved: bool = True, into_main_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `megacpp_mcore.kernels.mla_up.mla_up`, for the dtypes of DTYPES, all pos dims rotated, and
    dims and ranks of 64 at most.

    into_main_grad: where both weights have a main_grad, the gradients are added to it in float32
    before they are rounded. Raises MLAUpInputError for what these kernels do not take.
    """
    weights = q_weight, kv_weight
    sizes = check_inputs(
        q_latent, kv_latent, k_pos, *weights, rotary, qk_head_dim, cu_seqlens
    )  # fmt: skip
    if q_latent.dtype not in _TORCH_DTYPES:
        raise MLAUpInputError(
            f"q_latent is {q_latent.dtype}; the kernels of mla_up take {', '.join(DTYPES)}; cast "
            "the arguments, or use the reference"
        )
    if 2 * rotary.cos.shape[1] != sizes.pos:
        raise MLAUpInputError(
            f"the table turns {2 * rotary.cos.shape[1]} of {sizes.pos} dims; the kernels of "
            "mla_up rotate all of them; use the reference"
        )
    if max(sizes[1:]) > MOST:
        raise MLAUpInputError(
            f"a head's dims and the ranks are {tuple(sizes[1:])}; the kernels of mla_up take "
            f"{MOST} of each at most; use the reference"
        )
    packed = cu_seqlens is not None
    latents = q_latent, kv_latent, k_pos
    if packed:
        latents = tuple(x.unsqueeze(1) for x in latents)
    cos, sin = (table.float().contiguous() for table in rotary)
    places = None
    if cu_seqlens is not None:
        places = positions(q_latent.shape[0], cu_seqlens.to(q_latent.device))
    operator = _forward
    if into_main_grad and all(map(takes_gradients, weights)) and not torch.compiler.is_compiling():
        operator = _IntoMainGrad.apply
    outputs = operator(*latents, *weights, cos, sin, places, qk_head_dim, interleaved)
    q, k, v = (x.squeeze(1) for x in outputs) if packed else outputs
    return q, k, v


@torch.library.custom_op("megacpp::mla_up", mutates_args=())
def _forward(
    q_latent: Tensor, kv_latent: Tensor, k_pos: Tensor, q_weight: Tensor, kv_weight: Tensor,
    cos: Tensor, sin: Tensor, places: Tensor | None, qk_head_dim: int, interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k and v, (s, b, heads, ...)."""
    operands = Operands.of(q_latent, kv_latent, q_weight, kv_weight, cos, sin, places)
    call = operands.call(k_pos.shape[-1], qk_head_dim, interleaved)
    outputs = _outputs(q_latent, k_pos, (q_weight, kv_weight), qk_head_dim)
    launches.forward(operands, k_pos, call, outputs)
    return outputs


def _outputs(
    q_latent: Tensor, k_pos: Tensor, weights: Sequence[Tensor], plain: int
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, dim = q_latent.shape[:-1], plain + k_pos.shape[-1]
    heads = weights[0].shape[0] // dim
    widths = dim, dim, weights[1].shape[0] // heads - plain
    q, k, v = (q_latent.new_empty(*tokens, heads, width) for width in widths)
    return q, k, v


@_forward.register_fake
def _(q_latent, kv_latent, k_pos, q_weight, kv_weight, cos, sin, places, qk_head_dim, interleaved):
    return _outputs(q_latent, k_pos, (q_weight, kv_weight), qk_head_dim)


@torch.library.custom_op("megacpp::mla_up_backward", mutates_args=())
def _backward(
    dq: Tensor, dk: Tensor, dv: Tensor, q_latent: Tensor, kv_latent: Tensor, q_weight: Tensor,
    kv_weight: Tensor, cos: Tensor, sin: Tensor, places: Tensor | None, qk_head_dim: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the latents, k_pos and the weights."""
    dq, dk, dv = readable(dq), readable(dk), readable(dv)
    operands = Operands.of(q_latent, kv_latent, q_weight, kv_weight, cos, sin, places)
    call = operands.call(dq.shape[-1] - qk_head_dim, qk_head_dim, interleaved)
    return (
        *launches.latent_gradients(dq, dk, dv, operands, call),
        launches.q_weight_gradient(dq, operands, call, None),
        launches.kv_weight_gradient(dk, dv, operands, call, None),
    )


@_backward.register_fake
def _(dq, dk, dv, q_latent, kv_latent, q_weight, kv_weight, cos, sin, places, plain, interleaved):
    shapes = (q_latent.shape, kv_latent.shape, (*dq.shape[:2], dq.shape[-1] - plain),
              q_weight.shape, kv_weight.shape)  # fmt: skip
    return tuple(dq.new_empty(shape) for shape in shapes)


def _save(ctx, inputs, output) -> None:
    q_latent, kv_latent, _, *others = inputs[:-2]  # k_pos's gradient does not depend on it
    ctx.save_for_backward(q_latent, kv_latent, *others)
    ctx.options = inputs[-2:]


def _gradients(ctx, dq, dk, dv):
    return *_backward(dq, dk, dv, *ctx.saved_tensors, *ctx.options), *(None,) * 5


_forward.register_autograd(_gradients, setup_context=_save)


class _IntoMainGrad(torch.autograd.Function):
    """The operator above, with the weights' gradients added to their main_grad.

    The parameters themselves are kept beside the saved tensors, as they carry main_grad.
    """

    @staticmethod
    def forward(ctx, *inputs):
        _save(ctx, inputs, None)
        ctx.weights = inputs[3:5]
        return _forward(*inputs)

    @staticmethod
    @no_second_derivative
    def backward(ctx, dq, dk, dv):
        dq, dk, dv = readable(dq), readable(dk), readable(dv)
        operands = Operands.of(*ctx.saved_tensors)
        call = operands.call(dq.shape[-1] - ctx.options[0], *ctx.options)
        q, kv = ctx.weights
        found = [*launches.latent_gradients(dq, dk, dv, operands, call), None, None]
        if ctx.needs_input_grad[3]:
            launches.q_weight_gradient(dq, operands, call, q.main_grad)
            found[3] = handed_on(q)
        if ctx.needs_input_grad[4]:
            launches.kv_weight_gradient(dk, dv, operands, call, kv.main_grad)
            found[4] = handed_on(kv)
        return *found, *(None,) * 5
