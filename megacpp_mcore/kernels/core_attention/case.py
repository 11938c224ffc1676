"""The core_attention surface's case: causal, no dropout, Megatron's layouts."""

import itertools
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megacpp_mcore.kernels.case import BoundBackend, Case, Tensors, transformer_config
from megacpp_mcore.kernels.core_attention.reference import attention
from megacpp_mcore.kernels.documents import (
    BENCHED_DOCUMENTS,
    document_bounds,
    packed_seq_params,
)
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import core_attention
from megacpp_mcore.surfaces.workload import Workload

_SCORES = 2**27  # that the reference holds at a time: 512 MiB in float32
_LARGEST_SCORE = 6  # of a few million standard normal ones
# torch's float32 attention on a GPU multiplies on tensor cores: a product is three of TF32
# (CUTLASS's OpMultiplyAddFastF32), each of which adds eight terms at once to the sum and cuts it
# off, by half an epsilon on average and always toward zero. Of that, for a term:
_CUT = 3 / 8 / 2


@dataclass(frozen=True)
class CoreAttentionCase(Case):
    """q (s, b, heads, dqk), k (s, b, groups, dqk), v (s, b, groups, dv) -> y (s, b, heads * dv).

    documents: packed ones in each row of seq tokens; 0: rows as they are, else all tokens lie on
    one axis, (t, heads, dim), as Megatron's thd layout has them.
    """

    batch: int
    seq: int
    heads: int
    groups: int
    dqk: int
    dv: int
    documents: int = 0

    surface = "core_attention"
    inputs = ("q", "k", "v")

    @classmethod
    def of(cls, recipe: Recipe) -> Self | None:
        workload = core_attention.of_recipe(recipe, "cpu")
        if workload is None:
            return None
        heads, dqk, dv = (workload.size(name) for name in ("heads", "dqk", "dv"))
        grouped = recipe.attention.kind == "gqa" and recipe.attention.num_query_groups
        batch, seq = recipe.schedule.micro_batch_size, recipe.model.seq_length
        documents = BENCHED_DOCUMENTS if workload.size("layout") == "thd" else 0
        return cls(batch, seq, heads, grouped or heads, dqk, dv, documents)

    @classmethod
    def samples(cls) -> dict[str, Self]:
        return {
            "plain-documents": cls(2, 24, 4, 2, 16, 8, documents=3),
            "plain": cls(2, 32, 4, 4, 16, 8),
            "plain-mla": cls(1, 64, 2, 2, 128, 64),
            "odd": cls(1, 37, 3, 3, 24, 16),
            "odd-grouped-queries": cls(2, 17, 6, 2, 16, 16),
            "odd-one-token": cls(1, 1, 2, 2, 8, 8),
            "odd-documents": cls(1, 67, 3, 3, 24, 16, documents=40),
            "empty": cls(0, 8, 2, 2, 16, 8),
        }

    def workload(self, device: str, dtype: torch.dtype) -> Workload:
        layout = "thd" if self.documents else "sbhd"
        config = self._config(device, dtype)
        return core_attention.workload(device, config, self.dqk, self.dv, layout)

    def make_inputs(self, generator: torch.Generator) -> Tensors:
        tokens = (self.seq * self.batch,) if self.documents else (self.seq, self.batch)
        return {
            "q": self.normal(generator, *tokens, self.heads, self.dqk),
            "k": self.normal(generator, *tokens, self.groups, self.dqk),
            "v": self.normal(generator, *tokens, self.groups, self.dv),
        }

    def reference(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        if not self.documents:
            # [s, b, h, d] -> [b, h, s, d]
            y = self._exact(*(x.permute(1, 2, 0, 3) for x in (q, k, v)))
            return {"y": y.permute(2, 0, 1, 3).flatten(2)}
        parts = [
            self._exact(*(x[start:end].transpose(0, 1)[None] for x in (q, k, v)))
            for start, end in itertools.pairwise(self._bounds())
        ]
        return {"y": torch.cat(parts, dim=2).squeeze(0).transpose(0, 1).flatten(1)}

    def _exact(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A few heads at a time, recomputed in the backward pass: the scores need no more room."""
        at_once = max(1, _SCORES // max(1, q.shape[0] * q.shape[2] ** 2))
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
        return torch.cat(parts, dim=1)

    def bind(self, implementation: Any, device: str, dtype: torch.dtype) -> BoundBackend:
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
        packed = packed_seq_params(self._bounds(), device) if self.documents else None
        mask = AttnMaskType.causal
        return BoundBackend(
            lambda q, k, v: {"y": module(q, k, v, None, mask, packed_seq_params=packed)}
        )

    def _bounds(self) -> list[int]:
        if not self.documents:
            return [row * self.seq for row in range(self.batch + 1)]
        return document_bounds(self.batch, self.seq, self.documents)

    def _config(self, device: str, dtype: torch.dtype) -> Any:
        return transformer_config(
            device,
            dtype,
            hidden_size=self.heads * self.dqk,
            num_attention_heads=self.heads,
            num_query_groups=self.groups,
            kv_channels=self.dqk,
            attention_dropout=0.0,
        )

    def roundings(self, name: str) -> float:
        """Scores, which the exponential multiplies by their size, weights and output; and on the
        way back the gradients of weights, scores and input, each from values rounded before."""
        forward = _LARGEST_SCORE + 2
        return forward if name == "y" else 2 * forward

    def floors(
        self, truth: Tensors, directions: Tensors, dtype: torch.dtype, **tensors: Tensor
    ) -> dict[str, float | Tensor]:
        """Flash attention takes dS = P (dP - dy . y) with the output y as it was rounded. Where a
        query sees one key alone, or nearly, dP - dy . y vanishes, and with it what it adds to dq
        and dk; the rounding of dy . y, half an epsilon of each of dv terms, times the key or the
        query does not. In float32 both sums are rounded at each of dv terms, to half an epsilon of
        what they have come to.

        float32 on a GPU: sums are cut off (`_CUT`), and everything is a little too small.
        """
        if not tensors["k"].numel():
            return {}
        eps, is_fp32 = torch.finfo(dtype).eps, dtype == torch.float32
        cuts = _CUT * eps if is_fp32 and self._cuts_sums(tensors["k"]) else 0.0
        q, k, v, dy = (
            float(x.double().square().mean().sqrt())
            for x in (*(tensors[name] for name in self.inputs), directions["y"])
        )
        rounded = eps / 2 * (self.dv if is_fp32 else self.dv**0.5) + cuts * self.dv**1.5
        of_scores = rounded * dy * v * self.dqk**-0.5
        found = {"dq": of_scores * k, "dk": of_scores * q}
        if cuts:  # half of a floor may be a common factor
            shrunk = {n: 2 * cuts * self.terms(n) * x.abs() for n, x in truth.items()}
            return {name: x + found.get(name, 0.0) for name, x in shrunk.items()}
        return found

    @staticmethod
    def _cuts_sums(x: Tensor) -> bool:
        return x.is_cuda

    def terms(self, name: str) -> int:
        return self.dqk + self.dv + self.seq * (self.heads // self.groups)

    def flops(self) -> int:
        """Two products over the pairs of tokens that a causal mask leaves."""
        lengths = [end - start for start, end in itertools.pairwise(self._bounds())]
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        return 2 * self.heads * pairs * (self.dqk + self.dv)
