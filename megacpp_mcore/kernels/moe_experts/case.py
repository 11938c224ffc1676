"""The moe_experts surface's case: the local experts on tokens that a router has spread unevenly."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from megacpp_mcore.kernels.case import BoundBackend, Case, Tensors, transformer_config
from megacpp_mcore.kernels.moe_experts.reference import experts
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import moe_experts
from megacpp_mcore.surfaces.workload import Workload


@dataclass(frozen=True)
class MoeExpertsCase(Case):
    """x (t, h), counts (E,), w1 (E, 2f, h), w2 (E, h, f), probs (t,) -> y (t, h).

    tokens: t, each token of the batch once for each of its experts. idle: experts without tokens.
    """

    tokens: int
    experts: int
    hidden_size: int
    ffn_hidden_size: int
    idle: int = 0

    surface = "moe_experts"
    inputs = ("x", "w1", "w2", "probs")
    fp32_tensors = ("probs",)

    @classmethod
    def of(cls, recipe: Recipe) -> Self | None:
        """All experts on one device, as without expert parallelism."""
        moe, model = recipe.moe, recipe.model
        if "E" not in recipe.plan.letters:
            return None
        tokens = recipe.schedule.micro_batch_size * model.seq_length * moe.moe_router_topk
        return cls(tokens, moe.num_experts, model.hidden_size, moe.moe_ffn_hidden_size)

    @classmethod
    def samples(cls) -> dict[str, Self]:
        """h and f are multiples of 16 bytes, which a GEMM needs; the counts are odd."""
        return {
            "plain": cls(64, 4, 32, 48),
            "odd": cls(61, 3, 24, 40),
            "odd-idle-experts": cls(29, 5, 24, 40, idle=3),
            "odd-one-expert": cls(13, 1, 16, 24),
            "empty": cls(0, 3, 16, 24),
        }

    def workload(self, device: str, dtype: torch.dtype) -> Workload:
        return moe_experts.workload(device, self._config(device, dtype), "adam")

    def make_inputs(self, generator: torch.Generator) -> Tensors:
        h, f = self.hidden_size, self.ffn_hidden_size
        busy = self.experts - self.idle
        chosen = torch.randint(busy, (self.tokens,), generator=generator, device=generator.device)
        return {
            "x": self.normal(generator, self.tokens, h),
            "w1": self.normal(generator, self.experts, 2 * f, h) * h**-0.5,
            "w2": self.normal(generator, self.experts, h, f) * f**-0.5,
            "probs": self.normal(generator, self.tokens).sigmoid(),
            "counts": torch.bincount(chosen, minlength=self.experts),
        }

    def reference(
        self, x: Tensor, counts: Tensor, w1: Tensor, w2: Tensor, probs: Tensor
    ) -> Tensors:
        return {"y": experts(x, counts, w1, w2, probs)}

    def bind(self, implementation: Any, device: str, dtype: torch.dtype) -> BoundBackend:
        from megatron.core.process_groups_config import ProcessGroupCollection

        module = implementation(
            self.experts,
            self._config(device, dtype),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        ).to(device)
        named = list(module.named_parameters())
        return BoundBackend(
            lambda x, counts, probs, w1, w2: {"y": module(x, counts, probs)[0]},
            {
                "w1": [parameter for name, parameter in named if "linear_fc1" in name],
                "w2": [parameter for name, parameter in named if "linear_fc2" in name],
            },
        )

    def _config(self, device: str, dtype: torch.dtype) -> Any:
        return transformer_config(
            device,
            dtype,
            hidden_size=self.hidden_size,
            num_attention_heads=1,
            num_moe_experts=self.experts,
            moe_ffn_hidden_size=self.ffn_hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            gated_linear_unit=True,
            activation_func=functional.silu,
            bias_activation_fusion=device == "cuda",
            add_bias_linear=False,
        )

    def roundings(self, name: str) -> float:
        """fc1, silu, gate times up, times probs, fc2; and on the way back about as many again."""
        return 5 if name == "y" else 10

    def terms(self, name: str) -> int:
        both = self.hidden_size + self.ffn_hidden_size
        return both + (self.tokens if name in ("dw1", "dw2") else both)

    def flops(self) -> int:
        return 6 * self.tokens * self.hidden_size * self.ffn_hidden_size
