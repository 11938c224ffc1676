"""The mla_up surface's case: the tensors before and after an MLA layer's up-projections."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from megacpp_mcore.kernels.case import OperatorCase, Tensors
from megacpp_mcore.kernels.documents import BENCHED_DOCUMENTS, document_bounds
from megacpp_mcore.kernels.mla_rope.inputs import RotaryTable
from megacpp_mcore.kernels.mla_up.reference import mla_up
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import mla_up as surface
from megacpp_mcore.surfaces.workload import Workload

_BASE = 10_000.0
_SIZES = ("heads", "qk_head_dim", "pos_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank")


@dataclass(frozen=True)
class MLAUpCase(OperatorCase):
    """Latents (s, b, rank), k_pos (s, b, pos) and weights (heads * dims, rank) -> q, k and v.

    documents: packed ones in each row of seq tokens, of unlike lengths; 0: rows as they are, else
    the rows are concatenated, as Megatron's thd layout has them.
    """

    batch: int
    seq: int
    heads: int
    plain: int
    pos: int
    v: int
    q_rank: int
    kv_rank: int
    documents: int = 0
    interleaved: bool = True
    mscale: float = 1.0

    surface = "mla_up"
    definition = staticmethod(mla_up)
    inputs = ("q_latent", "kv_latent", "k_pos", "q_weight", "kv_weight")
    fp32_tensors = ("cos", "sin")

    @classmethod
    def of(cls, recipe: Recipe) -> Self | None:
        """None also without a latent of q, and where RoPE rotates a share of the dims: a bench is
        of what the kernels can be asked."""
        workload = surface.of_recipe(recipe, "cpu")
        if workload is None:
            return None
        batch, seq = recipe.schedule.micro_batch_size, recipe.model.seq_length
        documents = BENCHED_DOCUMENTS if recipe.data.dataloader_inter_document_masking else 0
        return cls(batch, seq, *(workload.size(name) for name in _SIZES), documents)

    @classmethod
    def samples(cls) -> dict[str, Self]:
        return {
            "plain": cls(2, 40, 4, 16, 16, 16, 16, 16),
            "plain-documents": cls(2, 20, 3, 16, 32, 16, 16, 32, documents=2),
            "odd-yarn": cls(3, 7, 5, 12, 14, 10, 9, 21, mscale=1.3),
            "odd-halves": cls(1, 35, 17, 3, 10, 5, 20, 6, interleaved=False),
            "odd-nam56r": cls(1, 3, 56, 64, 64, 64, 64, 64),
            "odd-unlike": cls(2, 5, 9, 33, 26, 40, 50, 17),
            "odd-many-tiles": cls(2, 75, 2, 8, 8, 8, 16, 8),
            "odd-one-token": cls(1, 1, 1, 1, 2, 1, 2, 1),
            "odd-many-documents": cls(1, 9, 3, 8, 6, 4, 8, 8, documents=70),
            "empty": cls(2, 0, 4, 16, 16, 16, 16, 16),
        }

    def workload(self, device: str, dtype: torch.dtype) -> Workload:
        sizes = (self.heads, self.plain, self.pos, self.v, self.q_rank, self.kv_rank)
        return Workload.of(
            device, str(dtype).removeprefix("torch."), **dict(zip(_SIZES, sizes, strict=True)),
            rotary_dim=self.pos, context_parallel_size=1, tensor_model_parallel_size=1, parts=(),
            fp8=None, fp4=None, norms_inside=False, delays_weight_gradients=False,
        )  # fmt: skip

    def make_inputs(self, generator: torch.Generator) -> Tensors:
        """Weights of such a size that q, k and v are standard normal, too."""
        packed = bool(self.documents)
        row = self.seq * self.batch if packed else self.seq
        rows = (row,) if packed else (row, self.batch)
        frequencies = _BASE ** (-torch.arange(0, self.pos, 2).double() / self.pos)
        table = RotaryTable.of(torch.arange(row).double()[:, None] * frequencies, self.mscale)
        q_rows, kv_rows = (self.heads * (self.plain + dims) for dims in (self.pos, self.v))
        tensors = {
            "q_latent": self.normal(generator, *rows, self.q_rank),
            "kv_latent": self.normal(generator, *rows, self.kv_rank),
            "k_pos": self.normal(generator, *rows, self.pos),
            "q_weight": self.normal(generator, q_rows, self.q_rank) * self.q_rank**-0.5,
            "kv_weight": self.normal(generator, kv_rows, self.kv_rank) * self.kv_rank**-0.5,
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
        return dict(zip(("q", "k", "v"), values, strict=True))

    def roundings(self, name: str) -> float:
        """The definition rounds the products, or the gradients rotated back, two of which a
        rotation adds, and the result. The kernels round once on the way to q, k and v."""
        return 3 if name in ("q", "k", "v") else 4

    def terms(self, name: str) -> int:
        dims = self.plain + max(self.pos, self.v)
        return {
            "q": self.q_rank, "k": self.kv_rank, "v": self.kv_rank,
            "dk_pos": self.heads, "dq_latent": self.heads * dims, "dkv_latent": self.heads * dims,
        }.get(name, self.seq * self.batch) + 2  # fmt: skip

    def flops(self) -> int:
        """The products' operations; a rotation has few."""
        q, kv = self.q_rank * (self.plain + self.pos), self.kv_rank * (self.plain + self.v)
        return 2 * self.seq * self.batch * self.heads * (q + kv)
