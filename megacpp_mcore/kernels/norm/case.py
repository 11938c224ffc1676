"""The norm surface's case: RMSNorm of the residual stream, which goes on as it is."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from megacpp_mcore.kernels.case import BoundBackend, Case, Tensors, transformer_config
from megacpp_mcore.kernels.norm.reference import rms_norm
from megacpp_mcore.layers.norm import build
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import norm
from megacpp_mcore.surfaces.workload import Workload


@dataclass(frozen=True)
class NormCase(Case):
    """x (s, b, h), weight (h,) -> y (s, b, h), and x as the residual: a block's input, whose
    gradient is the norm's and the residual's."""

    batch: int
    seq: int
    hidden_size: int
    eps: float = 1e-5

    surface = "norm"
    inputs = ("x", "weight")

    @classmethod
    def of(cls, recipe: Recipe) -> Self | None:
        model = recipe.model
        if model.normalization != "RMSNorm":
            return None
        return cls(
            recipe.schedule.micro_batch_size,
            model.seq_length,
            model.hidden_size,
            model.layernorm_epsilon,
        )

    @classmethod
    def samples(cls) -> dict[str, Self]:
        return {
            "plain": cls(2, 16, 64),
            "odd": cls(3, 7, 72),
            "odd-one-token": cls(1, 1, 40),
            "empty": cls(2, 0, 64),
        }

    def workload(self, device: str, dtype: torch.dtype) -> Workload:
        return norm.workload(device, self._config(device, dtype))

    def make_inputs(self, generator: torch.Generator) -> Tensors:
        x = self.normal(generator, self.seq, self.batch, self.hidden_size)
        return {"x": x, "weight": 1 + self.normal(generator, self.hidden_size) / 4}

    def reference(self, x: Tensor, weight: Tensor) -> Tensors:
        return {"y": rms_norm(x, weight, self.eps), "residual": x.view_as(x)}

    def bind(self, implementation: Any, device: str, dtype: torch.dtype) -> BoundBackend:
        config = self._config(device, dtype)
        module = build(implementation, config, self.hidden_size, self.eps, has_residual=True)
        module = module.to(device, dtype)

        def call(x: Tensor, weight: Tensor) -> Tensors:
            found = module(x)
            y, residual = found if isinstance(found, tuple) else (found, x.view_as(x))
            return {"y": y, "residual": residual}

        return BoundBackend(call, {"weight": [module.weight]})

    def _config(self, device: str, dtype: torch.dtype) -> Any:
        sizes = {"hidden_size": self.hidden_size, "num_attention_heads": 1}
        return transformer_config(device, dtype, normalization="RMSNorm", **sizes)

    def roundings(self, name: str) -> float:
        """The normalised x, its product with the weight and y; and on the way back the gradient
        of the normalised x, its projection and its scale as well, and the sum with the residual's
        gradient."""
        return {"y": 3, "residual": 0}.get(name, 7)

    def terms(self, name: str) -> int:
        if name == "residual":
            return 1
        return self.seq * self.batch if name == "dweight" else self.hidden_size

    def flops(self) -> int:
        """Square, sum, scale and weight."""
        return 4 * self.seq * self.batch * self.hidden_size
