"""Causal core attention outside Transformer Engine: the `core_attention` surface's modules.

All take Megatron's layouts, `sbhd` (q, k, v of shape [s, b, heads, dim]) and packed `thd`
([t, heads, dim] with `cu_seqlens_q`), any head dims (dqk may differ from dv, as in MLA), grouped
queries, and any strides whose last is 1, and return [s, b, heads * dv] or [t, heads * dv].
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
    packages,
    sdpa,
    sdpa_cudnn,
    sdpa_flash,
    sdpa_varlen,
)


class CoreAttentionError(MegacppError):
    """A mask, layout or parallelism that a core attention does not serve."""


class TorchCoreAttention(MegatronModule):
    """What the backends share: the constructor Megatron calls, layouts, masks and documents.

    k_channels, v_channels: dqk and dv when they are not config.kv_channels (MLA). softmax_scale:
    1 / sqrt(dqk) when None. Raises CoreAttentionError for what dispatch does not let through:
    context parallelism, a mask that is not causal, a window that the kernel does not have.
    """

    has_window: ClassVar[bool] = False
    takes_narrow_v = True  # in packed documents too, where Megatron's MLA pads v for TE

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
                f"window_size {config.window_size}: {type(self).__name__} has no sliding window"
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
        """Attend causally, in packed documents each to itself.

        attention_mask is not read: a causal mask needs none, and documents come as offsets.
        """
        if attn_mask_type is not None:
            self._check_mask(attn_mask_type)
        if attention_bias is not None:
            raise CoreAttentionError("attention_bias is not served by this core attention")
        if not query.numel():  # which not every kernel can be launched for
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
        raise CoreAttentionError(f"{type(self).__name__} has no kernel for whole rows")

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, dropout: float
    ) -> Tensor:
        """The same of [t, h, d], each document of the bounds, which end at t, to itself."""
        raise CoreAttentionError(
            f"{type(self).__name__} has no kernel for packed documents; name another core_attention"
        )

    def _random_states(self, dropout: float) -> contextlib.AbstractContextManager:
        """Other ones on every tensor-parallel rank, whose heads are others, as TE's attention has.

        Megatron's own attention leaves it to the stack under sequence parallelism; HybridStack
        does not do it.
        """
        tracker = get_cuda_rng_tracker()
        if dropout and tracker.is_initialized():
            return tracker.fork()
        return contextlib.nullcontext()

    def _check_mask(self, mask: AttnMaskType) -> None:
        if mask not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise CoreAttentionError(f"mask {mask.name!r} is not served; use causal")


def window_of(config, layer_number: int) -> int | None:
    """Tokens before its own that a query of this layer sees; None: all."""
    skip = getattr(config, "window_attn_skip_freq", None)
    if not is_layer_window_attention(config.window_size, skip, layer_number):
        return None
    before, _ = config.window_size
    return before if before >= 0 else None


def _documents(packed_seq_params, query: Tensor) -> tuple[Tensor, int]:
    """Offsets up to the last of the query's tokens, int32, and the longest document.

    With padding between documents the padded offsets are the ones where documents start; causal
    attention keeps what stands behind a document's tokens from them. Tokens behind the last offset
    become a document of their own, so that no kernel leaves their values as the allocator had them.
    How many they are is known without waiting for the GPU only where total_tokens says it, and
    max_seqlen_q may leave padding out: where either is open, the whole pack is the longest.
    """
    if packed_seq_params.qkv_format != "thd" or packed_seq_params.cu_seqlens_q is None:
        given = "missing" if packed_seq_params.cu_seqlens_q is None else "given"
        raise CoreAttentionError(
            f"packed_seq_params has qkv_format {packed_seq_params.qkv_format!r} and cu_seqlens_q "
            f"{given}; 'thd' with cu_seqlens_q is needed"
        )
    offsets, padded = packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_q_padded
    bounds = (offsets if padded is None else padded).to(torch.int32)
    tokens, longest = query.shape[0], packed_seq_params.max_seqlen_q
    as_they_are = padded is None or padded is offsets
    if as_they_are and packed_seq_params.total_tokens == tokens and longest is not None:
        return bounds, int(longest)
    return torch.cat([bounds, bounds.new_full((1,), tokens)]), tokens


class HeadsFirst(TorchCoreAttention):
    """One of kernels.core_attention's functions of [b, h, s, d]; documents one after the other."""

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
    """The fused kernel that torch picks."""

    kernel = staticmethod(sdpa)


class ReferenceCoreAttention(HeadsFirst):
    """The definition, with the scores of every head in memory."""

    kernel = staticmethod(attention)
    has_window = True


class CudnnCoreAttention(HeadsFirst):
    """cuDNN's fused kernel, for whole rows: one by one, short documents would starve the GPU."""

    kernel = staticmethod(sdpa_cudnn)
    packed = TorchCoreAttention.packed


class FlashCoreAttention(HeadsFirst):
    """torch's FlashAttention-2, packed documents in one launch of its varlen form."""

    kernel = staticmethod(sdpa_flash)

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, dropout: float
    ) -> Tensor:
        return sdpa_varlen(q, k, v, bounds, longest, scale=self.softmax_scale)


class PackageCoreAttention(TorchCoreAttention):
    """One of the flash-attn packages, which must be installed."""

    package: ClassVar[packages.FlashPackage]

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.flash = self.package.load()

    def whole(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        rows = (x.transpose(0, 1) for x in (q, k, v))
        return self.flash.whole(*rows, scale=self.softmax_scale, dropout=dropout).transpose(0, 1)

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, dropout: float
    ) -> Tensor:
        options = {"scale": self.softmax_scale, "dropout": dropout}
        return self.flash.packed(q, k, v, bounds, longest, **options)


class Flash2CoreAttention(PackageCoreAttention):
    """The package flash-attn 2."""

    package = packages.FLASH_2


class Flash3CoreAttention(PackageCoreAttention):
    """FlashAttention-3, for Hopper."""

    package = packages.FLASH_3


class Flash4CoreAttention(PackageCoreAttention):
    """FlashAttention-4 in CuTe DSL, for Hopper and Blackwell."""

    package = packages.FLASH_4


class CoreAttentionByLayout(MegatronModule):
    """One core attention for whole rows and another for packed documents.

    packed: None where no backend serves them; `refusal` then says why. Neither adds a level to the
    keys of a distributed checkpoint.
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
