"""The table of angles of `mla_rope`, and the checks that every backend makes of its arguments."""

from typing import NamedTuple

import torch
from torch import Tensor

from megacpp_mcore.errors import MegacppError


class MLARopeInputError(MegacppError):
    """Arguments of `mla_rope` that do not fit together."""


class RotaryTable(NamedTuple):
    """cos and sin (positions, rotary_dim / 2), in float32 or wider, times YaRN's mscale."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, angles: Tensor, mscale: float = 1.0) -> "RotaryTable":
        """angles: (positions, rotary_dim / 2), position times frequency, float32 or wider."""
        return cls(angles.cos() * mscale, angles.sin() * mscale)


def check_inputs(
    q: Tensor,
    kv: Tensor,
    k_pos: Tensor,
    rotary: RotaryTable,
    qk_head_dim: int,
    cu_seqlens: Tensor | None,
) -> None:
    """Raise MLARopeInputError unless the arguments of `mla_rope` fit together."""
    tokens = tuple(q.shape[:-2])
    layouts = {3: "(t, heads, dim) of packed documents", 4: "(s, b, heads, dim)"}
    if q.dim() not in layouts or (q.dim() == 3) != (cu_seqlens is not None):
        with_bounds = "without" if cu_seqlens is None else "with"
        raise MLARopeInputError(
            f"q is {tuple(q.shape)} {with_bounds} cu_seqlens; it must be {layouts[4]}, or "
            f"{layouts[3]} with cu_seqlens"
        )
    pos_dim, v_dim = q.shape[-1] - qk_head_dim, kv.shape[-1] - qk_head_dim
    if tuple(kv.shape[:-1]) != tuple(q.shape[:-1]) or min(qk_head_dim, v_dim) < 1:
        raise MLARopeInputError(
            f"kv is {tuple(kv.shape)}; with q {tuple(q.shape)} and qk_head_dim {qk_head_dim} it "
            f"must be {(*q.shape[:-1], '> qk_head_dim')}"
        )
    if tuple(k_pos.shape) != (*tokens, pos_dim):
        raise MLARopeInputError(
            f"k_pos is {tuple(k_pos.shape)}; with q {tuple(q.shape)} and qk_head_dim "
            f"{qk_head_dim} it must be {(*tokens, pos_dim)}"
        )
    if not q.dtype == kv.dtype == k_pos.dtype:
        raise MLARopeInputError(
            f"q is {q.dtype}, kv is {kv.dtype}, k_pos is {k_pos.dtype}; they must have one dtype"
        )
    if len(devices := {x.device for x in (q, kv, k_pos, *rotary)}) > 1:
        raise MLARopeInputError(
            f"q, kv, k_pos, cos and sin are on {', '.join(sorted(map(str, devices)))}; they must "
            "be on one device"
        )
    check_table(rotary, tokens[0], pos_dim)
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point()):
        raise MLARopeInputError(
            f"cu_seqlens is {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}; it must be one row "
            "of integers"
        )


def check_table(rotary: RotaryTable, tokens: int, pos_dim: int) -> None:
    """The table must cover the row, as a document may be that long and its bounds are not read."""
    shape = tuple(rotary.cos.shape)
    if len(shape) != 2 or shape != tuple(rotary.sin.shape) or not 0 < 2 * shape[1] <= pos_dim:
        raise MLARopeInputError(
            f"cos is {shape} and sin is {tuple(rotary.sin.shape)}; they must be (positions, half "
            f"of the rotated dims), of at most {pos_dim} dims"
        )
    if shape[0] < tokens:
        raise MLARopeInputError(f"cos and sin have {shape[0]} positions, the row {tokens} tokens")
    if {rotary.cos.dtype, rotary.sin.dtype} - {torch.float32, torch.float64}:
        raise MLARopeInputError(
            f"cos is {rotary.cos.dtype}, sin is {rotary.sin.dtype}; they must be float32 or wider"
        )
