"""MLA's RoPE as it is defined, in plain torch; the shapes of every backend are said here.

Math (Su et al., RoFormer, 3.2.2; DeepSeek-V2, 2.1.3 for the rotary part that MLA keeps apart and
the heads share; Peng et al., YaRN, 3.4 for mscale, which the table holds). Pair i of the rotated
dims of a token at position p, a and b its two elements, turns by the angle t of the table's row p:

    (a, b) -> (a cos t - b sin t, b cos t + a sin t)

As Megatron does in MLA, the pairs are neighbours where they come from (DeepSeek's checkpoints) and
half the rotated dims apart where they go to. Queries and keys are permuted alike, so that their
products are those of any other order. Positions start anew in every document.
"""

import torch
from torch import Tensor

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
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries, and keys and values of every head; differentiable in q, kv and k_pos.

    q: (s, b, heads, qk_head_dim + pos_dim), or (t, heads, ...) for packed documents. kv: (s, b,
    heads, qk_head_dim + v_head_dim). k_pos: (s, b, pos_dim), shared by all heads. Any strides, one
    floating dtype. rotary: turns the first rotary_dim of the pos_dim; at least s (t) positions.
    cu_seqlens: (documents + 1,) integers from 0 to t that never fall; needed for, and only for,
    packed documents. interleaved: pairs are neighbours in q and k_pos, else half of the rotated
    dims apart.

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
    k_pos = _rotate(k_pos.unsqueeze(-2), cos, sin, interleaved).expand_as(q_pos)
    q = torch.cat([q_plain, _rotate(q_pos, cos, sin, interleaved)], dim=-1)
    return q, torch.cat([k_plain, k_pos], dim=-1), v.contiguous()


def positions(tokens: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """(tokens,): how far into its document each token is."""
    index = torch.arange(tokens, device=device)
    if cu_seqlens is None:
        return index
    bounds = cu_seqlens.to(device).contiguous()
    document = torch.searchsorted(bounds, index, right=True) - 1
    return index - bounds[document.clamp(min=0)]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The first 2 * cos.shape[-1] of the last dim of x turned, the rest as it is."""
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., :pairs], turned[..., pairs:]
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b, cos, sin = (y.to(wide) for y in (a, b, cos, sin))
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)
