"""An M block between its projections, in kernels of our own.

No part of the projection's output is copied, split off or concatenated: the scan reads x and z in
it, and every gradient is written where it lies in that of the projection. The backward pass
writes gradients in the place of what the forward pass has saved for it, so that it runs once:
autograd refuses a second one. Math: `reference.py`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megacpp_mcore.kernels.device_guard import device_of
from megacpp_mcore.kernels.documents import document_starts
from megacpp_mcore.kernels.mamba3.inputs import Mamba3InputError, Mamba3State
from megacpp_mcore.kernels.mamba3.reference import rotate
from megacpp_mcore.kernels.mamba3_core import around, scan
from megacpp_mcore.kernels.mamba3_core.reference import check_inputs
from megacpp_mcore.kernels.strides import readable

_BYTES = 16  # in_proj's rows are padded to multiples of them


def mamba3_core(
    projected: Tensor, dt_bias: Tensor, B_weight: Tensor, C_weight: Tensor, B_bias: Tensor,
    C_bias: Tensor, D: Tensor, *, heads: int, head_dim: int, groups: int, state_dim: int,
    angles: int, decay: str, decay_floor: float, eps: float, cu_seqlens: Tensor | None = None,
    initial_state: Mamba3State | None = None, return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Mamba3State]:  # fmt: skip
    """`megacpp_mcore.kernels.mamba3_core.mamba3_core`, in bfloat16; shapes are described there.

    Raises Mamba3InputError for a projection that is not bfloat16, an empty one, one whose rows are
    no multiple of 16 bytes, one of 2^31 elements or more, and for a state that is carried with
    documents or where a gradient is wanted.
    """
    sizes = around.Sizes(heads, head_dim, groups, state_dim, angles, decay, decay_floor, eps)
    check_inputs(projected, sizes.parts, cu_seqlens)
    _check(projected)
    starts = None
    if cu_seqlens is not None:
        starts = document_starts(projected.shape[0], cu_seqlens.to(torch.int32))
    tensors = (projected, dt_bias, B_weight, C_weight, B_bias, C_bias, D)
    save = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if initial_state is not None or return_final_state:
        if save or starts is not None:
            raise Mamba3InputError(
                "the kernels carry a state through whole rows and without gradients: use "
                "torch.no_grad() and no cu_seqlens, or the reference"
            )
        y, state = _carried(tensors, sizes, initial_state)
        return (y, state) if return_final_state else y
    return _forward(
        *tensors, starts, heads, head_dim, groups, state_dim, angles, decay, decay_floor,
        eps, save,
    )[0]  # fmt: skip


def _check(projected: Tensor) -> None:
    if projected.dtype != torch.bfloat16:
        raise Mamba3InputError(
            f"the projection is {projected.dtype}: the kernels' products are of torch.bfloat16; "
            "use the reference"
        )
    seq, batch, rows = projected.shape
    if seq < 1 or batch < 1:
        raise Mamba3InputError(f"the projection is empty: {tuple(projected.shape)}")
    if projected.numel() >= 2**31:
        raise Mamba3InputError(
            f"the projection has {projected.numel()} elements; the kernels were proven below 2^31: "
            "take a smaller micro batch, or name reference for mamba3_core"
        )
    if rows * projected.element_size() % _BYTES:
        raise Mamba3InputError(
            f"a row of the projection has {rows * projected.element_size()} bytes, no multiple of "
            f"{_BYTES}, as in_proj's are: use the reference"
        )


def _carried(
    tensors: Sequence[Tensor], sizes: around.Sizes, state: Mamba3State | None
) -> tuple[Tensor, Mamba3State]:
    """y, and the state after the row, from the one before it.

    The term that a token adds for the token before it, (1 - lam) dt v k^T, is decayed with the
    state: the first token's is added to the state that it begins with.
    """
    projected, *parameters = (readable(tensors[0]), *(x.contiguous() for x in tensors[1:]))
    B_bias, D = parameters[3], parameters[5]
    y, (x, z) = _output(projected, sizes), (_heads(projected, sizes, i) for i in (1, 0))
    angle = None if state is None else state.angle.float().contiguous()
    with device_of(projected):
        found = around.steps(projected, *parameters[:5], None, sizes, angle)
        initial, final = None, D.new_empty(scan.state_shape(x, sizes.state_dim))
        if state is not None:
            before = state.v.unsqueeze(-1) * state.k.unsqueeze(-2)
            ahead = (found.dt - found.gamma)[:, :, 0, None, None]
            initial = (state.ssm + ahead * before).float().contiguous()
        scan.forward(found, x, z, D, None, _heads(y, sizes), False, initial, final)
    angle = found.theta[:, -1]
    k = found.B[:, -1].float().repeat_interleave(sizes.heads // sizes.groups, 1) + B_bias
    k = rotate(k, angle.cos(), angle.sin(), halves=False)
    return y, Mamba3State(angle.remainder(2 * math.pi), final, k, x[:, -1].float())


@torch.library.custom_op("megacpp::mamba3_core", mutates_args=())
def _forward(
    projected: Tensor, dt_bias: Tensor, B_weight: Tensor, C_weight: Tensor, B_bias: Tensor,
    C_bias: Tensor, D: Tensor, starts: Tensor | None, heads: int,
    head_dim: int, groups: int, state_dim: int, angles: int, decay: str, decay_floor: float,
    eps: float, save: bool,
) -> list[Tensor]:  # fmt: skip
    """y (s, b, H P), followed, when `save` is set, by dt, theta and `scan.Saved`."""
    sizes = around.Sizes(heads, head_dim, groups, state_dim, angles, decay, decay_floor, eps)
    projected = readable(projected)
    parameters = (x.contiguous() for x in (dt_bias, B_weight, C_weight, B_bias, C_bias, D))
    dt_bias, B_weight, C_weight, B_bias, C_bias, D = parameters
    y = _output(projected, sizes)
    x, z = (_heads(projected, sizes, i) for i in (1, 0))
    with device_of(projected):
        found = around.steps(projected, dt_bias, B_weight, C_weight, B_bias, C_bias, starts, sizes)
        saved = scan.forward(found, x, z, D, starts, _heads(y, sizes), save)
    return [y, *found, *saved] if save else [y]


@_forward.register_fake
def _(
    projected, dt_bias, B_weight, C_weight, B_bias, C_bias, D, starts, heads, head_dim,
    groups, state_dim, angles, decay, decay_floor, eps, save,
):  # fmt: skip
    sizes = around.Sizes(heads, head_dim, groups, state_dim, angles, decay, decay_floor, eps)
    y = _output(projected, sizes)
    if not save:
        return [y]
    return [y, *around.steps_like(projected, sizes), *scan.saved_like(_heads(y, sizes), state_dim)]


@torch.library.custom_op("megacpp::mamba3_core_backward", mutates_args=("q", "k", "inner"))
def _backward(
    dy: Tensor, projected: Tensor, dt_bias: Tensor, B_weight: Tensor, C_weight: Tensor,
    B_bias: Tensor, C_bias: Tensor, D: Tensor, starts: Tensor | None, steps: list[Tensor],
    q: Tensor, k: Tensor, inner: Tensor, states: Tensor, heads: int, head_dim: int, groups: int,
    state_dim: int, angles: int, decay: str, decay_floor: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of the projection, dt_bias, both norms' weights, both biases, and D. steps:
    `around.Steps` but for q and k, which are overwritten with inner."""
    sizes = around.Sizes(heads, head_dim, groups, state_dim, angles, decay, decay_floor, eps)
    parameters = tuple(x.contiguous() for x in (dt_bias, B_weight, C_weight, B_bias, C_bias))
    projected, dy, found = readable(projected), readable(dy), around.Steps(*steps, q, k)
    dprojected = torch.empty(projected.shape, dtype=projected.dtype, device=projected.device)
    x, dx = _heads(projected, sizes, 1), _heads(dprojected, sizes, 1)
    with device_of(projected):
        around.gate_backward(projected, dy, inner, dprojected, sizes)
        gradients, dD = scan.backward(inner, found, states, x, D.contiguous(), starts, dx)
        sums = around.steps_backward(
            projected, *parameters, starts, found, gradients, dprojected, sizes
        )
    return dprojected, *sums, dD


@_backward.register_fake
def _(dy, projected, dt_bias, B_weight, C_weight, B_bias, C_bias, D, *others):
    shapes = (dt_bias.shape, (2, *B_weight.shape), (2, *B_bias.shape), D.shape)
    return projected.new_empty(projected.shape), *(D.new_empty(shape) for shape in shapes)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.starts = inputs[:8]
    ctx.options = inputs[8:-1]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # the saved outputs need no gradients
    ctx.save_for_backward(*tensors, *output[1:])


def _gradients(ctx, dys):
    kept = ctx.saved_tensors
    tensors, steps, others = kept[:7], kept[7:-4], kept[-4:]
    dprojected, ddt_bias, weights, biases, dD = _backward(
        dys[0], *tensors, ctx.starts, list(steps), *others, *ctx.options
    )
    return dprojected, ddt_bias, *weights, *biases, dD, *(None,) * 10


_forward.register_autograd(_gradients, setup_context=_save)


def _output(projected: Tensor, sizes: around.Sizes) -> Tensor:
    seq, batch, _ = projected.shape
    return projected.new_empty((seq, batch, sizes.heads * sizes.head_dim))


def _heads(rows: Tensor, sizes: around.Sizes, part: int = 0) -> Tensor:
    """(s, b, rows) -> (b, s, H, P), a view of the part-th H * P columns."""
    inner = sizes.heads * sizes.head_dim
    columns = rows[..., part * inner : (part + 1) * inner]
    return columns.unflatten(-1, (sizes.heads, sizes.head_dim)).transpose(0, 1)
