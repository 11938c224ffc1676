"""Causal core attention in torch: the `core_attention` surface's backends that need no package.

All take Megatron's layouts, `sbhd` (q, k, v of shape [s, b, heads, dim]) and packed `thd`
([t, heads, dim] with `cu_seqlens_q`), any head dims (dqk may differ from dv, as in MLA) and grouped
queries, and return [s, b, heads * dv] or [t, heads * dv].
"""

import itertools
import math
from collections.abc import Callable
from typing import ClassVar

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import functional

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.core_attention import attention, sdpa, sdpa_cudnn, sdpa_flash


class CoreAttentionError(MegacppError):
    """A mask, layout or parallelism that torch's core attention does not serve."""


class TorchCoreAttention(MegatronModule):
    """What the backends share: the constructor Megatron calls, layouts and documents.

    k_channels, v_channels: dqk and dv when they are not config.kv_channels (MLA). softmax_scale:
    1 / sqrt(dqk) when None. Raises CoreAttentionError for context parallelism and for a mask that
    is not causal.
    """

    kernel: ClassVar[Callable[..., Tensor]]  # as in megacpp_mcore.kernels.core_attention

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None,
                 k_channels=None, v_channels=None, cp_comm_type=None, pg_collection=None,
                 attention_dropout=None, name=None):  # fmt: skip
        super().__init__(config)
        if config.context_parallel_size > 1:
            raise CoreAttentionError(
                f"context_parallel_size {config.context_parallel_size}: torch's attention sees one "
                "rank's tokens only; use 1, or the core_attention backend 'te'"
            )
        head_dim = k_channels or config.kv_channels
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(head_dim)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.dropout = dropout
        self._check_mask(attn_mask_type)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ) -> Tensor:
        """Attend causally. attention_mask is not read: a causal mask needs none."""
        if attn_mask_type is not None:
            self._check_mask(attn_mask_type)
        if attention_bias is not None:
            raise CoreAttentionError("attention_bias is not served by torch's core attention")
        if packed_seq_params is None:
            # [s, b, h, d] -> [b, h, s, d]
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self.attend(q, k, v).permute(2, 0, 1, 3).flatten(2)
        if packed_seq_params.qkv_format != "thd":
            raise CoreAttentionError(
                f"qkv_format {packed_seq_params.qkv_format!r} is not served; use 'thd'"
            )
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        documents = [
            # [t, h, d] of one document -> [1, h, t, d]
            self.attend(*(x[start:end].transpose(0, 1).unsqueeze(0) for x in (query, key, value)))
            for start, end in itertools.pairwise(bounds)
            if end > start
        ]
        out = torch.cat(documents, dim=2).squeeze(0).transpose(0, 1).flatten(1)
        # Padding behind the last document attends to nothing.
        return functional.pad(out, (0, 0, 0, query.shape[0] - out.shape[0]))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b, h, s, dqk], k [b, g, s, dqk], v [b, g, s, dv], h % g == 0 -> [b, h, s, dv]."""
        dropout = self.dropout if self.training else 0.0
        return type(self).kernel(q, k, v, scale=self.softmax_scale, dropout=dropout)

    def _check_mask(self, mask: AttnMaskType) -> None:
        if mask not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise CoreAttentionError(f"mask {mask.name!r} is not served; use causal")


class SDPACoreAttention(TorchCoreAttention):
    """The fused kernel that torch picks."""

    kernel = staticmethod(sdpa)


class CudnnCoreAttention(TorchCoreAttention):
    """cuDNN's fused kernel."""

    kernel = staticmethod(sdpa_cudnn)


class FlashCoreAttention(TorchCoreAttention):
    """FlashAttention-2."""

    kernel = staticmethod(sdpa_flash)


class ReferenceCoreAttention(TorchCoreAttention):
    """The definition, with the scores of every head in memory."""

    kernel = staticmethod(attention)
