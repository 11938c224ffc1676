"""The mamba3_scan surface's case: gated and with the skip, from a zero state."""

import functools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from megacpp_mcore.hybrid.block_settings import Mamba3Settings
from megacpp_mcore.kernels.case import BoundBackend, Case, Tensors
from megacpp_mcore.kernels.mamba3.inputs import Mamba3Inputs, prepare
from megacpp_mcore.kernels.mamba3.reference import mamba3_chunked, mamba3_sequential
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import mamba3_scan
from megacpp_mcore.surfaces.workload import Workload

# How far a random walk may end beyond its usual distance; its steps are half as large as the
# gradient's values.
WALKS = 2.0
_SEQUENTIAL = 512  # tokens: step by step keeps every state alive; chunked is the same, as tested


@dataclass(frozen=True)
class Mamba3ScanCase(Case):
    """The arguments of `mamba3_scan` with angles shared by the heads -> y (B, S, H, P).

    rank: of MIMO; 0 is SISO.
    """

    batch: int
    seq: int
    heads: int
    groups: int
    head_dim: int
    state_dim: int
    angles: int
    rank: int
    chunk_size: int

    surface = "mamba3_scan"
    fp32_tensors = ("adt", "dt", "D", "q_bias", "k_bias", "mimo_v", "mimo_z", "mimo_out")

    @property
    def inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        names = ("q", "k", "v", "adt", "dt", "trap", "angles", "q_bias", "k_bias", "D", "z")
        return (*names, "mimo_v", "mimo_z", "mimo_out") if self.rank else names

    @classmethod
    def of(cls, recipe: Recipe) -> Self | None:
        workload = mamba3_scan.of_recipe(recipe, "cpu")
        if workload is None:
            return None
        names = ("heads", "groups", "head_dim", "state_dim", "angles", "chunk_size")
        sizes = {name: workload.size(name) for name in names}
        rank = workload.size("rank") if workload.size("variant") == "mimo" else 0
        batch, seq = recipe.schedule.micro_batch_size, recipe.model.seq_length
        return cls(batch, seq, rank=rank, **sizes)

    @classmethod
    def samples(cls) -> dict[str, Self]:
        return {
            "plain": cls(2, 32, 4, 2, 8, 8, 2, 0, 8),
            "plain-mimo": cls(1, 16, 2, 1, 8, 8, 2, 2, 8),
            "plain-mimo-tiles": cls(1, 128, 4, 2, 64, 64, 16, 4, 64),
            "plain-whole-tiles": cls(1, 128, 2, 1, 64, 64, 16, 0, 64),
            "plain-mimo-pairs-tiles": cls(1, 128, 4, 2, 64, 64, 16, 2, 64),
            "odd": cls(1, 37, 3, 1, 5, 10, 3, 0, 8),
            "odd-length": cls(2, 75, 2, 2, 32, 32, 4, 0, 64),
            "odd-mimo": cls(1, 21, 4, 4, 3, 8, 4, 3, 8),
            "odd-mimo-length": cls(2, 75, 2, 2, 64, 64, 16, 4, 64),
            "odd-mimo-pairs": cls(2, 43, 4, 2, 32, 32, 8, 2, 64),
            "odd-mimo-one-token": cls(2, 1, 2, 1, 64, 64, 16, 4, 64),
            "odd-one-token": cls(2, 1, 2, 2, 4, 4, 2, 0, 8),
            "empty": cls(2, 0, 2, 1, 4, 4, 1, 0, 8),
        }

    def workload(self, device: str, dtype: torch.dtype) -> Workload:
        layout = SimpleNamespace(
            local_heads=self.heads,
            scan_groups=self.groups,
            head_dim=self.head_dim,
            state_dim=self.state_dim,
            rank=self.rank or 1,
            angles=self.angles,
        )
        variant = "mimo" if self.rank else "siso"
        settings = Mamba3Settings(variant=variant, chunk_size=self.chunk_size)
        return mamba3_scan.workload(device, SimpleNamespace(params_dtype=dtype), layout, settings)

    def make_inputs(self, generator: torch.Generator) -> Tensors:
        normal = functools.partial(self.normal, generator)
        b, s, h, g, n, p = (self.batch, self.seq, self.heads, self.groups, self.state_dim,
                            self.head_dim)  # fmt: skip
        rank = (self.rank,) if self.rank else ()
        dt = functional.softplus(normal(b, s, h) - 1)
        tensors = {
            "q": normal(b, s, *rank, g, n),
            "k": normal(b, s, *rank, g, n),
            "v": normal(b, s, h, p),
            "adt": -functional.softplus(normal(b, s, h)) * dt,
            "dt": dt,
            "trap": normal(b, s, h),
            "angles": normal(b, s, 1, self.angles),
            "q_bias": normal(h, *rank, n),
            "k_bias": normal(h, *rank, n),
            "D": normal(h),
            "z": normal(b, s, h, p),
        }
        if self.rank:
            mimo = {f"mimo_{name}": normal(h, self.rank, p) for name in ("v", "z", "out")}
            tensors |= {name: tensor / self.rank for name, tensor in mimo.items()}
        return tensors

    def reference(self, **tensors: Tensor) -> Tensors:
        return self._scan(prepare(**tensors))

    def rounded_reference(self, **tensors: Tensor) -> Tensors:
        return self._scan(replace(prepare(**tensors), angle_dtype=tensors["v"].dtype))

    def _scan(self, inputs: Mamba3Inputs) -> Tensors:
        if self.seq > _SEQUENTIAL:
            return {"y": mamba3_chunked(inputs, self.chunk_size, None)[0]}
        return {"y": mamba3_sequential(inputs)[0]}

    def bind(self, implementation: Any, device: str, dtype: torch.dtype) -> BoundBackend:
        return BoundBackend(
            lambda **tensors: {"y": implementation(**tensors, chunk_size=self.chunk_size)}
        )

    def roundings(self, name: str) -> float:
        """The operands of three products (scores, state, output) and the result; a gradient
        passes as many again.

        A backend may keep angles, and the gradients of their sums, in the dtype, as mamba-ssm's
        kernels do. An angle of up to 2 pi is off by up to 2 pi half epsilons; a gradient passes
        the rotation twice. The gradient of one token's angle, and through it of its dt, is a sum
        over all later tokens, of terms that cancel (turning all of them together changes nothing)
        and of one rounding each, which do not: a random walk of as many steps.

        D's has no rotation and no scan on its way: the gate's gradient, v (MIMO's), their product
        and the sum's operands.
        """
        if name == "dD":
            return 4
        rotations = 1 if name == "y" else 2
        walk = math.sqrt(self.seq) if name in ("dangles", "ddt") else 0.0
        return 4 * rotations + 2 * math.pi * rotations + walk

    def floors(
        self, truth: Tensors, directions: Tensors, dtype: torch.dtype, **tensors: Tensor
    ) -> dict[str, float | Tensor]:
        return {
            name: random_walk_bound(truth[name], self.seq, dtype)
            for name in ("dangles", "ddt")
            if name in truth
        }

    def summands(
        self, values: Tensors, directions: Tensors, *, v: Tensor, z: Tensor, **tensors: Tensor
    ) -> dict[str, Tensor]:
        """The terms of D, a value a head: dy silu(z) v of every token, rank and value; y is linear
        in D."""
        dy, v, z = (x.unsqueeze(-2) for x in (directions["y"].to(v), v, z))
        if self.rank:
            v, z = v * tensors["mimo_v"], z * tensors["mimo_z"]
            dy = dy * tensors["mimo_out"]
        return {"dD": (dy * functional.silu(z) * v).movedim(2, -1)}

    def terms(self, name: str) -> int:
        """Three sums over the tokens, and over a row of the state or of the heads' dim."""
        rank = self.rank or 1
        return 3 * (self.batch * self.seq + max(self.state_dim, self.head_dim) * rank)

    def flops(self) -> int:
        """A step adds k v^T to a state and reads it with q: two products of N and P a rank."""
        rank = self.rank or 1
        state = self.heads * self.state_dim * self.head_dim
        return 4 * self.batch * self.seq * state * rank


def random_walk_bound(gradient: Tensor, seq: int, dtype: torch.dtype) -> float:
    """The floor of the gradient of tokens' angles or steps, (..., seq, ...).

    What is summed over all later tokens is rounded once a token: to half an epsilon of terms that
    are as large as the sum, as these cancel within the memory of the state. Where the roundings add
    up to depends on the tokens left, and not on how large the gradient is there.
    """
    if not gradient.numel():
        return 0.0
    usual = float(gradient.double().square().mean().sqrt())
    return WALKS * seq**0.5 * torch.finfo(dtype).eps / 2 * usual
