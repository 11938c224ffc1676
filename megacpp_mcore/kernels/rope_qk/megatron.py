"""`rope_qk` by Megatron's own functions, with or without Transformer Engine's kernels."""

from types import SimpleNamespace

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor

from megacpp_mcore.kernels.rope_qk.inputs import RopeQK

# Fields of Megatron's config that its function reads. torch.compile cannot create a namespace.
_CONFIGS = {
    (fused, interleaved): SimpleNamespace(
        apply_rope_fusion=fused, rotary_interleaved=interleaved, mrope_section=None
    )
    for fused in (True, False)
    for interleaved in (True, False)
}
_ONE_RANK = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def _rotated(
    q: Tensor, k: Tensor, angles: Tensor, cu_seqlens: Tensor | None, interleaved: bool,
    mscale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # TE's kernels have no mscale, and fail for no tokens.
    fused = q.is_cuda and q.numel() > 0 and mscale == 1
    fused = fused and rope_utils.fused_apply_rotary_pos_emb is not None
    if cu_seqlens is None:
        angles = angles[: q.shape[0]]
    table = torch.cat([angles, angles], -1)
    if interleaved:
        table = torch.stack([angles, angles], -1).flatten(1)
    if cu_seqlens is not None:
        # One row more: Megatron takes a table as long as the pack for one without documents.
        table = torch.cat([table, table[-1:]])
        if not fused:
            cu_seqlens = cu_seqlens.unique_consecutive()  # it fails on an empty document
    config = _CONFIGS[fused, interleaved]
    q, k = (
        rope_utils.apply_rotary_pos_emb(
            x, table[:, None, None], config, cu_seqlens, mscale, _ONE_RANK
        )
        for x in (q, k)
    )
    return q, k


ROPE_QK = RopeQK.of(_rotated)
