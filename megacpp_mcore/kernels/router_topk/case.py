"""The router_topk surface's case: the logits of a micro batch's tokens."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from megacpp_mcore.kernels.case import OperatorCase, Tensors
from megacpp_mcore.kernels.router_topk.reference import router_topk
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import router_topk as surface
from megacpp_mcore.surfaces.workload import Workload


@dataclass(frozen=True)
class RouterTopkCase(OperatorCase):
    """logits (tokens, E), bias (E,) -> probs (tokens, E) and balance (), all in float32."""

    tokens: int
    experts: int
    topk: int
    biased: bool = True
    scaling: float = 1.0
    fused: bool = True  # asked for by moe_router_fusion

    surface = "router_topk"
    definition = staticmethod(router_topk)
    inputs = ("logits",)
    fp32_tensors = ("logits", "bias", "probs", "balance")

    @classmethod
    def of(cls, recipe: Recipe) -> Self | None:
        found, moe = surface.of_recipe(recipe, "cuda"), recipe.moe
        if found is None or found.size("score_function") != "sigmoid" or found.dtype != "float32":
            return None
        tokens = recipe.schedule.micro_batch_size * recipe.model.seq_length
        return cls(
            tokens, moe.num_experts, moe.moe_router_topk, moe.moe_router_enable_expert_bias,
            moe.moe_router_topk_scaling_factor or 1.0, moe.moe_router_fusion,
        )  # fmt: skip

    @classmethod
    def samples(cls) -> dict[str, Self]:
        return {
            "plain": cls(130, 16, 4),
            "odd": cls(37, 5, 2, biased=False, scaling=2.5),
            "odd-one-of-all": cls(70, 12, 1),
            "odd-every-expert": cls(3, 8, 8),
            "odd-one-token": cls(1, 6, 3),
            "empty": cls(0, 8, 2),
        }

    @property
    def scale(self) -> float:
        """Of balance, which then is near the number of tokens."""
        return self.experts / (self.topk * max(self.tokens, 1))

    def workload(self, device: str, dtype: torch.dtype) -> Workload:
        return Workload.of(
            device, "float32", experts=self.experts, fusion=self.fused, score_function="sigmoid",
            groups=None, balancing=("aux_loss",), capacity_factor=None, replay=False, ranks=1,
        )  # fmt: skip

    def make_inputs(self, generator: torch.Generator) -> Tensors:
        tensors = {"logits": 2 * self.normal(generator, self.tokens, self.experts)}
        if self.biased:
            tensors["bias"] = 0.2 * self.normal(generator, self.experts)
        return tensors

    def call(self, operator: Any, logits: Tensor, bias: Tensor | None = None) -> Tensors:
        found = operator(logits, bias, self.topk, self.scaling, self.scale)
        return {"probs": found.probs, "balance": found.balance}

    def roundings(self, name: str) -> float:
        return 0

    def terms(self, name: str) -> int:
        return self.tokens + self.experts if name == "balance" else 4 * self.experts

    def sums(
        self, directions: Tensors, logits: Tensor, bias: Tensor | None = None
    ) -> dict[str, float]:
        """A gradient's terms cancel: a token's weights have a sum that does not depend on them."""
        if not self.tokens:
            return {"dlogits": 0.0}
        weights = directions["probs"].abs().amax() * self.scaling
        balance = directions["balance"].abs() * self.scale * self.tokens
        return {"dlogits": float(weights + balance)}

    def flops(self) -> int:
        return self.tokens * self.experts * (2 * self.topk + 8)
