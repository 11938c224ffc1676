"""A run's gradients and weights in one number each, step by step, and where two runs first differ.
`digest_rank.py` writes them."""

import json
from pathlib import Path

import torch
from torch import Tensor

_BITS = {2: torch.int16, 4: torch.int32}
_AT_ONCE = 2**24


def digest(x: Tensor) -> Tensor:
    """An int64 that any bit of x changes: a sum modulo 2^64, so the same in whatever order."""
    bits = x.detach().reshape(-1).view(_BITS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for first in range(0, len(bits), _AT_ONCE):
        part = bits[first : first + _AT_ONCE].long()
        total += (part * (2 * (first + torch.arange(len(part), device=x.device)) + 1)).sum()
    return total


def of(tensors: dict[str, Tensor]) -> dict[str, int]:
    found = torch.stack([digest(x) for x in tensors.values()]).tolist()
    return dict(zip(tensors, found, strict=True))


def first_difference(one: list[dict], other: list[dict]) -> str | None:
    """The first step in which they differ, and the tensors that do, the last of the model first, as
    the backward pass goes. Gradients come before the weights that are made of them; where the
    forward pass differs, all of them do."""
    for a, b in zip(one, other, strict=True):
        for kind in ("gradients", "weights"):
            wrong = [name for name in reversed(a[kind]) if a[kind][name] != b[kind][name]]
            if wrong:
                more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
                which = f"{kind} ({len(wrong)} of {len(a[kind])})"
                return f"step {a['step']}: {which} {', '.join(wrong[:8])}{more}"
    return None


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
