"""The residual surface's case: bias, and addition to the residual stream, without dropout.

Dropout draws other numbers in every backend, so that only its share can be compared.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from megacpp_mcore.kernels.case import BoundBackend, Case, Tensors
from megacpp_mcore.kernels.residual.reference import bias_dropout_add
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces.workload import Workload, stack_part


@dataclass(frozen=True)
class ResidualCase(Case):
    """x and residual (s, b, h), bias (h,) when has_bias -> y (s, b, h)."""

    batch: int
    seq: int
    hidden_size: int
    has_bias: bool

    surface = "residual"
    backward_flops = 0

    @property
    def inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("x", "residual", "bias") if self.has_bias else ("x", "residual")

    @classmethod
    def of(cls, recipe: Recipe) -> Self | None:
        model = recipe.model
        batch, seq = recipe.schedule.micro_batch_size, model.seq_length
        return cls(batch, seq, model.hidden_size, model.add_bias_linear)

    @classmethod
    def samples(cls) -> dict[str, Self]:
        return {
            "plain": cls(2, 16, 64, True),
            "odd": cls(3, 7, 72, False),
            "odd-one-token": cls(1, 1, 5, True),
            "empty": cls(2, 0, 64, True),
        }

    def workload(self, device: str, dtype: torch.dtype) -> Workload:
        return stack_part(device)

    def make_inputs(self, generator: torch.Generator) -> Tensors:
        shape = (self.seq, self.batch, self.hidden_size)
        shapes = {"x": shape, "residual": shape, "bias": shape[-1:]}
        return {name: self.normal(generator, *shapes[name]) for name in self.inputs}

    def reference(self, x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensors:
        return {"y": bias_dropout_add(x, bias, residual, dropout=0.0, training=True)}

    def bind(self, implementation: Any, device: str, dtype: torch.dtype) -> BoundBackend:
        add = implementation()(training=True, fused=True)
        return BoundBackend(
            lambda x, residual, bias=None: {"y": add((x, bias), residual, 0.0)},
        )

    def roundings(self, name: str) -> float:
        """Two sums; the gradients of x and residual are the output's."""
        return 2

    def terms(self, name: str) -> int:
        return self.seq * self.batch if name == "dbias" else 2

    def sums(
        self, directions: Tensors, x: Tensor, residual: Tensor, bias: Tensor | None = None
    ) -> dict[str, float]:
        """x + bias is rounded before the residual, which may cancel it, is added."""
        terms = x.abs() + residual.abs() + (0 if bias is None else bias.abs())
        return {"y": float(terms.amax()) if terms.numel() else 0.0}

    def flops(self) -> int:
        return (1 + self.has_bias) * self.seq * self.batch * self.hidden_size
