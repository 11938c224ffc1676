"""Ranks that hand each other the packed documents of a micro batch."""

import itertools

import torch
import torch.distributed as dist

from megacpp_mcore.training.gpu import packed
from megacpp_mcore.training.gpu.packed import documents_of, shared

LENGTH = 16
ROWS = ("tokens", "labels", "loss_mask", "position_ids")


def sample_of(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """A collated sample of rows whose documents have these lengths, as GPTDataset makes it."""
    offsets = torch.full((len(rows), LENGTH + 1), LENGTH, dtype=torch.int32)
    for row, lengths in zip(offsets, rows, strict=True):
        ends = [0, *itertools.accumulate(lengths)]
        row[: len(ends)] = torch.tensor(ends)
    longest = torch.tensor([max(lengths) for lengths in rows], dtype=torch.int32)
    content = {key: torch.zeros(len(rows), LENGTH) for key in ROWS}
    return content | {"cu_seqlens": offsets, "max_seqlen": longest}


def check_shared(rank: int, folder: str) -> None:
    """With and without padding."""
    group = dist.group.WORLD
    for rows in ([[5, LENGTH - 5], [LENGTH]], [[LENGTH]]):
        for padded in (False, True):
            sample = sample_of(rows)
            if padded:
                sample["cu_seqlens_padded"] = sample["cu_seqlens"].clone()
            here = documents_of(sample)
            found = shared(here if rank == 0 else None, group)
            assert (found.longest, found.total) == (here.longest, here.total)
            assert found.offsets.tolist() == here.offsets.tolist()
            assert found.offsets.dtype == here.offsets.dtype == torch.int32
            assert (found.padded is None) == (here.padded is None) == (not padded)
            if padded:
                assert found.padded.tolist() == here.padded.tolist()
    over = packed._host_group(group)
    assert over is group  # gloo already


def check_work(rank: int, folder: str) -> None:
    """Each rank has other documents; both have the sum."""
    packed.parallel_state.get_data_parallel_group = lambda: dist.group.WORLD
    work = packed.Work()
    work.add(documents_of(sample_of([[[LENGTH], [4, LENGTH - 4]][rank]])))
    assert work.consumed(None, {}) == (2.0 * LENGTH, LENGTH**2 + 16.0 + (LENGTH - 4) ** 2)
