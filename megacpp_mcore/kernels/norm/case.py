"""The norm surface's case: RMSNorm of the residual stream."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from megacpp_mcore.kernels.case import BoundBackend, Case, Tensors
from megacpp_mcore.kernels.norm.reference import rms_norm
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import norm
from megacpp_mcore.surfaces.workload import Workload


@dataclass(frozen=True)
class NormCase(Case):
    """x (s, b, h), weight (h,) -> y (s, b, h)."""

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
        return {"y": rms_norm(x, weight, self.eps)}

    def bind(self, implementation: Any, device: str, dtype: torch.dtype) -> BoundBackend:
        config = self._config(device, dtype)
        module = implementation()(config=config, hidden_size=self.hidden_size, eps=self.eps)
        module = module.to(device, dtype)
        return BoundBackend(lambda x, weight: {"y": module(x)}, {"weight": [module.weight]})

    def _config(self, device: str, dtype: torch.dtype) -> Any:
        from megatron.core.transformer import TransformerConfig

        return TransformerConfig(
            num_layers=1,
            hidden_size=self.hidden_size,
            num_attention_heads=1,
            normalization="RMSNorm",
            params_dtype=dtype,
            use_cpu_initialization=device == "cpu",
        )

    def roundings(self, name: str) -> float:
        """The normalised x, its product with the weight and y; and on the way back the gradient
        of the normalised x, its projection and its scale as well."""
        return 3 if name == "y" else 6

    def terms(self, name: str) -> int:
        return self.seq * self.batch if name == "dweight" else self.hidden_size

    def flops(self) -> int:
        """Square, sum, scale and weight."""
        return 4 * self.seq * self.batch * self.hidden_size
