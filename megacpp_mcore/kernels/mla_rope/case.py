"""The mla_rope surface's case: the tensors around an MLA layer's core attention."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from megacpp_mcore.kernels.case import OperatorCase, Tensors
from megacpp_mcore.kernels.documents import BENCHED_DOCUMENTS, document_bounds
from megacpp_mcore.kernels.mla_rope.inputs import RotaryTable
from megacpp_mcore.kernels.mla_rope.reference import mla_rope
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces.mla_rope import of_recipe
from megacpp_mcore.surfaces.workload import Workload

_BASE = 10_000.0


@dataclass(frozen=True)
class MLARopeCase(OperatorCase):
    """q (s, b, heads, plain + pos), kv (s, b, heads, plain + v), k_pos (s, b, pos) -> q, k and v.

    documents: packed ones in each row of seq tokens, of unlike lengths; 0: rows as they are, else
    the rows are concatenated, as Megatron's thd layout has them. rotary: of the pos dims.
    """

    batch: int
    seq: int
    heads: int
    plain: int
    pos: int
    v: int
    rotary: int
    documents: int = 0
    interleaved: bool = True
    mscale: float = 1.0

    surface = "mla_rope"
    definition = staticmethod(mla_rope)
    inputs = ("q", "kv", "k_pos")
    fp32_tensors = ("cos", "sin")
    backward_flops = 1
    backward_reads_inputs = False

    @classmethod
    def of(cls, recipe: Recipe) -> Self | None:
        workload = of_recipe(recipe, "cpu")
        if workload is None:
            return None
        sizes = (workload.size(n) for n in ("heads", "qk_head_dim", "pos_dim", "v_head_dim"))
        batch, seq = recipe.schedule.micro_batch_size, recipe.model.seq_length
        documents = BENCHED_DOCUMENTS if recipe.data.dataloader_inter_document_masking else 0
        return cls(batch, seq, *sizes, workload.size("rotary_dim"), documents)

    @classmethod
    def samples(cls) -> dict[str, Self]:
        return {
            # A token is a program: few, or the interpreter takes minutes.
            "plain": cls(2, 2, 4, 16, 16, 16, 16),
            "plain-documents": cls(2, 3, 2, 16, 16, 8, 16, documents=2),
            "odd-yarn-partial": cls(3, 3, 7, 12, 14, 10, 6, mscale=1.3),
            "odd-halves": cls(1, 5, 17, 3, 10, 5, 10, interleaved=False),
            "odd-nam56r": cls(1, 2, 56, 64, 64, 64, 64),
            "odd-many-heads": cls(1, 1, 130, 8, 8, 8, 8),
            "odd-one-token": cls(1, 1, 1, 1, 2, 1, 2),
            "odd-many-documents": cls(1, 9, 3, 8, 6, 4, 6, documents=70),
            "empty": cls(2, 0, 4, 16, 16, 16, 16),
        }

    def workload(self, device: str, dtype: torch.dtype) -> Workload:
        sizes = {
            "heads": self.heads, "qk_head_dim": self.plain, "pos_dim": self.pos,
            "v_head_dim": self.v, "rotary_dim": self.rotary, "context_parallel_size": 1,
            "tensor_model_parallel_size": 1,
        }  # fmt: skip
        return Workload.of(device, str(dtype).removeprefix("torch."), **sizes)

    def make_inputs(self, generator: torch.Generator) -> Tensors:
        packed = bool(self.documents)
        row = self.seq * self.batch if packed else self.seq
        rows = (row,) if packed else (row, self.batch)
        frequencies = _BASE ** (-torch.arange(0, self.rotary, 2).double() / self.rotary)
        table = RotaryTable.of(torch.arange(row).double()[:, None] * frequencies, self.mscale)
        tensors = {
            "q": self.normal(generator, *rows, self.heads, self.plain + self.pos),
            "kv": self.normal(generator, *rows, self.heads, self.plain + self.v),
            "k_pos": self.normal(generator, *rows, self.pos),
            "cos": table.cos.to(generator.device),
            "sin": table.sin.to(generator.device),
        }
        if packed:
            bounds = document_bounds(self.batch, self.seq, self.documents)
            tensors["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=generator.device)
        return tensors

    def call(self, operator: Any, cos: Tensor, sin: Tensor, **tensors: Tensor) -> Tensors:
        options = {"qk_head_dim": self.plain, "interleaved": self.interleaved}
        values = operator(rotary=RotaryTable(cos, sin), **tensors, **options)
        return dict(zip(("q_out", "k", "v"), values, strict=True))

    def roundings(self, name: str) -> float:
        """cos and sin, two products and their sum, each of up to the root of two values' size; the
        sum over heads is rounded once more."""
        return 6 if name in ("q_out", "k", "v") else 7

    def terms(self, name: str) -> int:
        return 2 * self.heads if name == "dk_pos" else 2

    def flops(self) -> int:
        """Four products and two sums a pair, of every query head and of k once."""
        return 3 * self.seq * self.batch * (self.heads + 1) * self.rotary
