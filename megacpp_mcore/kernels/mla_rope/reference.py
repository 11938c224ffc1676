"""MLA's RoPE as it is defined, in plain torch, with the shapes of every backend.

Math (Su et al., RoFormer, 3.2.2; DeepSeek-V2, 2.1.3 for the separate rotary part of MLA, which the
heads share in keys; Peng et al., YaRN, 3.4 for mscale, which the table includes). A pair (a, b) of
rotated dims of a token at position p is rotated by its angle t in row p of the table:

    (a, b) -> (a cos t - b sin t, b cos t + a sin t)

As in Megatron's MLA, the elements of a pair are neighbours in the inputs (DeepSeek's checkpoints)
and half the rotated dims apart in the outputs. Queries and keys are permuted alike, so their
products do not change. Positions start at 0 in every document.
"""

import torch
from torch import Tensor

from megacpp_mcore.kernels import documents
from megacpp_mcore.kernels.mla_rope.inputs import RotaryTable, check_inputs


def mla_rope(
    q: Tensor,
    kv: Tensor,
    k_pos: Tensor,
    rotary: RotaryTable,
    *,
    qk_head_dim: int,
    cu_seqlens: Tensor | None = None,
    interleaved: bool = True,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries, and keys and values of every head; differentiable in q, kv and k_pos.

    q: (s, b, heads, qk_head_dim + pos_dim), or (t, heads, ...) for packed documents. kv: (s, b,
    heads, qk_head_dim + v_head_dim). k_pos: (s, b, pos_dim), shared by all heads. Any strides, one
    floating dtype. rotary: rotates the first rotary_dim of the pos_dim; at least s (t) positions.
    cu_seqlens: (documents + 1,) non-decreasing integers from 0 to t, required for packed documents
    and refused otherwise. interleaved: pairs are neighbours in q and k_pos, else half of the
    rotated dims apart. in_place: nobody else reads q, nor in the backward pass its gradient: a
    backend may overwrite both, and return q's memory as the queries.

    Returns q (s, b, heads, qk_head_dim + pos_dim), k of that shape, v (s, b, heads, v_head_dim).
    Computed in float32, or float64 for float64, and rounded once. Raises MLARopeInputError (a
    MegacppError) for arguments that do not fit together.
    """
    check_inputs(q, kv, k_pos, rotary, qk_head_dim, cu_seqlens)
    # (s, 1, 1, rotary_dim / 2), or (t, 1, rotary_dim / 2)
    heads = (slice(None), *(None,) * (q.dim() - 2))
    cos, sin = (table[positions(q.shape[0], cu_seqlens, q.device)][heads] for table in rotary)
    q_plain, q_pos = q.split([qk_head_dim, k_pos.shape[-1]], dim=-1)
    k_plain, v = kv.split([qk_head_dim, kv.shape[-1] - qk_head_dim], dim=-1)
    k_pos = rotate(k_pos.unsqueeze(-2), cos, sin, interleaved).expand_as(q_pos)
    q = torch.cat([q_plain, rotate(q_pos, cos, sin, interleaved)], dim=-1)
    return q, torch.cat([k_plain, k_pos], dim=-1), v.contiguous()


def positions(tokens: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """(tokens,): the position of each token in its document."""
    if cu_seqlens is None:
        return torch.arange(tokens, device=device)
    return documents.positions(tokens, cu_seqlens.to(device))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] of the last dim of x; the rest is unchanged.

    cos, sin: of any shape that x's other dims broadcast with. interleaved: as in `mla_rope`.
    """
    pairs = cos.shape[-1]
    rotated, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
    else:
        a, b = rotated[..., :pairs], rotated[..., pairs:]
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b, cos, sin = (y.to(wide) for y in (a, b, cos, sin))
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)
