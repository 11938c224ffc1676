"""MLA's RoPE in Triton: one launch each way, nothing concatenated or copied around it.

The forward pass reads q, kv and k_pos once, in any strides, and writes q, k and v once, contiguous.
The backward pass reads their gradients once, in any strides, and writes those of q, kv and k_pos
once. Only the table is saved for it. Rotations and the sum over heads are computed in float32.

With `in_place` both passes rotate the rotary half of q, and of its gradient, where it is, and
neither read nor write the other half.
"""

import torch
import triton
from torch import Tensor

from megacpp_mcore.kernels.backward_pass import no_second_derivative
from megacpp_mcore.kernels.device_guard import device_of
from megacpp_mcore.kernels.mla_rope import triton_kernels
from megacpp_mcore.kernels.mla_rope.inputs import MLARopeInputError, RotaryTable, check_inputs
from megacpp_mcore.kernels.strides import readable

DTYPES = ("bfloat16", "float16", "float32")
_BOUNDS_BLOCK = 64
# kernel -> (heads of a tile, warps): the fastest of 12 on an H200 at 56 heads of 64 + 64 and 64.
_TILES = {triton_kernels.mla_rope_forward: (64, 4), triton_kernels.mla_rope_backward: (32, 2)}
_TORCH_DTYPES = tuple(getattr(torch, name) for name in DTYPES)


def mla_rope(
    q: Tensor, kv: Tensor, k_pos: Tensor, rotary: RotaryTable, *, qk_head_dim: int,
    cu_seqlens: Tensor | None = None, interleaved: bool = True, in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `megacpp_mcore.kernels.mla_rope.mla_rope`, for the dtypes of DTYPES."""
    check_inputs(q, kv, k_pos, rotary, qk_head_dim, cu_seqlens)
    if q.dtype not in _TORCH_DTYPES:
        raise MLARopeInputError(f"q is {q.dtype}; the kernel of MLA's RoPE takes {DTYPES}")
    packed = q.dim() == 3
    if packed:
        q, kv, k_pos = q.unsqueeze(1), kv.unsqueeze(1), k_pos.unsqueeze(1)
    cos, sin = (table.float().contiguous() for table in rotary)
    bounds = None if cu_seqlens is None else cu_seqlens.to(q.device).contiguous()
    rope = _forward
    if in_place and q.is_contiguous() and not torch.compiler.is_compiling():
        rope = _InPlace.apply
    outputs = rope(q, kv, k_pos, cos, sin, bounds, qk_head_dim, interleaved)
    q, k, v = (x.squeeze(1) for x in outputs) if packed else outputs
    return q, k, v


@torch.library.custom_op("megacpp::mla_rope", mutates_args=())
def _forward(
    q: Tensor, kv: Tensor, k_pos: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None,
    qk_head_dim: int, interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k and v, (s, b, heads, ...)."""
    q, kv, k_pos = readable(q), readable(kv), readable(k_pos)
    q_out, k, v = _outputs(q, kv, qk_head_dim)
    _launch(
        triton_kernels.mla_rope_forward, (q, kv, k_pos), (q_out, k, v),
        (cos, sin, cu_seqlens), q.shape, qk_head_dim, v.shape[-1], interleaved,
    )  # fmt: skip
    return q_out, k, v


def _outputs(
    q: Tensor, kv: Tensor, qk_head_dim: int, with_q: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    v = q.new_empty(*q.shape[:-1], kv.shape[-1] - qk_head_dim)
    return q.new_empty(q.shape if with_q else 0), q.new_empty(q.shape), v


@_forward.register_fake
def _(q, kv, k_pos, cos, sin, cu_seqlens, qk_head_dim, interleaved):
    return _outputs(q, kv, qk_head_dim)


@torch.library.custom_op("megacpp::mla_rope_backward", mutates_args=())
def _backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None,
    qk_head_dim: int, interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, kv and k_pos."""
    dq, dk, dv = readable(dq), readable(dk), readable(dv)
    gradients = _gradient_outputs(dq, dv, qk_head_dim)
    _launch(
        triton_kernels.mla_rope_backward, (dq, dk, dv), gradients,
        (cos, sin, cu_seqlens), dq.shape, qk_head_dim, dv.shape[-1], interleaved,
    )  # fmt: skip
    return gradients


def _gradient_outputs(
    dq: Tensor, dv: Tensor, qk_head_dim: int, with_q: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    *rows, heads, dim = dq.shape
    kv, k_pos = (*rows, heads, qk_head_dim + dv.shape[-1]), (*rows, dim - qk_head_dim)
    return dq.new_empty(dq.shape if with_q else 0), dq.new_empty(kv), dq.new_empty(k_pos)


@_backward.register_fake
def _(dq, dk, dv, cos, sin, cu_seqlens, qk_head_dim, interleaved):
    return _gradient_outputs(dq, dv, qk_head_dim)


def _save(ctx, inputs, output) -> None:
    *_, cos, sin, cu_seqlens, qk_head_dim, interleaved = inputs
    ctx.save_for_backward(cos, sin, cu_seqlens)
    ctx.options = qk_head_dim, interleaved


def _gradients(ctx, dq, dk, dv):
    return *_backward(dq, dk, dv, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


class _InPlace(torch.autograd.Function):
    """The operator above on q's memory, and in the backward pass on that of its gradient.

    An operator cannot return its input, and autograd's own in-place rules would copy gradients.
    """

    @staticmethod
    def forward(ctx, q, kv, k_pos, cos, sin, cu_seqlens, qk_head_dim, interleaved):
        ctx.save_for_backward(cos, sin, cu_seqlens)
        ctx.options = qk_head_dim, interleaved
        kv, k_pos = readable(kv), readable(k_pos)
        _, k, v = _outputs(q, kv, qk_head_dim, with_q=False)
        _launch(
            triton_kernels.mla_rope_forward, (q, kv, k_pos), (q, k, v),
            (cos, sin, cu_seqlens), q.shape, qk_head_dim, v.shape[-1], interleaved,
        )  # fmt: skip
        # Whoever has saved q for a backward pass of its own gets torch's error there.
        torch.autograd.graph.increment_version(q)
        return q.view_as(q), k, v

    @staticmethod
    @no_second_derivative
    def backward(ctx, dq, dk, dv):
        tables, (qk_head_dim, interleaved) = ctx.saved_tensors, ctx.options
        if not dq.is_contiguous():  # its reader wants rows as q's were
            found = _backward(dq, dk, dv, *tables, *ctx.options)
            return *found, None, None, None, None, None
        dk, dv = readable(dk), readable(dv)
        _, dkv, dk_pos = _gradient_outputs(dq, dv, qk_head_dim, with_q=False)
        _launch(
            triton_kernels.mla_rope_backward, (dq, dk, dv), (dq, dkv, dk_pos),
            tables, dq.shape, qk_head_dim, dv.shape[-1], interleaved,
        )  # fmt: skip
        return dq, dkv, dk_pos, None, None, None, None, None


def _launch(
    kernel, sources: tuple[Tensor, Tensor, Tensor], targets: tuple[Tensor, Tensor, Tensor],
    tables: tuple[Tensor, Tensor, Tensor | None], shape: torch.Size, qk_head_dim: int, v_dim: int,
    interleaved: bool,
) -> None:  # fmt: skip
    """One program a token. shape: of q. q or its gradient may be its own target."""
    tokens, batch, heads, dim = shape
    if not tokens * batch * heads:
        for target in targets:
            target.zero_()  # k_pos's gradient is a sum over no heads
        return
    cos, sin, cu_seqlens = tables
    pairs = cos.shape[1]
    rest = dim - qk_head_dim - 2 * pairs
    head_block, warps = _TILES[kernel]
    strides = (stride for x in (*sources, *targets) for stride in x.stride()[:-1])
    up = triton.next_power_of_2
    with device_of(sources[0]):
        kernel[(tokens * batch,)](
            *sources, cos, sin, cu_seqlens, *targets,
            batch, 0 if cu_seqlens is None else cu_seqlens.numel(), heads, *strides,
            PLAIN=qk_head_dim, PAIRS=pairs, REST=rest, V_DIM=v_dim,
            PLAIN_BLOCK=up(qk_head_dim), PAIR_BLOCK=up(pairs), REST_BLOCK=up(max(rest, 1)),
            V_BLOCK=up(v_dim), HEAD_BLOCK=min(head_block, up(heads)), INTERLEAVED=interleaved,
            IN_PLACE=sources[0] is targets[0], PACKED=cu_seqlens is not None,
            BOUNDS_BLOCK=_BOUNDS_BLOCK, num_warps=warps,
        )  # fmt: skip
