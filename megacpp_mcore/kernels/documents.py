"""The packed documents of the cases."""

import torch

BENCHED_DOCUMENTS = 8  # documents of a row in a bench of packed documents


def document_bounds(rows: int, seq: int, documents: int) -> list[int]:
    """cu_seqlens of `rows` concatenated rows of `seq` tokens, each cut at random into documents.

    Deterministic for given sizes; some documents may be empty.
    """
    generator = torch.Generator().manual_seed(seq)
    inner = torch.randint(seq + 1, (rows, documents - 1), generator=generator).sort(dim=1).values
    starts = torch.cat([torch.zeros(rows, 1, dtype=torch.int64), inner], dim=1)
    return [*(starts + torch.arange(rows)[:, None] * seq).flatten().tolist(), rows * seq]
