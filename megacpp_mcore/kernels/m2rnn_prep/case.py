"""The m2rnn_prep surface's case: what stands before the recurrence and behind it."""

import functools
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from megacpp_mcore.kernels.case import BoundBackend, Tensors
from megacpp_mcore.kernels.documents import BENCHED_DOCUMENTS, document_bounds, positions
from megacpp_mcore.kernels.m2rnn_prep import REFERENCE, M2RNNPrep
from megacpp_mcore.kernels.prep_case import PrepCase
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import m2rnn


@dataclass(frozen=True)
class M2RNNPrepCase(PrepCase):
    """q, k (s, b, K), v (s, b, H V), decay (s, b, H) -> mixed (s, b, 2 K + H V), f (b, s, H);
    y, values (b, s, H, V), gate (s, b, H V) -> out (s, b, H V).

    documents: packed ones in each row of seq tokens, of unlike lengths; the rows then lie one
    behind the other, as Megatron's thd layout has them. 0: rows as they are.
    """

    batch: int
    seq: int
    heads: int
    k_head_dim: int
    v_head_dim: int
    kernel: int = 4
    documents: int = 0
    eps: float = 1e-5

    surface = "m2rnn_prep"
    inputs = (
        "q", "k", "v", "decay", "weight", "bias", "A_log", "dt_bias",
        "y", "values", "gate", "D", "norm_weight",
    )  # fmt: skip
    fp32_tensors = ("A_log", "dt_bias", "D", "f")

    @classmethod
    def of(cls, recipe: Recipe) -> Self | None:
        workload = m2rnn.of_recipe(recipe, "cpu")
        if workload is None:
            return None
        sizes = (workload.size(name) for name in ("heads", "k_head_dim", "v_head_dim"))
        documents = BENCHED_DOCUMENTS if recipe.data.dataloader_inter_document_masking else 0
        return cls(
            recipe.schedule.micro_batch_size, recipe.model.seq_length, *sizes,
            recipe.m2rnn.conv_kernel, documents, recipe.model.layernorm_epsilon,
        )  # fmt: skip

    @classmethod
    def samples(cls) -> dict[str, Self]:
        return {  # few: each is compiled anew
            "plain": cls(2, 16, 4, 8, 4),
            "odd": cls(3, 7, 5, 3, 3, kernel=3),
            "odd-documents": cls(2, 9, 3, 5, 7, kernel=5, documents=4),
            # Not of a few values: their gradients cancel, and all that is left is rounding.
            "odd-one-token": cls(1, 1, 8, 4, 5),
            "empty": cls(2, 0, 4, 8, 4),
        }

    def make_inputs(self, generator: torch.Generator) -> Tensors:
        normal = functools.partial(self.normal, generator)
        b, s = self.batch, self.seq
        rows, columns = ((s * b, 1), (1, s * b)) if self.documents else ((s, b), (b, s))
        values = self.heads * self.v_head_dim
        channels = 2 * self.k_head_dim + values
        bound = self.kernel**-0.5
        tensors = {
            "q": normal(*rows, self.k_head_dim),
            "k": normal(*rows, self.k_head_dim),
            "v": normal(*rows, values),
            "decay": normal(*rows, self.heads),
            "weight": bound * normal(channels, 1, self.kernel),
            "bias": bound * normal(channels),
            "A_log": normal(self.heads),
            "dt_bias": normal(self.heads) - 2,
            "y": normal(*columns, self.heads, self.v_head_dim),
            "values": normal(*columns, self.heads, self.v_head_dim),
            "gate": normal(*rows, values),
            "D": 1 + normal(values) / 4,
            "norm_weight": 1 + normal(values) / 4,
        }
        if self.documents:
            bounds = document_bounds(self.batch, self.seq, self.documents)
            offset = positions(bounds[-1], torch.tensor(bounds, device=generator.device))
            tensors["offset"] = offset.view(-1, 1, 1)
        return tensors

    def reference(self, **tensors: Tensor) -> Tensors:
        return self._call(REFERENCE, **tensors)

    def bind(self, implementation: Any, device: str, dtype: torch.dtype) -> BoundBackend:
        return BoundBackend(lambda **tensors: self._call(implementation, **tensors))

    def _call(
        self, prep: M2RNNPrep, y: Tensor, values: Tensor, gate: Tensor, D: Tensor,
        norm_weight: Tensor, **before: Tensor,
    ) -> Tensors:  # fmt: skip
        mixed, f = prep.conv_and_decay(**before)
        channels = self.heads * self.v_head_dim
        out = prep.gated_norm(y, values, gate, D, norm_weight, channels=channels, eps=self.eps)
        return {"mixed": mixed, "f": f, "out": out}

    def roundings(self, name: str) -> float:
        """Computed in float32 throughout: an output and a gradient are rounded once."""
        return 1

    def terms(self, name: str) -> int:
        """Sums over all channels in the norm, over all tokens in the parameters' gradients, and a
        dozen float32 operations to any value."""
        summed = ("dweight", "dbias", "dA_log", "ddt_bias", "dD", "dnorm_weight")
        tokens = self.batch * self.seq if name in summed else 0
        return tokens + 2 * self.heads * self.v_head_dim + 2 * self.kernel + 12

    def flops(self) -> int:
        """Products and sums of the convolution; silu, skip, gate and norm of each value."""
        tokens, values = self.batch * self.seq, self.heads * self.v_head_dim
        return tokens * (2 * self.kernel * (2 * self.k_head_dim + values) + 16 * values)
