"""The mamba3_core surface's case: the output of an M block's input projection."""

import functools
import itertools
import math
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from megacpp_mcore.hybrid.block_settings import Mamba3Settings
from megacpp_mcore.hybrid.row_padding import row_padding
from megacpp_mcore.kernels.case import OperatorCase, Tensors
from megacpp_mcore.kernels.mamba3.case import WALKS, random_walk_bound
from megacpp_mcore.kernels.mamba3_core.reference import mamba3_core
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import mamba3_core as surface
from megacpp_mcore.surfaces.workload import Workload


@dataclass(frozen=True)
class Mamba3CoreCase(OperatorCase):
    """projected (s, b, rows) -> y (s, b, H P), SISO.

    The columns are padded as the layer's are.
    """

    batch: int
    seq: int
    heads: int
    groups: int
    head_dim: int
    state_dim: int
    angles: int
    chunk_size: int = 64
    decay: str = "softplus"
    decay_floor: float = 1e-4
    eps: float = 1e-5

    surface = "mamba3_core"
    definition = staticmethod(mamba3_core)
    inputs = ("projected", "dt_bias", "B_weight", "C_weight", "B_bias", "C_bias", "D")
    fp32_tensors = inputs[1:]
    links = MappingProxyType({"ddt_bias": "dprojected"})

    @classmethod
    def of(cls, recipe: Recipe) -> Self | None:
        workload = surface.of_recipe(recipe, "cpu")
        if workload is None:
            return None
        names = ("heads", "groups", "head_dim", "state_dim", "angles", "chunk_size")
        return cls(
            recipe.schedule.micro_batch_size, recipe.model.seq_length,
            *(workload.size(name) for name in names), recipe.mamba3.decay,
            recipe.mamba3.decay_floor,
        )  # fmt: skip

    @classmethod
    def samples(cls) -> dict[str, Self]:
        return {
            "plain": cls(2, 24, 4, 2, 8, 8, 2),
            "plain-whole-tiles": cls(1, 128, 8, 2, 64, 64, 16),
            "odd": cls(1, 37, 3, 1, 5, 10, 3, 64, "rational", 0.6),
            "odd-length": cls(2, 75, 8, 2, 32, 32, 8, 64, "rational", 0.6),
            "odd-wide": cls(1, 70, 8, 4, 64, 128, 32),
            "odd-one-token": cls(2, 1, 8, 2, 32, 32, 8),
            "empty": cls(2, 0, 8, 1, 32, 32, 8),
        }

    @property
    def parts(self) -> tuple[int, ...]:
        inner, group, heads = self.heads * self.head_dim, self.groups * self.state_dim, self.heads
        return (inner, inner, group, group, heads, heads, heads, self.angles)

    def workload(self, device: str, dtype: torch.dtype) -> Workload:
        layout = SimpleNamespace(
            tp=1, local_heads=self.heads, scan_groups=self.groups, head_dim=self.head_dim,
            state_dim=self.state_dim, rank=1, angles=self.angles,
        )  # fmt: skip
        settings = Mamba3Settings(chunk_size=self.chunk_size)
        return surface.workload(device, SimpleNamespace(params_dtype=dtype), layout, settings, {})

    def make_inputs(self, generator: torch.Generator) -> Tensors:
        normal = functools.partial(self.normal, generator)
        heads, dim = self.heads, self.state_dim
        return {
            "projected": normal(self.seq, self.batch, sum(self.parts) + row_padding(self.parts)),
            "dt_bias": normal(heads) - 1,
            "B_weight": 1 + normal(dim) / 4,
            "C_weight": 1 + normal(dim) / 4,
            "B_bias": normal(heads, dim),
            "C_bias": normal(heads, dim),
            "D": normal(heads),
        }

    def call(self, operator: Any, **tensors: Tensor) -> Tensors:
        sizes = (
            "heads", "head_dim", "groups", "state_dim", "angles", "decay", "decay_floor", "eps"
        )  # fmt: skip
        return {"y": operator(**tensors, **{name: getattr(self, name) for name in sizes})}

    def roundings(self, name: str) -> float:
        """The scan's roundings, three products' operands and the result, a gradient as many
        again, and the gradient of one token's angle or step, a sum over all later tokens of terms
        that cancel and of one rounding each, which do not. Here all are in one tensor, and q and k
        are rounded before the scan.

        D's are the scan's case's."""
        if name == "dD":
            return 4
        walk = math.sqrt(self.seq) if name in ("dprojected", "ddt_bias") else 0.0
        return (5 if name == "y" else 10) + 2 * math.pi * (1 if name == "y" else 2) + walk

    def summands(
        self, values: Tensors, directions: Tensors, *, projected: Tensor, **tensors: Tensor
    ) -> dict[str, Tensor]:
        """The terms of dt's bias, a value a head, are its tokens' logits' gradients; those of D,
        as in the scan's case, dy silu(z) x."""
        ends = [0, *itertools.accumulate(self.parts)]
        z, x = (projected[..., ends[i] : ends[i + 1]] for i in (0, 1))
        terms = (directions["y"].to(x) * functional.silu(z) * x).unflatten(-1, (self.heads, -1))
        return {
            "ddt_bias": values["dprojected"][..., ends[4] : ends[5]],
            "dD": terms.movedim(-2, -1),
        }

    def floors(
        self, truth: Tensors, directions: Tensors, dtype: torch.dtype, **tensors: Tensor
    ) -> dict[str, float | Tensor]:
        """Floors of dt and the angles, as in the scan's case, and of dt's bias: the rounding of a
        token's angle is in the gradients of all earlier steps, times those steps' angles, of either
        sign: t of these come to the root of t. All tokens' roundings, half an epsilon of terms as
        large as a step's gradient, so come to the root of the sum of t, S / sqrt(2): sqrt(S / 2)
        times what as many steps' gradients spread."""
        gradient = truth["dprojected"]
        walk = WALKS * (self.seq / 2) ** 0.5 * torch.finfo(dtype).eps / 2
        floor, ends = gradient.new_zeros(gradient.shape[-1]), [*itertools.accumulate(self.parts)]
        for part in (4, 7):
            columns = slice(ends[part - 1], ends[part])
            floor[columns] = random_walk_bound(gradient[..., columns], self.seq, dtype)
        return {
            "dprojected": floor,
            "ddt_bias": walk * gradient[..., ends[3] : ends[4]].square().sum((0, 1)).sqrt(),
        }

    def terms(self, name: str) -> int:
        """Sums over the tokens, over a row of the state or of the heads' dim, and over the heads in
        the gradients of B, C, the angles and the norms' weights."""
        wide = max(self.state_dim, self.head_dim)
        return 3 * (self.batch * self.seq + wide) + self.heads * wide + 64

    def flops(self) -> int:
        """Those of the scan: two products of N and P a head and token."""
        return 4 * self.batch * self.seq * self.heads * self.state_dim * self.head_dim
