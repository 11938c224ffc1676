"""Causal core attention outside Transformer Engine: the `core_attention` surface's modules.

Inputs are in Megatron's layouts: `sbhd` (q, k, v of shape [s, b, heads, dim]) or packed `thd`
([t, heads, dim] with `cu_seqlens_q`). The output is [s, b, heads * dv] or [t, heads * dv]. Any head
dims work (dqk may differ from dv, as in MLA), grouped queries too, and any strides with unit stride
in the last dimension.
"""

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import ClassVar

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.core_attention import (
    attention,
    sdpa,
    sdpa_cudnn,
    sdpa_flash,
    sdpa_varlen,
)
from megacpp_mcore.kernels.core_attention.flash_4 import FlashAttention4
from megacpp_mcore.kernels.documents import bounds_to_end
from megacpp_mcore.layers.documents import document_offsets


class CoreAttentionError(MegacppError):
    """A mask, layout or parallelism that a core attention does not support."""


class TorchCoreAttention(MegatronModule):
    """Base class of the backends: Megatron's constructor, layouts, masks and documents.

    k_channels, v_channels: dqk and dv when they are not config.kv_channels (MLA). softmax_scale:
    1 / sqrt(dqk) when None. Raises CoreAttentionError for context parallelism, for a mask that is
    not causal, and for a sliding window without kernel support; dispatch refuses the same earlier.
    """

    has_window: ClassVar[bool] = False
    takes_narrow_v = True  # dv < dqk works for packed documents too; for TE, Megatron's MLA pads v

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None,
                 k_channels=None, v_channels=None, cp_comm_type=None, pg_collection=None,
                 attention_dropout=None, name=None):  # fmt: skip
        super().__init__(config)
        if config.context_parallel_size > 1:
            raise CoreAttentionError(
                f"context_parallel_size {config.context_parallel_size}: this attention sees one "
                "rank's tokens only; use 1, or the core_attention backend 'te'"
            )
        head_dim = k_channels or config.kv_channels
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(head_dim)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.dropout = dropout
        self.window = window_of(config, layer_number)
        if self.window is not None and not self.has_window:
            raise CoreAttentionError(
                f"window_size {config.window_size}: {type(self).__name__} has no sliding window; "
                "use the core_attention backend 'te' or 'reference'"
            )
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
        """Causal attention; with packed documents, each document attends to itself only.

        attention_mask is not read: causality is implied, and documents come as offsets.
        """
        if attn_mask_type is not None:
            self._check_mask(attn_mask_type)
        if attention_bias is not None:
            raise CoreAttentionError("attention_bias is not supported here; pass None")
        if not query.numel():  # not every kernel can be launched without elements
            nothing = query.sum() + key.sum() + value.sum()
            return nothing.expand(*query.shape[:-1], value.shape[-1]).flatten(-2)
        dropout = self.dropout if self.training else 0.0
        with self._random_states(dropout):
            if packed_seq_params is None:
                return self.whole(query, key, value, dropout).flatten(2)
            bounds, longest = _documents(packed_seq_params, query)
            return self.packed(query, key, value, bounds, longest, dropout).flatten(1)

    def whole(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """q [s, b, h, dqk], k [s, b, g, dqk], v [s, b, g, dv], h % g == 0 -> [s, b, h, dv]."""
        raise CoreAttentionError(
            f"{type(self).__name__} has no kernel for whole rows; name another core_attention"
        )

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, dropout: float
    ) -> Tensor:
        """The same for [t, h, d]. bounds: int32 offsets of the documents; the last one is t."""
        raise CoreAttentionError(
            f"{type(self).__name__} has no kernel for packed documents; name another core_attention"
        )

    def _random_states(self, dropout: float) -> contextlib.AbstractContextManager:
        """The RNG state for dropout: a different one on each tensor-parallel rank, as in TE.

        Under sequence parallelism, Megatron's own attention expects the stack to fork the RNG
        state; HybridStack does not.
        """
        tracker = get_cuda_rng_tracker()
        if dropout and tracker.is_initialized():
            return tracker.fork()
        return contextlib.nullcontext()

    def _check_mask(self, mask: AttnMaskType) -> None:
        if mask not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise CoreAttentionError(
                f"mask {mask.name!r} is not supported; use causal or padding_causal"
            )


def window_of(config, layer_number: int) -> int | None:
    """How many earlier tokens a query of this layer can see; None: all of them."""
    skip = getattr(config, "window_attn_skip_freq", None)
    if not is_layer_window_attention(config.window_size, skip, layer_number):
        return None
    before, _ = config.window_size
    return before if before >= 0 else None


def _documents(packed_seq_params, query: Tensor) -> tuple[Tensor, int]:
    """int32 offsets that end at the query's last token, and the length of the longest document.

    With padding between documents, documents start at the padded offsets; the causal mask hides the
    padding that follows a document. Tokens after the last offset become one more document, so that
    every kernel writes their outputs. Their number is known without a device synchronisation only
    from total_tokens, and max_seqlen_q may not count padding. When either is unknown, the bound on
    the longest document is the whole pack.
    """
    offsets = document_offsets(packed_seq_params)
    bounds = offsets.to(torch.int32)
    tokens, longest = query.shape[0], packed_seq_params.max_seqlen_q
    whole = packed_seq_params.total_tokens == tokens and longest is not None
    if whole and offsets is packed_seq_params.cu_seqlens_q:  # no padding between documents
        return bounds, int(longest)
    return bounds_to_end(bounds, tokens), tokens


class HeadsFirst(TorchCoreAttention):
    """A function of kernels.core_attention on [b, h, s, d]; loops over packed documents."""

    kernel: ClassVar[Callable[..., Tensor]]

    def whole(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return self._attend(q, k, v, dropout).permute(2, 0, 1, 3)

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, dropout: float
    ) -> Tensor:
        documents = [
            # [t, h, d] of one document -> [1, h, t, d]
            self._attend(*(x[start:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v)), dropout)
            for start, end in itertools.pairwise(bounds.tolist())
            if end > start
        ]
        return torch.cat(documents, dim=2).squeeze(0).transpose(0, 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        options = {"window": self.window} if self.has_window else {}
        kernel = type(self).kernel
        return kernel(q, k, v, scale=self.softmax_scale, dropout=dropout, **options)


class SDPACoreAttention(HeadsFirst):
    """scaled_dot_product_attention with the fused kernel that torch selects."""

    kernel = staticmethod(sdpa)


class ReferenceCoreAttention(HeadsFirst):
    """The reference: plain torch, with the scores of every head in memory."""

    kernel = staticmethod(attention)
    has_window = True


class CudnnCoreAttention(HeadsFirst):
    """cuDNN's fused kernel, for whole rows only: a launch per document would starve the GPU."""

    kernel = staticmethod(sdpa_cudnn)
    packed = TorchCoreAttention.packed


class FlashCoreAttention(HeadsFirst):
    """torch's FlashAttention-2; packed documents in one launch of its varlen variant."""

    kernel = staticmethod(sdpa_flash)

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, dropout: float
    ) -> Tensor:
        return sdpa_varlen(q, k, v, bounds, longest, scale=self.softmax_scale)


class Flash4CoreAttention(TorchCoreAttention):
    """FlashAttention-4 in CuTe DSL, for Hopper and Blackwell; its package must be installed."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.flash = FlashAttention4()

    def whole(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        return self.flash.whole(q, k, v, scale=self.softmax_scale)

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, dropout: float
    ) -> Tensor:
        return self.flash.packed(q, k, v, bounds, longest, scale=self.softmax_scale)


class CoreAttentionByLayout(MegatronModule):
    """One core attention for whole rows and another for packed documents.

    packed: None when no backend supports them; `refusal` then says why. Checkpoint keys are those
    of the inner modules, without a further prefix.
    """

    def __init__(self, config, whole, packed, refusal: str = "") -> None:
        super().__init__(config)
        self.whole, self.packed, self.refusal = whole, packed, refusal
        self.takes_narrow_v = getattr(packed, "takes_narrow_v", False)

    def forward(self, query, key, value, attention_mask, packed_seq_params=None, **kwargs):
        is_packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        core = self.packed if is_packed else self.whole
        if core is None:
            raise CoreAttentionError(f"a batch of packed documents: {self.refusal}")
        return core(
            query, key, value, attention_mask, packed_seq_params=packed_seq_params, **kwargs
        )

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        found = {}
        for core in (self.whole, self.packed):
            if core is not None:
                found |= core.sharded_state_dict(prefix, sharded_offsets, metadata)
        return found
