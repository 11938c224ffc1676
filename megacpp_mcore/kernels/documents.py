"""Packed documents as the cases have them."""

import torch

BENCHED_DOCUMENTS = 8  # in a row, of a recipe that packs them


def document_bounds(rows: int, seq: int, documents: int) -> list[int]:
    """cu_seqlens of rows of seq tokens one behind the other, each cut at random into documents.

    The same for the same sizes; some documents may be empty.
    """
    generator = torch.Generator().manual_seed(seq)
    inner = torch.randint(seq + 1, (rows, documents - 1), generator=generator).sort(dim=1).values
    starts = torch.cat([torch.zeros(rows, 1, dtype=torch.int64), inner], dim=1)
    return [*(starts + torch.arange(rows)[:, None] * seq).flatten().tolist(), rows * seq]
