"""How far a variant's values are from the baseline's, against what rounding does to the baseline.

A layer or a model has no definition in a wide dtype that could be run at its size. What its
roundings do is measured instead: the baseline is run again with inputs of which a quarter of the
values is the next to it, up or down, so that everything after them is rounded anew. In every region
of every tensor a variant may differ from the baseline as those runs do, by the rule of
`kernels.regions`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from megacpp_mcore.kernels import regions
from megacpp_mcore.kernels.regions import Distance


class Likeness:
    """expected: the baseline's values, by name. allowed: of a region's rms, for roundings that the
    baseline has not."""

    def __init__(self, expected: Mapping[str, Tensor], allowed: float) -> None:
        self.expected, self.allowed = expected, allowed
        self._draws: dict[str, list[regions.Draw]] = {name: [] for name in expected}

    def draw(self, values: Mapping[str, Tensor]) -> None:
        """Add values of the baseline, run again on inputs that are `regions.jittered`."""
        for name, expected in self.expected.items():
            self._draws[name].append(regions.Draw.of(values[name], expected.float()))

    def worst(self, found: Mapping[str, Tensor]) -> tuple[str, Distance]:
        """The tensor, and the region of it, that is furthest beyond, or nearest to, its bound."""
        distances = {name: self._distance(name, found.get(name)) for name in self.expected}
        name = max(distances, key=lambda name: distances[name].share)
        return name, distances[name]

    def _distance(self, name: str, found: Tensor | None) -> Distance:
        expected = self.expected[name]
        if found is None or found.shape != expected.shape or not found.isfinite().all():
            return Distance(torch.inf, self.allowed, "a tensor that is not there, or not finite")
        if not expected.numel() or not expected.any():
            return Distance(float(found.abs().sum()), self.allowed, "a tensor of zeros")
        rounding = regions.Rounding(self._draws[name])
        return regions.worst(found, expected.float(), rounding, self.allowed)
