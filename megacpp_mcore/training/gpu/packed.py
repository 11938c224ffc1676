"""The packed documents of a micro batch, worked out on the host, where its sample is read.

Megatron's functions of the same purpose read the offsets back from the GPU, which then waits for
the host in every micro batch. The results are the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

_HOST_GROUPS: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


@dataclass(frozen=True)
class Documents:
    """Documents in the rows of a micro batch, laid end to end.

    offsets: (documents + 1,) int32, from 0. padded: the same with the padding behind each, or None.
    longest: tokens of the longest document. total: where the last one ends, with its padding. work:
    the sums of the documents' lengths and of their squares.
    """

    offsets: Tensor
    padded: Tensor | None
    longest: int
    total: int
    work: tuple[float, float]

    def to(self, device: Any) -> "Documents":
        """Their offsets on a device. On a GPU neither host nor device waits for the copy."""
        sent = [None if x is None else _sent(x, device) for x in (self.offsets, self.padded)]
        return replace(self, offsets=sent[0], padded=sent[1])

    def params(self, tokens_per_sample: int) -> PackedSeqParams:
        """As Megatron's layers take them."""
        bounds = self.offsets if self.padded is None else self.padded
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds, cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=self.padded, cu_seqlens_kv_padded=self.padded,
            max_seqlen_q=self.longest, max_seqlen_kv=self.longest,
            tokens_per_sample=tokens_per_sample,
        )  # fmt: skip
        # Set later: given `total_tokens`, the constructor makes `seq_idx` with a read of the GPU.
        params.total_tokens = self.total
        params.seq_idx = _document_of_each_token(bounds, self.total)
        return params


def documents_of(sample: Mapping[str, Tensor]) -> Documents:
    """Those of a collated sample of Megatron's GPTDataset: rows of cu_seqlens, each filled up with
    copies of the row's length, which are no documents."""
    length = sample["tokens"].shape[1]
    offsets, padded = sample["cu_seqlens"], sample.get("cu_seqlens_padded")
    offsets = _end_to_end(offsets, length)
    padded = None if padded is None else _end_to_end(padded, length)
    last = (offsets if padded is None else padded)[-1]
    return Documents(offsets, padded, int(sample["max_seqlen"].max()), int(last), _work_of(offsets))


def _work_of(offsets: Tensor) -> tuple[float, float]:
    lengths = offsets.diff().double()
    return lengths.sum().item(), lengths.square().sum().item()


def _end_to_end(rows: Tensor, length: int) -> Tensor:
    """(rows, n) offsets in each row -> one row of offsets, with one for the end of a row and the
    beginning of the next."""
    parts = []
    for number, row in enumerate(rows):
        ends = (row == length).nonzero()
        own = row[: ends[0].item() + 1] if len(ends) else row
        parts.append(own[min(number, 1) :] + number * length)
    return torch.cat(parts)


def _document_of_each_token(bounds: Tensor, total: int) -> Tensor:
    """(1, total) int32, as PackedSeqParams makes it: tokens behind the last bound are of one more
    document."""
    tokens = torch.arange(total, device=bounds.device, dtype=bounds.dtype)
    return torch.searchsorted(bounds[1:], tokens, right=True, out_int32=True).unsqueeze(0)


def shared(documents: Documents | None, group: dist.ProcessGroup) -> Documents:
    """Those of the group's first rank, on all of its ranks. documents: None on the others.

    From host to host: how many there are decides the shapes of what is sent to the GPU.
    """
    if group.size() == 1:
        return documents
    first, over = dist.get_process_group_ranks(group)[0], _host_group(group)
    sizes = torch.zeros(4, dtype=torch.int64)
    if documents is not None:
        padded = -1 if documents.padded is None else len(documents.padded)
        sizes = torch.tensor([len(documents.offsets), padded, documents.longest, documents.total])
    dist.broadcast(sizes, first, group=over)
    count, padded, longest, total = sizes.tolist()
    bounds = torch.empty(count + max(padded, 0), dtype=torch.int32)
    if documents is not None:
        parts = [documents.offsets, *([documents.padded] if padded >= 0 else [])]
        torch.cat(parts, out=bounds)
    dist.broadcast(bounds, first, group=over)
    offsets, behind = bounds[:count], bounds[count:] if padded >= 0 else None
    return Documents(offsets, behind, longest, total, _work_of(offsets))


def _host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The same ranks over gloo. Made at the first call, which all of them must make."""
    if dist.get_backend(group) == "gloo":
        return group
    if group not in _HOST_GROUPS:
        ranks = dist.get_process_group_ranks(group)
        _HOST_GROUPS[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _HOST_GROUPS[group]


class Work:
    """What Megatron calls seqlen_stats: of the documents since it last asked, over all ranks."""

    def __init__(self) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64)
        self._counted = False

    def add(self, documents: Documents) -> None:
        self._sums += torch.tensor(documents.work, dtype=torch.float64)
        self._counted = True

    def consumed(self, call: Callable, given: dict[str, Any]) -> tuple[float | None, float | None]:
        """Megatron's consume_seqlen_stats_in_iteration: the sums of every data-parallel rank, from
        host to host; Nones without packed documents."""
        if not self._counted:
            return call()
        found, self._sums, self._counted = self._sums, torch.zeros_like(self._sums), False
        group = parallel_state.get_data_parallel_group()
        if group.size() > 1:
            dist.all_reduce(found, group=_host_group(group))
        total, squares = found.tolist()
        return total, squares


WORK = Work()


def _sent(tensor: Tensor, device: Any) -> Tensor:
    """A copy on the device; from pinned memory, as a copy from other memory waits."""
    pinned = tensor.pin_memory() if torch.cuda.is_available() else tensor
    return pinned.to(device, non_blocking=True)
