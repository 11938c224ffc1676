"""An M block between its projections, in kernels of our own.

No part of the projection's output is copied, split off or concatenated: the scan reads x and z in
it, and every gradient is written where it lies in that of the projection. The backward pass
writes gradients in the place of what the forward pass has saved for it, so that it runs once:
autograd refuses a second one. Math: `reference.py`.
"""

import math

import torch
from torch import Tensor

from megacpp_mcore.kernels.device_guard import device_of
from megacpp_mcore.kernels.documents import document_starts
from megacpp_mcore.kernels.mamba3.inputs import Mamba3InputError, Mamba3State, check_shape
from megacpp_mcore.kernels.mamba3_core import around, scan, states
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

    Differentiable in `initial_state` and through the state that `return_final_state` gives, which
    is what inference keeps (`Mamba3State`), in float32: a row may be processed in pieces of any
    lengths, and the gradient goes from each piece to the one before. A call without either runs
    the same kernels as it would if there were no states.

    Raises Mamba3InputError for a projection that is not bfloat16, an empty one, one whose rows are
    no multiple of 16 bytes, one of 2^31 elements or more, and for a state of another shape or one
    that is carried with documents.
    """
    sizes = around.Sizes(heads, head_dim, groups, state_dim, angles, decay, decay_floor, eps)
    check_inputs(projected, sizes.parts, cu_seqlens)
    _check(projected)
    starts, state = None, (None,) * 4
    if cu_seqlens is not None:
        if initial_state is not None or return_final_state:
            raise Mamba3InputError(
                "states are not served together with cu_seqlens: process the documents one by one"
            )
        starts = document_starts(projected.shape[0], cu_seqlens.to(torch.int32))
    if initial_state is not None:
        state = _checked(initial_state, projected.shape[1], sizes)
    tensors = (projected, dt_bias, B_weight, C_weight, B_bias, C_bias, D)
    wanted = any(x is not None and x.requires_grad for x in (*tensors, *state))
    y, *others = _forward(
        *tensors, starts, *state, heads, head_dim, groups, state_dim, angles, decay, decay_floor,
        eps, torch.is_grad_enabled() and wanted, return_final_state,
    )  # fmt: skip
    return (y, Mamba3State(*others[:4])) if return_final_state else y


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


def _checked(state: Mamba3State, batch: int, sizes: around.Sizes) -> tuple[Tensor, ...]:
    shapes = states.shapes(batch, sizes)
    for name, tensor, shape in zip(state._fields, state, shapes, strict=True):
        check_shape(f"initial_state.{name}", tensor, shape)
    return tuple(tensor.float() for tensor in state)


@torch.library.custom_op("megacpp::mamba3_core", mutates_args=())
def _forward(
    projected: Tensor, dt_bias: Tensor, B_weight: Tensor, C_weight: Tensor, B_bias: Tensor,
    C_bias: Tensor, D: Tensor, starts: Tensor | None, angle: Tensor | None, ssm: Tensor | None,
    last_k: Tensor | None, last_v: Tensor | None, heads: int, head_dim: int, groups: int,
    state_dim: int, angles: int, decay: str, decay_floor: float, eps: float, save: bool,
    final: bool,
) -> list[Tensor]:  # fmt: skip
    """y (s, b, H P), followed, with `final`, by the four tensors of the state after the row, and,
    with `save`, by dt, theta and `scan.Saved`. angle to last_v: of the state before it, or None."""
    sizes = around.Sizes(heads, head_dim, groups, state_dim, angles, decay, decay_floor, eps)
    projected = readable(projected)
    parameters = (x.contiguous() for x in (dt_bias, B_weight, C_weight, B_bias, C_bias, D))
    dt_bias, B_weight, C_weight, B_bias, C_bias, D = parameters
    y = _output(projected, sizes)
    x, z = (_heads(projected, sizes, i) for i in (1, 0))
    before, after = None, D.new_empty(scan.state_shape(x, state_dim)) if final else None
    with device_of(projected):
        found = around.steps(
            projected, dt_bias, B_weight, C_weight, B_bias, C_bias, starts, sizes,
            None if angle is None else angle.contiguous(),
        )  # fmt: skip
        if ssm is not None:
            before = states.entering(found, ssm, last_k, last_v)
        saved = scan.forward(found, x, z, D, starts, _heads(y, sizes), save, before, after)
    ends = () if after is None else states.left(found, x, B_bias, after)
    return [y, *ends, *found, *saved] if save else [y, *ends]


@_forward.register_fake
def _(
    projected, dt_bias, B_weight, C_weight, B_bias, C_bias, D, starts, angle, ssm, last_k, last_v,
    heads, head_dim, groups, state_dim, angles, decay, decay_floor, eps, save, final,
):  # fmt: skip
    sizes = around.Sizes(heads, head_dim, groups, state_dim, angles, decay, decay_floor, eps)
    y, found = _output(projected, sizes), []
    if final:
        shapes = states.shapes(projected.shape[1], sizes)
        found += [projected.new_empty(shape, dtype=torch.float32) for shape in shapes]
    if save:
        found += around.steps_like(projected, sizes)
        found += scan.saved_like(_heads(y, sizes), state_dim)
    return [y, *found]


@torch.library.custom_op("megacpp::mamba3_core_backward", mutates_args=("q", "k", "inner"))
def _backward(
    dy: Tensor, projected: Tensor, dt_bias: Tensor, B_weight: Tensor, C_weight: Tensor,
    B_bias: Tensor, C_bias: Tensor, D: Tensor, starts: Tensor | None, last_k: Tensor | None,
    last_v: Tensor | None, final: Tensor | None, dfinal: list[Tensor], steps: list[Tensor],
    q: Tensor, k: Tensor, inner: Tensor, before: Tensor, heads: int, head_dim: int, groups: int,
    state_dim: int, angles: int, decay: str, decay_floor: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of the projection, dt_bias, both norms' weights, both biases, D, and, one after
    another, of the four tensors of the state before the row, if last_k and last_v are its. final:
    the matrix of the state after the row; dfinal: the gradients of its four tensors; or None and
    none. steps: `around.Steps` but for q and k, which are overwritten with inner."""
    sizes = around.Sizes(heads, head_dim, groups, state_dim, angles, decay, decay_floor, eps)
    parameters = tuple(x.contiguous() for x in (dt_bias, B_weight, C_weight, B_bias, C_bias))
    projected, dy, found = readable(projected), readable(dy), around.Steps(*steps, q, k)
    dprojected = torch.empty(projected.shape, dtype=projected.dtype, device=projected.device)
    x, dx = _heads(projected, sizes, 1), _heads(dprojected, sizes, 1)
    dangle, dssm, dk, dv = (t.contiguous() for t in dfinal) if dfinal else (None,) * 4
    dinitial = None if last_k is None else D.new_empty(scan.state_shape(x, state_dim))
    given = dstate = ()
    with device_of(projected):
        around.gate_backward(projected, dy, inner, dprojected, sizes)
        gradients, dD = scan.backward(
            inner, found, before, x, D.contiguous(), starts, dx, scan.Ends(final, dssm, dinitial)
        )
        if dfinal:  # the last token's key and value themselves
            gradients.dk[:, -1] += dk
            dx[:, -1] += dv
        if dinitial is not None:
            dahead, *dstate = states.entering_backward(found, dinitial, last_k, last_v)
            given = (dahead,)
        *sums, dbefore = around.steps_backward(
            projected, *parameters, starts, found, gradients, dprojected, sizes, dangle, *given
        )
    if dstate:
        dstate = (dbefore.flatten(), *(x.flatten() for x in dstate))
    return dprojected, *sums, dD, torch.cat(dstate) if dstate else D.new_empty(0)


@_backward.register_fake
def _(dy, projected, dt_bias, B_weight, C_weight, B_bias, C_bias, D, starts, last_k, last_v, final,
      dfinal, steps, q, k, inner, before, heads, head_dim, groups, state_dim, angles, decay,
      decay_floor, eps):  # fmt: skip
    sizes = around.Sizes(heads, head_dim, groups, state_dim, angles, decay, decay_floor, eps)
    of_state = states.shapes(0 if last_k is None else projected.shape[1], sizes)
    shapes = (dt_bias.shape, (2, *B_weight.shape), (2, *B_bias.shape), D.shape,
              (sum(map(math.prod, of_state)),))  # fmt: skip
    return projected.new_empty(projected.shape), *(D.new_empty(shape) for shape in shapes)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.starts = inputs[:8]
    ctx.options, ctx.final, ctx.carried = inputs[12:-2], inputs[-1], inputs[8] is not None
    ends = 4 if ctx.final else 0
    ctx.mark_non_differentiable(*output[1 + ends :])
    ctx.set_materialize_grads(False)  # the saved outputs need no gradients
    last = inputs[10:12] if ctx.carried else ()
    final = output[2:3] if ctx.final else ()
    ctx.save_for_backward(*tensors, *last, *final, *output[1 + ends :])


def _gradients(ctx, dys):
    *kept, q, k, inner, before = ctx.saved_tensors
    tensors, kept = kept[:7], kept[7:]
    last_k, last_v = (kept.pop(0), kept.pop(0)) if ctx.carried else (None, None)
    sizes, dy, final, dfinal = around.Sizes(*ctx.options), dys[0], None, []
    shapes = states.shapes(tensors[0].shape[1], sizes)
    if ctx.final:
        final = kept.pop(0)
        given = zip(dys[1:5], shapes, strict=True)
        dfinal = [final.new_zeros(shape) if d is None else d for d, shape in given]
    if dy is None:  # only the state is used
        dy = _output(tensors[0], sizes).zero_()
    dprojected, ddt_bias, weights, biases, dD, dstate = _backward(
        dy, *tensors, ctx.starts, last_k, last_v, final, dfinal, kept, q, k, inner, before,
        *ctx.options,
    )  # fmt: skip
    of_state = (None,) * 4
    if ctx.carried:
        parts = dstate.split([math.prod(shape) for shape in shapes])
        of_state = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return dprojected, ddt_bias, *weights, *biases, dD, None, *of_state, *(None,) * 10


_forward.register_autograd(_gradients, setup_context=_save)


def _output(projected: Tensor, sizes: around.Sizes) -> Tensor:
    seq, batch, _ = projected.shape
    return projected.new_empty((seq, batch, sizes.heads * sizes.head_dim))


def _heads(rows: Tensor, sizes: around.Sizes, part: int = 0) -> Tensor:
    """(s, b, rows) -> (b, s, H, P), a view of the part-th H * P columns."""
    inner = sizes.heads * sizes.head_dim
    columns = rows[..., part * inner : (part + 1) * inner]
    return columns.unflatten(-1, (sizes.heads, sizes.head_dim)).transpose(0, 1)
