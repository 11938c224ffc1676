"""Which folders to hold out: those whose share of the bytes is nearest to the one asked for."""

from collections.abc import Sequence

PARTS = 1 << 14  # sums that differ by less than this part of the whole count as one


def nearest(sizes: Sequence[int], share: float) -> list[int]:
    """Indices of some of `sizes`, neither none nor all, whose sum is nearest to share * sum(sizes).

    Sums are added up in the order of `sizes`, the first of those that count as one stays, and the
    search ends with one that counts as the sum asked for: another order gives another choice.
    sizes: at least two, all positive. share: between 0 and 1.
    """
    total = sum(sizes)
    wanted = share * total
    found: dict[int, tuple] = {0: (0, 0, None)}  # part of the whole -> sum, how many, which
    best, distance = None, float("inf")
    for index, size in enumerate(sizes):
        for before, count, chain in list(found.values()):
            made = (before + size, count + 1, (index, chain))
            off = abs(made[0] - wanted)
            if off < distance and made[1] < len(sizes):
                best, distance = made, off
            if made[0] < wanted:  # else more would lead away
                found.setdefault(made[0] * PARTS // total, made)
        if distance * PARTS <= total / 2:
            break
    return _listed(best[2])


def _listed(chain: tuple | None) -> list[int]:
    found = []
    while chain is not None:
        index, chain = chain
        found.append(index)
    return found[::-1]
