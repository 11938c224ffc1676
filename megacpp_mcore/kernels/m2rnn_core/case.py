"""The m2rnn_core surface's case: the output of an R block's input projection."""

import functools
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from megacpp_mcore.hybrid.row_padding import row_padding
from megacpp_mcore.kernels.case import OperatorCase, Tensors
from megacpp_mcore.kernels.m2rnn_core.reference import m2rnn_core
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import m2rnn_core as surface
from megacpp_mcore.surfaces.workload import Workload


@dataclass(frozen=True)
class M2RNNCoreCase(OperatorCase):
    """projected (s, b, rows) -> y (s, b, H V). The columns are padded as the layer's are."""

    batch: int
    seq: int
    heads: int
    k_head_dim: int
    v_head_dim: int
    chunk_size: int
    kernel: int = 4
    tanh: str = "approximate"
    grad_clamp: float | None = None
    eps: float = 1e-5

    surface = "m2rnn_core"
    definition = staticmethod(m2rnn_core)
    inputs = (
        "projected", "conv_weight", "conv_bias", "A_log", "dt_bias", "W", "D", "norm_weight",
    )  # fmt: skip
    fp32_tensors = ("A_log", "dt_bias", "W", "D")
    links = MappingProxyType({"ddt_bias": "dprojected", "dA_log": "dprojected"})

    @classmethod
    def of(cls, recipe: Recipe) -> Self | None:
        workload = surface.of_recipe(recipe, "cpu")
        if workload is None:
            return None
        names = ("heads", "k_head_dim", "v_head_dim", "chunk_size")
        return cls(
            recipe.schedule.micro_batch_size, recipe.model.seq_length,
            *(workload.size(name) for name in names), recipe.m2rnn.conv_kernel, recipe.m2rnn.tanh,
            recipe.m2rnn.grad_clamp, recipe.model.layernorm_epsilon,
        )  # fmt: skip

    @classmethod
    def samples(cls) -> dict[str, Self]:
        return {
            "plain": cls(2, 16, 4, 8, 4, 8),
            "plain-nam56r-dims": cls(1, 64, 2, 64, 16, 32),
            # Of fewer than 21 channels, all may be small at once, and the norm enlarge roundings.
            "odd": cls(1, 37, 3, 5, 7, 8, kernel=3),
            "odd-length": cls(2, 75, 3, 64, 16, 32),
            "odd-one-token": cls(2, 1, 2, 32, 16, 32),
            "empty": cls(2, 0, 2, 32, 16, 32),
        }

    @property
    def parts(self) -> tuple[int, ...]:
        values = self.heads * self.v_head_dim
        return (self.k_head_dim, self.k_head_dim, values, values, self.heads)

    def workload(self, device: str, dtype: torch.dtype) -> Workload:
        layout = SimpleNamespace(
            tp=1, local_heads=self.heads, k_dim=self.k_head_dim, v_dim=self.v_head_dim
        )
        settings = SimpleNamespace(chunk_size=self.chunk_size)
        return surface.workload(device, SimpleNamespace(params_dtype=dtype), layout, settings, {})

    def make_inputs(self, generator: torch.Generator) -> Tensors:
        normal = functools.partial(self.normal, generator)
        heads, v_dim = self.heads, self.v_head_dim
        values = heads * v_dim
        channels = 2 * self.k_head_dim + values
        return {
            "projected": normal(self.seq, self.batch, sum(self.parts) + row_padding(self.parts)),
            "conv_weight": self.kernel**-0.5 * normal(channels, 1, self.kernel),
            "conv_bias": self.kernel**-0.5 * normal(channels),
            "A_log": normal(heads),
            "dt_bias": normal(heads) - 2,
            "W": _rotations(0.1 * normal(heads, v_dim, v_dim)),
            "D": 1 + normal(values) / 4,
            "norm_weight": 1 + normal(values) / 4,
        }

    def call(self, operator: Any, **tensors: Tensor) -> Tensors:
        return {
            "y": operator(
                **tensors, heads=self.heads, k_dim=self.k_head_dim, v_dim=self.v_head_dim,
                eps=self.eps, chunk_size=self.chunk_size, grad_clamp=self.grad_clamp,
                tanh=self.tanh,
            )
        }  # fmt: skip

    def summands(
        self, values: Tensors, directions: Tensors, *, projected: Tensor, dt_bias: Tensor,
        **tensors: Tensor,
    ) -> dict[str, Tensor]:  # fmt: skip
        """The terms of the decay's two parameters, a value a head: f = exp(-exp(A_log) softplus(x))
        at the logit x = decay + dt_bias, so that a token's term of dt_bias is the gradient of its
        logit, and of A_log that times softplus(x) / sigmoid(x)."""
        decay = slice(sum(self.parts[:-1]), sum(self.parts))
        terms = values["dprojected"][..., decay]
        x = projected[..., decay].to(terms) + dt_bias
        return {"ddt_bias": terms, "dA_log": terms * functional.softplus(x) / x.sigmoid()}

    def roundings(self, name: str) -> float:
        """The recurrence's roundings, three products' operands and the result, a gradient as many
        again. Besides, q, k, v and y are rounded between the parts, and so are their gradients, and
        the norm divides by what may be smaller than its largest value."""
        return 8 if name == "y" else 16

    def terms(self, name: str) -> int:
        """The terms of the recurrence's case, and the sums of norm, convolution and parameters."""
        values = self.heads * self.v_head_dim
        return 8 * self.seq + self.batch * (self.k_head_dim * values + self.seq) + 2 * values + 64

    def flops(self) -> int:
        """Operations of the recurrence, the convolution's products and sums, and skip, gate and
        norm."""
        k, v, values = self.k_head_dim, self.v_head_dim, self.heads * self.v_head_dim
        tokens = self.batch * self.seq
        recurrence = tokens * values * k * (2 * v + 7)
        return recurrence + tokens * (2 * self.kernel * (2 * k + values) + 16 * values)


def _rotations(moves: Tensor) -> Tensor:
    """(H, V, V) rotations near the identity, which W starts from.

    With W = I + moves some directions grow: over 256 tokens a change of 1e-7 in the input moves the
    gradients of float64 by up to 0.2, and the distance of two right computations says nothing. A
    rotation lengthens nothing, as in a model that trains, and the recurrence forgets.
    """
    return torch.matrix_exp((moves - moves.mT) / 2**0.5)
