"""`rope_qk` in Triton: one launch each way for queries, keys and values.

Everything is read once, in any strides, and written once, contiguous. The backward pass from the
projection writes the projection's gradient directly, without concatenation. Sine, cosine and
rotations are in float32. Only the angles are saved for the backward pass, which rotates every pair
back.
"""

import torch
import triton
from torch import Tensor

from megacpp_mcore.kernels.device_guard import device_of
from megacpp_mcore.kernels.rope_qk import triton_kernels
from megacpp_mcore.kernels.rope_qk.inputs import (
    RopeQK,
    RopeQKInputError,
    check_apart,
    check_projection,
)
from megacpp_mcore.kernels.strides import readable

DTYPES = ("bfloat16", "float16", "float32")
_BOUNDS_BLOCK = 64
_HEAD_BLOCK, _WARPS = 16, 1  # the fastest of nine on an H200, forward and backward, 56 / 8 heads
_TORCH_DTYPES = tuple(getattr(torch, name) for name in DTYPES)


def _projected(
    qkv: Tensor, angles: Tensor, *, heads: int, cu_seqlens: Tensor | None = None,
    interleaved: bool = False, mscale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check_projection(qkv, angles, heads, cu_seqlens)
    _check_dtype(qkv)
    if cu_seqlens is None:
        return _split(qkv, angles, None, heads, interleaved, mscale)
    outputs = _split(qkv.unsqueeze(1), angles, cu_seqlens, heads, interleaved, mscale)
    q, k, v = (x.squeeze(1) for x in outputs)
    return q, k, v


def _apart(
    q: Tensor, k: Tensor, angles: Tensor, *, cu_seqlens: Tensor | None = None,
    interleaved: bool = False, mscale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_apart(q, k, angles, cu_seqlens)
    _check_dtype(q)
    if cu_seqlens is None:
        return _rotate(q, k, angles, None, interleaved, mscale, False)
    outputs = _rotate(
        q.unsqueeze(1), k.unsqueeze(1), angles, cu_seqlens, interleaved, mscale, False
    )
    q, k = (x.squeeze(1) for x in outputs)
    return q, k


ROPE_QK = RopeQK(_projected, _apart)


def _check_dtype(x: Tensor) -> None:
    if x.dtype not in _TORCH_DTYPES:
        raise RopeQKInputError(f"{x.dtype} is not served by the kernel; it takes {DTYPES}")


@torch.library.custom_op("megacpp::rope_qk_split", mutates_args=())
def _split(
    qkv: Tensor, angles: Tensor, cu_seqlens: Tensor | None, heads: int, interleaved: bool,
    mscale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k and v of (s, b, heads or groups, dim) from the projection."""
    q, k, v = _split_outputs(qkv, heads)
    sources = _parts(readable(qkv), q.shape[-1])
    _launch(sources, (_grouped(q, k), k, v), angles, cu_seqlens, interleaved, mscale, False)
    return q, k, v


def _split_outputs(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    *rows, groups, width = qkv.shape
    dim = width // (heads // groups + 2)
    shapes = ((*rows, heads, dim), (*rows, groups, dim), (*rows, groups, dim))
    q, k, v = (qkv.new_empty(shape) for shape in shapes)
    return q, k, v


@_split.register_fake
def _(qkv, angles, cu_seqlens, heads, interleaved, mscale):
    return _split_outputs(qkv, heads)


@torch.library.custom_op("megacpp::rope_qk_join", mutates_args=())
def _join(
    dq: Tensor, dk: Tensor, dv: Tensor, angles: Tensor, cu_seqlens: Tensor | None,
    interleaved: bool, mscale: float,
) -> Tensor:  # fmt: skip
    """The projection's gradient from those of q, k and v."""
    dq, dk, dv = readable(dq), readable(dk), readable(dv)
    dqkv = _join_output(dq, dk)
    targets = _parts(dqkv, dq.shape[-1])
    sources = (_grouped(dq, dk), dk, dv)
    _launch(sources, targets, angles, cu_seqlens, interleaved, mscale, True)
    return dqkv


def _join_output(dq: Tensor, dk: Tensor) -> Tensor:
    *rows, heads, dim = dq.shape
    groups = dk.shape[-2]
    return dq.new_empty(*rows, groups, (heads // groups + 2) * dim)


@_join.register_fake
def _(dq, dk, dv, angles, cu_seqlens, interleaved, mscale):
    return _join_output(dq, dk)


def _save_split(ctx, inputs, output) -> None:
    _, angles, cu_seqlens, _, interleaved, mscale = inputs
    ctx.save_for_backward(angles, cu_seqlens)
    ctx.options = interleaved, mscale


def _split_gradients(ctx, dq, dk, dv):
    return _join(dq, dk, dv, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


_split.register_autograd(_split_gradients, setup_context=_save_split)


@torch.library.custom_op("megacpp::rope_qk_rotate", mutates_args=())
def _rotate(
    q: Tensor, k: Tensor, angles: Tensor, cu_seqlens: Tensor | None, interleaved: bool,
    mscale: float, backward: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q (s, b, heads, dim) and k (s, b, groups, dim) rotated, or rotated back."""
    q, k = readable(q), readable(k)
    outputs = q.new_empty(q.shape), k.new_empty(k.shape)
    sources, targets = (_grouped(q, k), k, None), (_grouped(*outputs), outputs[1], None)
    _launch(sources, targets, angles, cu_seqlens, interleaved, mscale, backward)
    return outputs


@_rotate.register_fake
def _(q, k, angles, cu_seqlens, interleaved, mscale, backward):
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _save_rotate(ctx, inputs, output) -> None:
    _, _, angles, cu_seqlens, interleaved, mscale, backward = inputs
    ctx.save_for_backward(angles, cu_seqlens)
    ctx.options = interleaved, mscale, not backward


def _rotate_gradients(ctx, dq, dk):
    return *_rotate(dq, dk, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


_rotate.register_autograd(_rotate_gradients, setup_context=_save_rotate)


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """A view of q as (s, b, groups, queries of a group, dim)."""
    return q.unflatten(2, (k.shape[2], -1))


def _parts(qkv: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the projection: queries (s, b, groups, ratio, dim), keys and values."""
    parts = qkv.unflatten(-1, (-1, dim))
    return parts[..., :-2, :], parts[..., -2, :], parts[..., -1, :]


def _launch(
    sources: tuple[Tensor, Tensor, Tensor | None], targets: tuple[Tensor, Tensor, Tensor | None],
    angles: Tensor, cu_seqlens: Tensor | None, interleaved: bool, mscale: float, backward: bool,
) -> None:  # fmt: skip
    """One program a token."""
    tokens, batch, groups, ratio, dim = sources[0].shape
    if not tokens * batch:
        return
    pairs = angles.shape[1]
    rest = dim - 2 * pairs
    strides = []
    for q, k, v in (sources, targets):
        strides += [*q.stride()[:4], *k.stride()[:3]]
        strides += (0, 0, 0) if v is None else v.stride()[:3]
    up = triton.next_power_of_2
    with device_of(sources[0]):
        triton_kernels.rope_qk_rotate[(tokens * batch,)](
            *sources, *targets, angles, cu_seqlens,
            batch, 0 if cu_seqlens is None else cu_seqlens.numel(), angles.shape[0], mscale,
            *strides, *angles.stride(),
            HEADS=groups * ratio, RATIO=ratio, PAIRS=pairs, REST=rest,
            PAIR_BLOCK=up(pairs), REST_BLOCK=up(max(rest, 1)), DIM_BLOCK=up(dim),
            HEAD_BLOCK=min(_HEAD_BLOCK, up(groups * ratio)),
            GROUP_BLOCK=min(_HEAD_BLOCK, up(groups)), INTERLEAVED=interleaved, BACKWARD=backward,
            HAS_V=sources[2] is not None, PACKED=cu_seqlens is not None,
            BOUNDS_BLOCK=_BOUNDS_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
