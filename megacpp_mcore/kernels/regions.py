"""A tensor's distance from the truth, region by region, against what rounding does.

The largest value of a tensor says little of the rest: of a causal attention's gradients most rows
are so small compared with the first that they may be zero. So a tensor is cut along each axis, and
along each pair of axes into tiles, and in every region

    rms(error) <= factor * rms(rounding) + allowed * rms(truth) + floor

`rounding` is the error of the definition itself, computed in the model's dtype instead of the wide
one: measured in that region, in several computations whose inputs differ by single roundings, so
that no lucky one counts (`number_of_draws`). Where a region's own is less than the tensor's median
(in units of the truth) the median counts. `allowed` and `floor` are for roundings that a backend
has and the definition has not: the first as large as the truth, the second as large everywhere.

A factor common to a region is found long before its rms is too large, since roundings are as often
up as down: `scale` is (error . truth) / (truth . truth), and its bound that of the draws, an
epsilon, of the bound above what independent roundings of so many values leave over, and half of
the floor, whose roundings may be the same for neighbours. Float32's roundings may have all a factor
in common, as those of a recurrence do: the bound above refuses any factor that matters there.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DRAWS = 3
# Of few values a region's error may be that of one number, a head's scale: one in seven of a normal
# distribution is beyond twice the rms of three draws, one in 2,000 beyond twice the largest of 16.
DRAWS_OF_FEW, _FEW = 16, 2**12
# A backend rounds in other places and orders than the definition. Where its rounding is coarse, no
# more than twice may be allowed, or 1.05 times a gradient passes; float32's is far finer than that.
FACTOR, FACTOR_OF_FINE, _FINE = 2.0, 8.0, 1e-4
_LEAST = 64  # values in a region: fewer may all be lucky
_PARTS = {1: 128, 2: 128, 3: 128}  # of an axis, by the tensor's axes; else
_OTHERWISE = 32


@dataclass(frozen=True)
class Draw:
    """A computation with other roundings, on a tensor's grid: squared error, error times truth."""

    squared: Tensor
    product: Tensor

    @classmethod
    def of(cls, values: Tensor, truth: Tensor) -> "Draw":
        truth = _with_an_axis(truth)
        error = _with_an_axis(values).to(truth.dtype) - truth
        return cls(grid(error.square()), grid(error * truth))


@dataclass(frozen=True)
class Rounding:
    """What rounding does to the definition."""

    draws: Sequence[Draw]

    @property
    def squared(self) -> Tensor:
        """The draws' squared errors on the grid: of DRAWS their mean, of more the largest."""
        squared = torch.stack([draw.squared for draw in self.draws])
        return squared.amax(0) if len(squared) > DRAWS else squared.mean(0)


@dataclass(frozen=True)
class Distance:
    """The worst region. error, bound: in units of the truth's size there. where: in words."""

    error: float
    bound: float
    where: str

    @property
    def share(self) -> float:
        if self.bound:
            return self.error / self.bound
        return math.inf if self.error else 0.0


def number_of_draws(values: int) -> int:
    """How many computations show the rounding of a case whose inputs have so many values."""
    return DRAWS_OF_FEW if values <= _FEW else DRAWS


def grid(values: Tensor) -> Tensor:
    """Sums of `values` over the finest cells, float64 on the CPU."""
    most = _PARTS.get(values.dim(), _OTHERWISE)
    return _pooled(values, [min(n, most) for n in values.shape]).double().cpu()


def jittered(x: Tensor, seed: int) -> Tensor:
    """One value in four is the next to it in x's dtype, up or down."""
    generator = torch.Generator(x.device).manual_seed(seed)
    drawn = torch.rand(x.shape, generator=generator, device=x.device)
    towards = torch.where(drawn < 0.125, -math.inf, math.inf).to(x.dtype)
    return torch.where(drawn < 0.25, torch.nextafter(x, towards), x)


def worst(
    actual: Tensor, truth: Tensor, rounding: Rounding, allowed: float, floor: float | Tensor = 0.0
) -> Distance:
    """The region in which `actual` is furthest beyond, or nearest to, its bound.

    allowed: of the truth's rms, for roundings that the definition does not have. floor: of an
    error's rms, likewise; a tensor that broadcasts to the truth, where it is not one for all.
    """
    truth = _with_an_axis(truth)
    error = _with_an_axis(actual).to(truth.dtype) - truth
    allowance = torch.as_tensor(floor, device=truth.device).square().expand(truth.shape)
    sums = (
        grid(error.square()), grid(truth.square()), rounding.squared, grid(allowance),
        grid(error * truth), *(draw.product for draw in rounding.draws),
    )  # fmt: skip
    eps, wide_eps = torch.finfo(actual.dtype).eps, torch.finfo(truth.dtype).eps
    cells = _Cells(torch.stack(sums), truth.shape, allowed, eps, wide_eps)
    found = [d for parts in _views(truth.shape) for d in cells.distances(parts)]
    return max(found, key=lambda region: region.distance.share).in_words(truth.shape)


@dataclass(frozen=True)
class _Region:
    """A distance without its words; `at` is the region's place in a view of so many parts."""

    distance: Distance
    kind: str
    at: int
    parts: Sequence[int]

    def in_words(self, shape: torch.Size) -> Distance:
        index = torch.unravel_index(torch.tensor(self.at), tuple(self.parts))
        spans = [
            f"{-(-int(i) * n // p)}:{-(-(int(i) + 1) * n // p)}" if p > 1 else ":"
            for i, n, p in zip(index, shape, self.parts, strict=True)
        ]
        where = f"{self.kind}[{', '.join(spans)}]"
        return Distance(self.distance.error, self.distance.bound, where)


@dataclass(frozen=True)
class _Cells:
    """Sums over the finest cells, and what they are judged by.

    sums: of the squares of the error, the truth, its rounding and the floor, then of the products
    with the truth of the error and of each draw's. One tensor, as each view pools all of them.
    """

    sums: Tensor
    shape: torch.Size
    allowed: float
    eps: float
    wide_eps: float

    def distances(self, parts: Sequence[int]) -> Iterator[_Region]:
        """The worst region of a view by its rms, and by its scale."""
        pooled = _pooled(self.sums, [len(self.sums), *parts]).flatten(1)
        squared_noise = pooled[2].sum()
        error, truth, noise, floor = pooled[:4].sqrt()
        # What cancels to the wide dtype's own rounding has no size: the usual region's counts.
        usual_size = truth.square().mean().sqrt()
        vanishes = truth <= 1000 * self.wide_eps * usual_size
        size = torch.where(vanishes, usual_size, truth)
        usual = torch.where(vanishes, squared_noise.sqrt() / len(noise) ** 0.5, noise)
        relative = usual / size
        relative = torch.maximum(relative, relative.median())
        factor = torch.where(relative < _FINE, FACTOR_OF_FINE, FACTOR)
        values = math.prod(self.shape) / math.prod(parts)
        independent = factor * relative + self.allowed
        of_floor = floor / size
        yield self._worst(error / size, independent + of_floor, parts, "")
        product, *scales = pooled[4:].abs() / size.square()
        chance = torch.stack(scales)
        chance = torch.maximum(chance.amax(0), chance.median())
        share = max(1 / 8, min(1.0, 4 / values**0.5))
        left = torch.where(independent < _FINE, 1.0, share) * independent
        bound = factor * chance + left + of_floor / 2 + self.eps
        yield self._worst(product, bound, parts, "scale ")

    def _worst(self, found: Tensor, bound: Tensor, parts: Sequence[int], kind: str) -> _Region:
        at = int((found / bound).nan_to_num(nan=math.inf).argmax())
        return _Region(Distance(found[at].item(), bound[at].item(), ""), kind, at, parts)


def _views(shape: torch.Size) -> Iterator[list[int]]:
    """Parts along each axis: the whole, slabs of one axis, tiles of two."""
    most = _PARTS.get(len(shape), _OTHERWISE)
    limit = math.prod(shape) // _LEAST
    one = [1] * len(shape)
    yield one
    slabs, tiles = (itertools.combinations(range(len(shape)), number) for number in (1, 2))
    for axes in (*slabs, *tiles):
        parts = {axis: min(shape[axis], most) for axis in axes}
        while math.prod(parts.values()) > limit and max(parts.values()) > 1:
            widest = max(parts, key=parts.__getitem__)
            parts[widest] = (parts[widest] + 1) // 2
        if all(number > 1 for number in parts.values()):
            yield [parts.get(axis, 1) for axis in range(len(shape))]


def _with_an_axis(x: Tensor) -> Tensor:
    return x.reshape(1) if not x.dim() else x


def _pooled(x: Tensor, parts: Sequence[int]) -> Tensor:
    """Sums over parts of each axis, as equal as its length allows."""
    for axis, number in enumerate(parts):
        length = x.shape[axis]
        if number == length:
            continue
        if number == 1:
            x = x.sum(axis, keepdim=True)
            continue
        if length % number == 0:
            x = x.unflatten(axis, (number, length // number)).sum(axis + 1)
            continue
        part = torch.arange(length, device=x.device) * number // length
        x = x.new_zeros([*x.shape[:axis], number, *x.shape[axis + 1 :]]).index_add(axis, part, x)
    return x
