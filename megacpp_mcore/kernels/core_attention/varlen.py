"""Attention over documents packed one behind the other, and v narrower than q and k.

Packed: q (t, h, dqk), k (t, g, dqk), v (t, g, dv), bounds (documents + 1,) int32 from 0 that never
fall, `longest` at least the longest document -> (t, h, dv). Tokens behind the last bound belong to
no document; what they get is not defined here.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional
from torch.nn.attention import varlen

_CAUSAL = (-1, 0)  # varlen_attn's word for it: all tokens before, none behind


def sdpa_varlen(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, *, scale: float
) -> Tensor:
    """torch's FlashAttention-2, one launch for all documents."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen.varlen_attn(
            q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=_CAUSAL
        )

    return padded_v(attend)(*(readable(x) for x in (q, k, v)))


def padded_v(attend: Callable[..., Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`attend` for a v narrower than q and k: zeros that weigh nothing, and are cut off again."""

    def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dv = v.shape[-1]
        if dv == q.shape[-1]:
            return attend(q, k, v)
        return attend(q, k, functional.pad(v, (0, q.shape[-1] - dv)))[..., :dv]

    return padded


def readable(x: Tensor) -> Tensor:
    """A copy where elements stand apart, which the fused kernels cannot read."""
    return x if x.stride(-1) == 1 else x.contiguous()
