"""The mamba3_prep surface's case: columns of an M block's projection."""

import functools
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from megacpp_mcore.kernels.case import BoundBackend, Tensors
from megacpp_mcore.kernels.mamba3_prep.reference import mamba3_prep
from megacpp_mcore.kernels.prep_case import PrepCase
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import mamba3_scan


@dataclass(frozen=True)
class Mamba3PrepCase(PrepCase):
    """B, C (b, s, G R N), dt, A (b, s, H) -> q, k (b, s, [R,] G, N), adt, dt (b, s, H).

    spread: the scan is given the group of each head, as where the groups do not divide over
    tensor-parallel ranks.
    """

    batch: int
    seq: int
    heads: int
    groups: int
    state_dim: int
    variant: str = "siso"
    rank: int = 1
    decay: str = "softplus"
    decay_floor: float = 1e-4
    spread: bool = False
    eps: float = 1e-5

    surface = "mamba3_prep"
    inputs = ("B", "C", "dt", "A", "dt_bias", "B_weight", "C_weight")
    fp32_tensors = ("dt_bias", "q", "k", "adt", "step")

    @classmethod
    def of(cls, recipe: Recipe) -> Self | None:
        workload = mamba3_scan.of_recipe(recipe, "cpu")
        if workload is None:
            return None
        settings = recipe.mamba3
        return cls(
            recipe.schedule.micro_batch_size, recipe.model.seq_length, workload.size("heads"),
            workload.size("groups"), workload.size("state_dim"), settings.variant,
            workload.size("rank"), settings.decay, settings.decay_floor,
        )  # fmt: skip

    @classmethod
    def samples(cls) -> dict[str, Self]:
        return {  # few: each is compiled anew
            "plain": cls(2, 16, 4, 2, 16),
            "odd": cls(3, 7, 5, 1, 10, decay_floor=0.6),
            "odd-mimo": cls(1, 13, 6, 3, 6, "mimo", 2, "rational", 0.6, spread=True),
            # Not of a few values: their gradients cancel, and all that is left is rounding.
            "odd-one-token": cls(1, 1, 6, 1, 16),
            "empty": cls(2, 0, 4, 2, 16),
        }

    def make_inputs(self, generator: torch.Generator) -> Tensors:
        normal = functools.partial(self.normal, generator)
        columns = (self.batch, self.seq, self.groups * self.rank * self.state_dim)
        heads = (self.batch, self.seq, self.heads)
        return {
            "B": normal(*columns),
            "C": normal(*columns),
            "dt": normal(*heads),
            "A": normal(*heads),
            "dt_bias": normal(self.heads),
            "B_weight": 1 + normal(self.state_dim) / 4,
            "C_weight": 1 + normal(self.state_dim) / 4,
        }

    def reference(self, **tensors: Tensor) -> Tensors:
        return self._call(mamba3_prep, **tensors)

    def bind(self, implementation: Any, device: str, dtype: torch.dtype) -> BoundBackend:
        return BoundBackend(lambda **tensors: self._call(implementation, **tensors))

    def _call(self, function: Any, **tensors: Tensor) -> Tensors:
        groups = None
        if self.spread:
            per_group = self.heads // self.groups
            groups = torch.arange(self.heads, device=tensors["B"].device) // per_group
        found = function(
            **tensors, head_groups=groups, variant=self.variant, rank=self.rank, decay=self.decay,
            decay_floor=self.decay_floor, eps=self.eps,
        )  # fmt: skip
        return {"q": found.q, "k": found.k, "adt": found.adt, "step": found.dt}

    def roundings(self, name: str) -> float:
        """None to an output, in float32 throughout; a gradient is rounded to its input's dtype."""
        return 1 if name.startswith("d") else 0

    def terms(self, name: str) -> int:
        """Sums over the state dim in the norm, of a head's tokens in the biases' gradients, of all
        heads' in the weights', and a dozen float32 operations to any value."""
        tokens = self.batch * self.seq
        sums = {"ddt_bias": tokens, "dB_weight": tokens * self.heads * self.rank}
        sums["dC_weight"] = sums["dB_weight"]
        return sums.get(name, 2 * self.state_dim + self.heads) + 12

    def flops(self) -> int:
        """Square, sum, scale and weight of q and k; softplus twice and a product for each head."""
        tokens = self.batch * self.seq
        return tokens * (8 * self.groups * self.rank * self.state_dim + 12 * self.heads)
