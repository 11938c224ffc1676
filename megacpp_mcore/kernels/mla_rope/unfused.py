"""MLA's RoPE as the sequence of torch operations that Megatron 0.19.2 runs.

Megatron rounds cos and sin to the dtype of q, and every product and sum as well.
"""

import torch
from torch import Tensor

from megacpp_mcore.kernels.mla_rope.inputs import RotaryTable, check_inputs
from megacpp_mcore.kernels.mla_rope.reference import positions


def mla_rope(
    q: Tensor, kv: Tensor, k_pos: Tensor, rotary: RotaryTable, *, qk_head_dim: int,
    cu_seqlens: Tensor | None = None, interleaved: bool = True, in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `megacpp_mcore.kernels.mla_rope.mla_rope`, in the arithmetic of q's dtype."""
    check_inputs(q, kv, k_pos, rotary, qk_head_dim, cu_seqlens)
    rows = [table[: q.shape[0]].to(q.dtype) for table in rotary]
    if cu_seqlens is not None:
        index = positions(q.shape[0], cu_seqlens, q.device)
        rows = [row[index] for row in rows]
    heads = (slice(None), *(None,) * (q.dim() - 2))
    cos, sin = (torch.cat([row, row], dim=-1)[heads] for row in rows)
    q_plain, q_pos = q.split([qk_head_dim, k_pos.shape[-1]], dim=-1)
    k_plain, v = kv.split([qk_head_dim, kv.shape[-1] - qk_head_dim], dim=-1)
    k_pos = _apply(k_pos.unsqueeze(-2), cos, sin, interleaved).expand_as(q_pos)
    q = torch.cat([q_plain, _apply(q_pos, cos, sin, interleaved)], dim=-1)
    return q, torch.cat([k_plain, k_pos], dim=-1), v.contiguous()


def _apply(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if interleaved:
        rotated = torch.cat([rotated[..., 0::2], rotated[..., 1::2]], dim=-1)
    a, b = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat([-b, a], dim=-1) * sin
    return torch.cat([rotated, rest], dim=-1)
