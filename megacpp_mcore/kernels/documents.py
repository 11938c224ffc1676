"""Offsets of documents packed into one row, as the operators take them: cu_seqlens."""

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

BENCHED_DOCUMENTS = 8  # documents of a row in a bench of packed documents


def bounds_to_end(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Offsets that end at `tokens`: tokens after the last one become a document of their own.

    Always one document more, perhaps an empty one: whether it is needed is known on the device.
    """
    return torch.cat((cu_seqlens, cu_seqlens.new_full((1,), tokens)))


def document_starts(tokens: int, cu_seqlens: Tensor) -> Tensor:
    """(tokens,) the first token of each one's document, in cu_seqlens' dtype.

    cu_seqlens: (documents + 1,) integers that never fall from 0; tokens after the last one are
    a document of their own. The host does not wait for the device.
    """
    cu_seqlens = cu_seqlens.contiguous()
    return cu_seqlens[torch.searchsorted(cu_seqlens, _index(tokens, cu_seqlens), right=True) - 1]


def positions(tokens: int, cu_seqlens: Tensor) -> Tensor:
    """(tokens,) how many tokens of its own document come before each one; as `document_starts`."""
    return _index(tokens, cu_seqlens) - document_starts(tokens, cu_seqlens)


def shifted_left(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """x, (..., tokens), with each document moved left by one token and a zero at its end; tokens
    after the last document stay. The host does not wait for the device."""
    tokens = x.shape[-1]
    ends = torch.zeros(tokens + 1, dtype=torch.bool, device=x.device)
    ends.index_fill_(0, cu_seqlens[1:].long(), True)
    moved = x.roll(-1, -1).masked_fill(ends[1:], 0)
    return torch.where(_index(tokens, cu_seqlens) < cu_seqlens[-1], moved, x)


def _index(tokens: int, like: Tensor) -> Tensor:
    return torch.arange(tokens, dtype=like.dtype, device=like.device)


def document_bounds(rows: int, seq: int, documents: int) -> list[int]:
    """cu_seqlens of `rows` concatenated rows of `seq` tokens, each cut at random into documents.

    Deterministic for given sizes; some documents may be empty.
    """
    generator = torch.Generator().manual_seed(seq)
    inner = torch.randint(seq + 1, (rows, documents - 1), generator=generator).sort(dim=1).values
    starts = torch.cat([torch.zeros(rows, 1, dtype=torch.int64), inner], dim=1)
    return [*(starts + torch.arange(rows)[:, None] * seq).flatten().tolist(), rows * seq]


def packed_seq_params(bounds: list[int], device: str, **more: Any) -> "PackedSeqParams":
    """Megatron's description of documents with these bounds, as its loop hands them on."""
    from megatron.core.packed_seq_params import PackedSeqParams

    offsets = torch.tensor(bounds, dtype=torch.int32, device=device)
    longest = max(end - start for start, end in itertools.pairwise(bounds))
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=longest,
        max_seqlen_kv=longest, total_tokens=bounds[-1], **more,
    )  # fmt: skip
