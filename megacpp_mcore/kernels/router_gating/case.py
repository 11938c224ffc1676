"""The router_gating surface's case: the tokens of a micro batch, in front of a MoE layer."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from megacpp_mcore.kernels.case import OperatorCase, Tensors
from megacpp_mcore.kernels.router_gating.reference import router_gating
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import router_gating as surface
from megacpp_mcore.surfaces.workload import Workload


@dataclass(frozen=True)
class RouterGatingCase(OperatorCase):
    """x (s, b, h), weight (E, h) -> logits (s, b, E) in float32."""

    batch: int
    seq: int
    hidden_size: int
    experts: int

    surface = "router_gating"
    definition = staticmethod(router_gating)
    inputs = ("x", "weight")
    fp32_tensors = ("logits",)

    @classmethod
    def of(cls, recipe: Recipe) -> Self | None:
        model = recipe.model
        if surface.of_recipe(recipe, "cuda") is None or recipe.moe.moe_router_dtype != "fp32":
            return None
        batch = recipe.schedule.micro_batch_size
        return cls(batch, model.seq_length, model.hidden_size, recipe.moe.num_experts)

    @classmethod
    def samples(cls) -> dict[str, Self]:
        """A bf16 product on a GPU takes h and E of a multiple of 8."""
        return {
            "plain": cls(2, 16, 64, 16),
            "odd": cls(3, 7, 72, 24),
            "odd-one-token": cls(1, 1, 40, 8),
            "empty": cls(2, 0, 64, 8),
        }

    def workload(self, device: str, dtype: torch.dtype) -> Workload:
        name = str(dtype).removeprefix("torch.")
        return Workload.of(
            device, name, router_dtype="fp32", bias=False,
            hidden_size=self.hidden_size, experts=self.experts,
        )  # fmt: skip

    def make_inputs(self, generator: torch.Generator) -> Tensors:
        return {
            "x": self.normal(generator, self.seq, self.batch, self.hidden_size),
            "weight": self.normal(generator, self.experts, self.hidden_size)
            * self.hidden_size**-0.5,
        }

    def call(self, operator: Any, **tensors: Tensor) -> Tensors:
        return {"logits": operator(**tensors)}

    def roundings(self, name: str) -> float:
        """None to the logits, which are float32; a gradient is rounded once."""
        return 0 if name == "logits" else 1

    def terms(self, name: str) -> int:
        tokens = self.seq * self.batch
        return {"logits": self.hidden_size, "dweight": tokens}.get(name, self.experts)

    def sums(self, directions: Tensors, x: Tensor, weight: Tensor) -> dict[str, float]:
        """The terms of a logit may cancel."""
        if not x.numel():
            return {"logits": 0.0}
        return {"logits": float((x.abs().amax() * weight.abs().amax()) * self.hidden_size)}

    def flops(self) -> int:
        return 2 * self.seq * self.batch * self.hidden_size * self.experts
