"""The linear_cross_entropy surface's case: output layer and loss of every token."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor

from megacpp_mcore import problems
from megacpp_mcore.backend import Problem
from megacpp_mcore.kernels.case import Bound, Case, Tensors
from megacpp_mcore.kernels.linear_cross_entropy import linear_cross_entropy
from megacpp_mcore.recipe import Recipe

_LARGEST_LOGIT = 6  # of a billion standard normal ones


@dataclass(frozen=True)
class LinearCrossEntropyCase(Case):
    """hidden (s, b, h), weight (V, h), labels (s, b) -> losses (s, b)."""

    batch: int
    seq: int
    hidden_size: int
    vocab_size: int

    surface = "linear_cross_entropy"
    inputs = ("hidden", "weight")
    wide = ("losses",)

    @classmethod
    def of(cls, recipe: Recipe) -> Self | None:
        problem = problems.linear_cross_entropy_of(recipe, "cpu")
        batch, seq = recipe.schedule.micro_batch_size, recipe.model.seq_length
        return cls(batch, seq, problem.size("hidden_size"), problem.size("vocab_size"))

    @classmethod
    def samples(cls) -> dict[str, Self]:
        return {
            "plain": cls(2, 16, 32, 64),
            "odd": cls(3, 5, 24, 97),
            "odd-one-token": cls(1, 1, 8, 3),
            "empty": cls(2, 0, 16, 24),
        }

    def problem(self, device: str, dtype: torch.dtype) -> Problem:
        config = SimpleNamespace(
            params_dtype=dtype, hidden_size=self.hidden_size, tensor_model_parallel_size=1
        )
        return problems.linear_cross_entropy(device, config, self.vocab_size)

    def draw(self, generator: torch.Generator) -> Tensors:
        """Logits are standard normal, so that no label has all of the probability."""
        tokens = (self.seq, self.batch)
        weight = self.normal(generator, self.vocab_size, self.hidden_size)
        return {
            "hidden": self.normal(generator, *tokens, self.hidden_size),
            "weight": weight * self.hidden_size**-0.5,
            "labels": torch.randint(
                self.vocab_size, tokens, generator=generator, device=generator.device
            ),
        }

    def truth(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensors:
        return {"losses": linear_cross_entropy(hidden, weight, labels)}

    def bind(self, implementation: Any, device: str, dtype: torch.dtype) -> Bound:
        return Bound(lambda **tensors: {"losses": implementation.per_token(**tensors)})

    def roundings(self, name: str) -> float:
        """The logits, which the exponential multiplies by their size; and on the way back the
        gradient of the logits and the result."""
        return _LARGEST_LOGIT if name == "losses" else _LARGEST_LOGIT + 2

    def terms(self, name: str) -> int:
        sums = {"losses": 0, "dhidden": self.vocab_size, "dweight": self.seq * self.batch}
        return self.hidden_size + self.vocab_size + sums[name]

    def flops(self) -> int:
        return 2 * self.seq * self.batch * self.hidden_size * self.vocab_size
