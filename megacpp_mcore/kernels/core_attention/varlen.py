"""Attention over packed documents, and for a v narrower than q and k.

Packed: q (t, h, dqk), k (t, g, dqk), v (t, g, dv), bounds (documents + 1,) non-decreasing int32
from 0, `longest` at least the longest document -> (t, h, dv). Tokens after the last bound belong to
no document, and their outputs are undefined.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional
from torch.nn.attention import varlen

from megacpp_mcore.kernels.strides import readable

_CAUSAL = (-1, 0)  # varlen_attn's window: all earlier tokens, no later ones


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
    """`attend` for a v narrower than q and k: v is padded with zeros, and the output cut to dv."""

    def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dv = v.shape[-1]
        if dv == q.shape[-1]:
            return attend(q, k, v)
        return attend(q, k, functional.pad(v, (0, q.shape[-1] - dv)))[..., :dv]

    return padded
