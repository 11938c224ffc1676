"""The core_attention surface's case: causal, no dropout, Megatron's [s, b, heads, dim]."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megacpp_mcore import problems
from megacpp_mcore.backend import Problem
from megacpp_mcore.kernels.case import Bound, Case, Tensors
from megacpp_mcore.kernels.core_attention.reference import attention
from megacpp_mcore.recipe import Recipe

_SCORES = 2**27  # that the truth holds at a time: 512 MiB in float32
_LARGEST_SCORE = 6  # of a few million standard normal ones


@dataclass(frozen=True)
class CoreAttentionCase(Case):
    """q (s, b, heads, dqk), k (s, b, groups, dqk), v (s, b, groups, dv) -> y (s, b, heads * dv)."""

    batch: int
    seq: int
    heads: int
    groups: int
    dqk: int
    dv: int

    surface = "core_attention"
    inputs = ("q", "k", "v")

    @classmethod
    def of(cls, recipe: Recipe) -> Self | None:
        problem = problems.core_attention_of(recipe, "cpu")
        if problem is None:
            return None
        heads, dqk, dv = (problem.size(name) for name in ("heads", "dqk", "dv"))
        grouped = recipe.attention.kind == "gqa" and recipe.attention.num_query_groups
        batch, seq = recipe.schedule.micro_batch_size, recipe.model.seq_length
        return cls(batch, seq, heads, grouped or heads, dqk, dv)

    @classmethod
    def samples(cls) -> dict[str, Self]:
        return {
            "plain": cls(2, 32, 4, 4, 16, 8),
            "plain-mla": cls(1, 64, 2, 2, 128, 64),
            "odd": cls(1, 37, 3, 3, 24, 16),
            "odd-grouped-queries": cls(2, 17, 6, 2, 16, 16),
            "odd-one-token": cls(1, 1, 2, 2, 8, 8),
            "empty": cls(0, 8, 2, 2, 16, 8),
        }

    def problem(self, device: str, dtype: torch.dtype) -> Problem:
        return problems.core_attention(device, self._config(device, dtype), self.dqk, self.dv)

    def draw(self, generator: torch.Generator) -> Tensors:
        tokens = (self.seq, self.batch)
        return {
            "q": self.normal(generator, *tokens, self.heads, self.dqk),
            "k": self.normal(generator, *tokens, self.groups, self.dqk),
            "v": self.normal(generator, *tokens, self.groups, self.dv),
        }

    def truth(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        """A few heads at a time, made again in the backward pass: the scores need no more room."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        at_once = max(1, _SCORES // max(1, q.shape[0] * self.seq**2))
        group = self.heads // self.groups
        groups = max(1, at_once // group)
        parts = [
            checkpoint(
                attention, q[:, start * group : (start + groups) * group],
                k[:, start : start + groups], v[:, start : start + groups],
                scale=self.dqk**-0.5, use_reentrant=False,
            )
            for start in range(0, self.groups, groups)
        ]  # fmt: skip
        return {"y": torch.cat(parts, dim=1).permute(2, 0, 1, 3).flatten(2)}

    def bind(self, implementation: Any, device: str, dtype: torch.dtype) -> Bound:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.enums import AttnMaskType

        module = implementation(
            config=self._config(device, dtype),
            layer_number=1,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            k_channels=self.dqk,
            v_channels=self.dv,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        ).to(device)
        return Bound(lambda q, k, v: {"y": module(q, k, v, None, AttnMaskType.causal)})

    def _config(self, device: str, dtype: torch.dtype) -> Any:
        from megatron.core.transformer import TransformerConfig

        return TransformerConfig(
            num_layers=1,
            hidden_size=self.heads * self.dqk,
            num_attention_heads=self.heads,
            num_query_groups=self.groups,
            kv_channels=self.dqk,
            attention_dropout=0.0,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            use_cpu_initialization=device == "cpu",
        )

    def roundings(self, name: str) -> float:
        """Scores, which the exponential multiplies by their size, weights and output; and on the
        way back the gradients of weights, scores and input, each from values rounded before."""
        forward = _LARGEST_SCORE + 2
        return forward if name == "y" else 2 * forward

    def terms(self, name: str) -> int:
        return self.dqk + self.dv + self.seq * (self.heads // self.groups)

    def flops(self) -> int:
        """Two products over the pairs of tokens that a causal mask leaves."""
        pairs = self.seq * (self.seq + 1) // 2
        return 2 * self.batch * self.heads * pairs * (self.dqk + self.dv)
