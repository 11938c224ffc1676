"""Results of one kernel that has each kind of operation which `interpreter` computes its own way.

Run as a program it has Triton's own interpreter, and prints their bits as hexadecimal digits.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _later(at, x, at_other, y):
    """The larger one and its place; the first of equal ones."""
    take = (y > x) | ((y == x) & (at_other < at))
    return tl.where(take, at_other, at), tl.where(take, y, x)


@triton.jit
def _step(decay, x, decay_next, y):
    return decay * decay_next, x * decay_next + y


@triton.jit
def _sample(x_ptr, wide_ptr, narrow_ptr, places_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    at = rows[:, None] * N + columns[None, :]
    x = tl.load(x_ptr + at)
    low = x.to(tl.bfloat16)
    back = low.to(tl.float32)
    scale = tl.sum(x, axis=1)[:, None] + tl.max(back, axis=0)[None, :]
    places, _ = tl.reduce((tl.broadcast_to(rows[:, None], (M, N)), back), 0, _later)
    decays, sums = tl.associative_scan((tl.sigmoid(x), back), 1, _step)
    total = tl.sum(x) + tl.sum(tl.where(back > 0, 1, 0)) * 0.5
    chained = tl.dot(tl.dot(back, tl.trans(back)), back)
    tl.store(wide_ptr + at, scale * (columns[None, :] % 7) + total)
    tl.store(wide_ptr + M * N + at, decays)
    tl.store(wide_ptr + 2 * M * N + at, sums)
    tl.store(wide_ptr + 3 * M * N + at, tl.cumsum(x, axis=0) + chained)
    tl.store(narrow_ptr + at, (back * 3 + sums).to(tl.bfloat16))
    tl.store(places_ptr + columns, places + tl.min(rows) - N)


def sample(seed: int = 0) -> bytes:
    """The bits of everything that the kernel stores."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 16, generator=generator)
    x[3] = x[4]
    wide, narrow = torch.empty(4, 32, 16), torch.empty(32, 16, dtype=torch.bfloat16)
    places = torch.empty(16, dtype=torch.int32)
    _sample[(1,)](x, wide, narrow, places, 32, 16)
    assert wide.isfinite().all()
    return b"".join(t.view(torch.uint8).numpy().tobytes() for t in (wide, narrow, places))


if __name__ == "__main__":
    print(sample().hex())
