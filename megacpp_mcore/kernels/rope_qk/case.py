"""The rope_qk surface's case: what stands between a GQA layer's projection and its attention."""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megacpp_mcore.kernels.case import OperatorCase, Tensors
from megacpp_mcore.kernels.documents import BENCHED_DOCUMENTS, document_bounds
from megacpp_mcore.kernels.rope_qk.inputs import RopeQK
from megacpp_mcore.kernels.rope_qk.reference import REFERENCE
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import rope_qk
from megacpp_mcore.surfaces.workload import Workload

_BASE = 10_000.0


@dataclass(frozen=True)
class RopeQKCase(OperatorCase):
    """qkv (s, b, groups, (heads / groups + 2) * dim) -> q, k and v; q and k -> both when apart.

    rotary: of the dims. documents: packed ones in each row of seq tokens, of unlike lengths; 0:
    rows as they are, else the rows are concatenated, as Megatron's thd layout has them.
    """

    batch: int
    seq: int
    heads: int
    groups: int
    dim: int
    rotary: int
    documents: int = 0
    interleaved: bool = False
    mscale: float = 1.0
    apart: bool = False

    surface = "rope_qk"
    definition = REFERENCE
    fp32_tensors = ("angles",)
    backward_flops = 1
    backward_reads_inputs = False

    @property
    def inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("q", "k") if self.apart else ("qkv",)

    @classmethod
    def of(cls, recipe: Recipe) -> Self | None:
        workload = rope_qk.of_recipe(recipe, "cpu")
        if workload is None:
            return None
        model, dim = recipe.model, workload.size("dim")
        rotary = 2 * math.ceil(int(dim * model.rotary_percent) / 2)  # as Megatron's table has it
        documents = BENCHED_DOCUMENTS if recipe.data.dataloader_inter_document_masking else 0
        batch, heads, groups = (
            recipe.schedule.micro_batch_size,
            workload.size("heads"),
            workload.size("groups"),
        )
        return cls(batch, model.seq_length, heads, groups, dim, rotary, documents)

    @classmethod
    def samples(cls) -> dict[str, Self]:
        return {
            "plain": cls(2, 5, 8, 2, 16, 16),
            "plain-documents": cls(2, 6, 4, 4, 16, 16, documents=3),
            "plain-apart": cls(1, 6, 6, 2, 16, 16, apart=True),
            "odd-yarn-partial": cls(3, 3, 21, 3, 14, 6, mscale=1.3),
            "odd-neighbours": cls(1, 3, 17, 1, 10, 8, interleaved=True),
            "odd-one-token": cls(1, 1, 1, 1, 2, 2),
            "odd-documents": cls(1, 37, 2, 1, 6, 4, documents=66, interleaved=True),
            "odd-documents-apart": cls(3, 3, 5, 5, 6, 4, documents=2, apart=True),
            "empty": cls(2, 0, 8, 2, 16, 16),
        }

    def workload(self, device: str, dtype: torch.dtype) -> Workload:
        return Workload.of(
            device, str(dtype).removeprefix("torch."), heads=self.heads, groups=self.groups,
            dim=self.dim, context_parallel_size=1, needs=(),
        )  # fmt: skip

    def make_inputs(self, generator: torch.Generator) -> Tensors:
        row = self.seq * self.batch if self.documents else self.seq
        rows = (row,) if self.documents else (row, self.batch)
        ratio = self.heads // self.groups
        if self.apart:
            shapes = {"q": (self.heads, self.dim), "k": (self.groups, self.dim)}
        else:
            shapes = {"qkv": (self.groups, (ratio + 2) * self.dim)}
        tensors = {n: self.normal(generator, *rows, *shape) for n, shape in shapes.items()}
        frequencies = _BASE ** (-torch.arange(0, self.rotary, 2).double() / self.rotary)
        angles = torch.arange(self.seq).double()[:, None] * frequencies
        tensors["angles"] = angles.to(generator.device)
        if self.documents:
            bounds = document_bounds(self.batch, self.seq, self.documents)
            tensors["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32).to(generator.device)
        return tensors

    def call(self, operator: RopeQK, **tensors: Tensor) -> Tensors:
        options = {"interleaved": self.interleaved, "mscale": self.mscale}
        if self.apart:
            return dict(zip(("q_out", "k_out"), operator.apart(**tensors, **options), strict=True))
        values = operator.projected(**tensors, **options, heads=self.heads)
        return dict(zip(("q", "k", "v"), values, strict=True))

    def roundings(self, name: str) -> float:
        """cos and sin, two products and their sum, each of up to the root of two values' size."""
        return 6 * self.mscale

    def terms(self, name: str) -> int:
        return 2

    def flops(self) -> int:
        """Four products and two sums a pair, of every query and key."""
        return 3 * self.seq * self.batch * (self.heads + self.groups) * self.rotary
