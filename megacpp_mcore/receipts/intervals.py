"""How long B takes in units of A, with an interval that holds with 99 % at least.

Samples in the order taken fall into 8 blocks of neighbours; a block counts as its median. So what
goes on for a while (clocks, a busy neighbour) widens an interval instead of narrowing it.

`ratio_in_turns`, where both were taken alternating, once a round each: a round gives one ratio, of
two calls that followed each other, and what slows both down for a while is not in it. From the
lowest to the highest of the 8 blocks' medians is a 99.2 % interval of the median (1 - 2^-7: it is
missed when all 8 lie on one side), for any shape of the noise. Blocks, for a round's ratio may
be like the one before it: where 0.4 of a side's own noise stays from round to round, the interval
of 40 rounds holds 98.8 %, and one of all 40 ratios would hold 91 % (400 simulations).

`time_ratio`, where they were taken apart: the Hodges-Lehmann estimate, the median of the ratios of
each block of B to each block of A. Its interval is a pair of order statistics of those ratios,
chosen from the exact Mann-Whitney distribution (Hollander, Wolfe, Chicken, Nonparametric
Statistical Methods, 4.2 and 4.3). 5 samples a side are enough.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BLOCKS = 8


@dataclass(frozen=True)
class Effect:
    """A ratio or a difference with its interval; `low` and `high` are None without enough data."""

    value: float
    low: float | None
    high: float | None


def time_ratio(a: Sequence[float], b: Sequence[float]) -> Effect:
    """The ratio of positive times that were taken apart."""
    blocks_a, blocks_b = block_medians(a), block_medians(b)
    ratios = sorted(after / before for before in blocks_a for after in blocks_b)
    rank = _mann_whitney_rank(len(blocks_a), len(blocks_b))
    if rank == 0:
        return Effect(statistics.median(ratios), None, None)
    return Effect(statistics.median(ratios), ratios[rank - 1], ratios[-rank])


def ratio_in_turns(a: Mapping[int, float], b: Mapping[int, float]) -> Effect | None:
    """The ratio of positive times that were taken alternating, by round.

    None for fewer than BLOCKS rounds in common.
    """
    ratios = [b[turn] / a[turn] for turn in sorted(a.keys() & b.keys())]
    if len(ratios) < BLOCKS:
        return None
    blocks = block_medians(ratios)
    return Effect(statistics.median(blocks), min(blocks), max(blocks))


def block_medians(values: Sequence[float]) -> list[float]:
    """The medians of BLOCKS runs of neighbours; fewer values than that are their own blocks."""
    blocks = min(BLOCKS, len(values))
    edges = [len(values) * block // blocks for block in range(blocks + 1)]
    return [statistics.median(values[start:end]) for start, end in itertools.pairwise(edges)]


@functools.cache
def _mann_whitney_rank(m: int, n: int) -> int:
    """The largest k with P(U < k) <= 0.5 %, U the Mann-Whitney statistic of m and n samples."""
    size = m * n + 1
    # coefficients of the Gaussian binomial: in how many of the C(m + n, m) orders U takes a value
    counts = [1] + [0] * (size - 1)
    for i in range(1, m + 1):
        for u in range(size - 1, n + i - 1, -1):
            counts[u] -= counts[u - n - i]
        for u in range(i, size):
            counts[u] += counts[u - i]
    rank, below = 0, counts[0]
    while below <= 0.005 * math.comb(m + n, m):
        rank += 1
        below += counts[rank]
    return rank
