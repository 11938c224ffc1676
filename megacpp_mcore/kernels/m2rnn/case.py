"""The m2rnn surface's case: shared q and k as in the model, from a zero state."""

import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor

from megacpp_mcore.kernels.case import BoundBackend, Case, Tensors
from megacpp_mcore.kernels.m2rnn.chunked import m2rnn_chunked
from megacpp_mcore.kernels.m2rnn.reference import m2rnn_sequential
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import m2rnn
from megacpp_mcore.surfaces.workload import Workload

_SEQUENTIAL = 512  # tokens: step by step keeps every state alive; chunked is the same, as tested


@dataclass(frozen=True)
class M2RNNCase(Case):
    """q, k (B, S, 1, K), v (B, S, H, V), W (H, V, V), f (B, S, H) -> y (B, S, H, V), state."""

    batch: int
    seq: int
    heads: int
    k_head_dim: int
    v_head_dim: int
    chunk_size: int
    tanh: str = "approximate"
    grad_clamp: float | None = None

    surface = "m2rnn"
    inputs = ("q", "k", "v", "W", "f")
    fp32_tensors = ("W", "f", "state")

    @classmethod
    def of(cls, recipe: Recipe) -> Self | None:
        workload = m2rnn.of_recipe(recipe, "cpu")
        if workload is None:
            return None
        names = ("heads", "k_head_dim", "v_head_dim", "chunk_size")
        batch, seq = recipe.schedule.micro_batch_size, recipe.model.seq_length
        sizes = (workload.size(name) for name in names)
        return cls(batch, seq, *sizes, recipe.m2rnn.tanh, recipe.m2rnn.grad_clamp)

    @classmethod
    def samples(cls) -> dict[str, Self]:
        return {
            "plain": cls(2, 16, 4, 8, 4, 8),
            "plain-nam56r-dims": cls(1, 64, 2, 64, 16, 32),
            "odd": cls(1, 37, 3, 5, 3, 8),
            "odd-length": cls(2, 75, 3, 64, 16, 32),
            "odd-one-token": cls(2, 1, 2, 3, 4, 8),
            "empty": cls(2, 0, 2, 4, 4, 8),
        }

    def workload(self, device: str, dtype: torch.dtype) -> Workload:
        layout = SimpleNamespace(
            local_heads=self.heads, k_dim=self.k_head_dim, v_dim=self.v_head_dim
        )
        settings = SimpleNamespace(chunk_size=self.chunk_size)
        return m2rnn.workload(device, SimpleNamespace(params_dtype=dtype), layout, settings)

    def make_inputs(self, generator: torch.Generator) -> Tensors:
        normal = functools.partial(self.normal, generator)
        b, s, h, k, v = self.batch, self.seq, self.heads, self.k_head_dim, self.v_head_dim
        return {
            "q": normal(b, s, 1, k),
            "k": normal(b, s, 1, k),
            "v": normal(b, s, h, v),
            "W": torch.eye(v, device=generator.device) + 0.1 * normal(h, v, v),
            "f": normal(b, s, h).sigmoid(),
        }

    def reference(self, **tensors: Tensor) -> Tensors:
        function = m2rnn_sequential if self.seq <= _SEQUENTIAL else m2rnn_chunked
        found = function(**tensors, grad_clamp=self.grad_clamp)
        return dict(zip(("y", "state"), found, strict=True))

    def bind(self, implementation: Any, device: str, dtype: torch.dtype) -> BoundBackend:
        def call(**tensors: Tensor) -> Tensors:
            y, state = implementation(
                **tensors, chunk_size=self.chunk_size, grad_clamp=self.grad_clamp, tanh=self.tanh
            )
            return {"y": y, "state": state}

        return BoundBackend(call)

    def roundings(self, name: str) -> float:
        """The operands of the state's and the output's product, and the result; a gradient passes
        as many again."""
        return 3 if name in ("y", "state") else 6

    def terms(self, name: str) -> int:
        """A step rounds the state a few times, and every later step carries that on."""
        return 8 * self.seq + self.batch * self.heads * self.k_head_dim * self.v_head_dim

    def flops(self) -> int:
        """A step's state times W, k v^T added to it, the mix of the two states, q times it."""
        k, v = self.k_head_dim, self.v_head_dim
        return self.batch * self.seq * self.heads * k * v * (2 * v + 2 + 3 + 2)
