"""RoPE of queries and keys as it is defined, in plain torch.

Math (Su et al., RoFormer, 3.2.2; grouped queries: Ainslie et al., GQA; Peng et al., YaRN, 3.4 for
mscale). A pair (a, b) of rotated dims of a token at position p is rotated by its angle t in row p:

    (a, b) -> mscale (a cos t - b sin t, b cos t + a sin t)
"""

import torch
from torch import Tensor

from megacpp_mcore.kernels.documents import positions
from megacpp_mcore.kernels.rope_qk.inputs import RopeQK


def _rotated(
    q: Tensor, k: Tensor, angles: Tensor, cu_seqlens: Tensor | None, interleaved: bool,
    mscale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q and k, rotated in float32, or float64 for float64, and rounded once."""
    wide = torch.promote_types(q.dtype, torch.float32)
    tokens = q.shape[0]
    if cu_seqlens is None:
        angle = angles[:tokens].to(wide)[:, None, None]
        cos, sin = angle.cos() * mscale, angle.sin() * mscale
    else:
        position = positions(tokens, cu_seqlens)
        known = (position < angles.shape[0])[:, None, None]
        angle = angles[position.clamp(max=angles.shape[0] - 1)].to(wide)[:, None]
        cos = torch.where(known, angle.cos() * mscale, 1)
        sin = torch.where(known, angle.sin() * mscale, 0)
    q, k = (rotate(x, cos, sin, interleaved) for x in (q, k))
    return q, k


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (..., dim); cos, sin: of any shape that x's other dims broadcast with."""
    pairs, wide = cos.shape[-1], torch.promote_types(x.dtype, torch.float32)
    dims, rest = x[..., : 2 * pairs].to(wide), x[..., 2 * pairs :]
    if interleaved:
        a, b = dims[..., 0::2], dims[..., 1::2]
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = dims.chunk(2, dim=-1)
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)


REFERENCE = RopeQK.of(_rotated)
