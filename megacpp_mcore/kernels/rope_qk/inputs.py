"""The two functions of a backend of `rope_qk`, and the checks that all backends make."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megacpp_mcore.errors import MegacppError


class RopeQKInputError(MegacppError):
    """Arguments of `rope_qk` that do not fit together."""


@dataclass(frozen=True)
class RopeQK:
    """One backend: a function of the projection, and one of queries and keys that a norm separated.

    projected(qkv, angles, *, heads, cu_seqlens=None, interleaved=False, mscale=1.0): qkv is
    Megatron's projection (s, b, groups, (heads / groups + 2) * dim): in every group its queries,
    one key, one value. Returns q (s, b, heads, dim), k and v (s, b, groups, dim).

    apart(q, k, angles, *, cu_seqlens=None, interleaved=False, mscale=1.0): q (s, b, heads, dim), k
    (s, b, groups, dim). Returns both, rotated.

    For packed documents rows are (t, ...) without b, and cu_seqlens has (documents + 1,)
    non-decreasing integer offsets from 0: positions start at 0 in every document, and tokens after
    the last offset belong to none. Any strides, one floating dtype. angles: (positions, rotary_dim
    / 2) in float32 or wider, position times frequency, one row for each position that occurs; a
    token whose position has no row is unchanged. The first rotary_dim of dim are rotated and
    multiplied by mscale; the rest is unchanged. interleaved: pairs are neighbours, else rotary_dim
    / 2 apart.

    The outputs are new tensors. The inputs cannot be overwritten: their producer's backward pass
    may need them, and TE's linears return views, which autograd protects. The projection's queries
    must move anyway, as no strides merge its groups and their queries into one axis. Raises
    RopeQKInputError for arguments that do not fit together.
    """

    projected: Callable[..., tuple[Tensor, Tensor, Tensor]]
    apart: Callable[..., tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, rotate: Callable[..., tuple[Tensor, Tensor]]) -> Self:
        """Both functions from rotate(q, k, angles, cu_seqlens, interleaved, mscale)."""

        def projected(
            qkv: Tensor, angles: Tensor, *, heads: int, cu_seqlens: Tensor | None = None,
            interleaved: bool = False, mscale: float = 1.0,
        ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
            ratio, dim = check_projection(qkv, angles, heads, cu_seqlens)
            q, k, v = qkv.split([ratio * dim, dim, dim], dim=-1)
            q = q.reshape(*qkv.shape[:-2], heads, dim)
            return *rotate(q, k, angles, cu_seqlens, interleaved, mscale), v

        def apart(
            q: Tensor, k: Tensor, angles: Tensor, *, cu_seqlens: Tensor | None = None,
            interleaved: bool = False, mscale: float = 1.0,
        ) -> tuple[Tensor, Tensor]:  # fmt: skip
            check_apart(q, k, angles, cu_seqlens)
            return rotate(q, k, angles, cu_seqlens, interleaved, mscale)

        return cls(projected, apart)


def check_projection(
    qkv: Tensor, angles: Tensor, heads: int, cu_seqlens: Tensor | None
) -> tuple[int, int]:
    """(queries of a group, dim) of the projection."""
    axes = 3 if cu_seqlens is not None else 4
    if qkv.dim() != axes:
        raise RopeQKInputError(f"qkv is {tuple(qkv.shape)}; it must be {_LAYOUTS[axes]}")
    groups, width = qkv.shape[-2:]
    if not groups or heads % groups or width % (heads // groups + 2):
        raise RopeQKInputError(
            f"qkv is {tuple(qkv.shape)}; with {heads} heads its last two axes must be groups, of "
            "which heads is a multiple, and (heads / groups + 2) * dim"
        )
    ratio = heads // groups
    _check_angles(qkv, angles, width // (ratio + 2), cu_seqlens)
    return ratio, width // (ratio + 2)


def check_apart(q: Tensor, k: Tensor, angles: Tensor, cu_seqlens: Tensor | None) -> None:
    axes = 3 if cu_seqlens is not None else 4
    fits = q.dim() == k.dim() == axes and q.dtype == k.dtype
    if not fits or q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise RopeQKInputError(
            f"q is {tuple(q.shape)} in {q.dtype}, k is {tuple(k.shape)} in {k.dtype}; both must be "
            f"{_LAYOUTS[axes]} in one dtype, alike but for the heads"
        )
    if not k.shape[-2] or q.shape[-2] % k.shape[-2]:
        raise RopeQKInputError(f"{q.shape[-2]} heads are no multiple of {k.shape[-2]} groups")
    _check_angles(q, angles, q.shape[-1], cu_seqlens)


_LAYOUTS = {
    3: "(t, heads or groups, width), for packed documents",
    4: "(s, b, heads or groups, width), without cu_seqlens",
}


def _check_angles(x: Tensor, angles: Tensor, dim: int, cu_seqlens: Tensor | None) -> None:
    wide = angles.dtype in (torch.float32, torch.float64)
    if angles.dim() != 2 or not wide or not 0 < 2 * angles.shape[1] <= dim:
        raise RopeQKInputError(
            f"angles are {tuple(angles.shape)} in {angles.dtype}; they must be (positions, "
            f"rotary_dim / 2) in float32 or float64, rotary_dim at most {dim}"
        )
    if cu_seqlens is None and angles.shape[0] < x.shape[0]:
        raise RopeQKInputError(
            f"angles have {angles.shape[0]} positions, the sequence has {x.shape[0]}"
        )
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point()):
        raise RopeQKInputError(
            f"cu_seqlens is {tuple(cu_seqlens.shape)} in {cu_seqlens.dtype}; it must be "
            "(documents + 1,) integers"
        )
