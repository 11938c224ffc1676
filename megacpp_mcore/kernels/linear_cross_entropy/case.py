"""The linear_cross_entropy surface's case: output layer and loss of every token, or their sum."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Self

import torch
from torch import Tensor

from megacpp_mcore.kernels.case import OperatorCase, Tensors
from megacpp_mcore.kernels.linear_cross_entropy import REFERENCE, Head
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces import linear_cross_entropy
from megacpp_mcore.surfaces.backend import Backend
from megacpp_mcore.surfaces.workload import Workload

_LARGEST_LOGIT = 6  # of a billion standard normal ones


@dataclass(frozen=True)
class LinearCrossEntropyCase(OperatorCase):
    """hidden (s, b, h), weight (V, h), labels (s, b) -> losses (s, b).

    weighted: with loss_weights (s, b) -> their sum, total (), as a training step has it. Backends
    then make gradients in the forward pass where they can. even: the weights are all the same, and
    the total is the mean, of which Liger has a function of its own.
    """

    batch: int
    seq: int
    hidden_size: int
    vocab_size: int
    weighted: bool = False
    even: bool = False

    surface = "linear_cross_entropy"
    definition = REFERENCE
    inputs = ("hidden", "weight")
    fp32_tensors = ("losses", "total", "loss_weights")
    variants = ("weighted", "per_token", "mean")

    @classmethod
    def of(cls, recipe: Recipe) -> Self | None:
        workload = linear_cross_entropy.of_recipe(recipe, "cpu")
        batch, seq = recipe.schedule.micro_batch_size, recipe.model.seq_length
        return cls(batch, seq, workload.size("hidden_size"), workload.size("vocab_size"), True)

    def as_variant(self, name: str) -> Self:
        return replace(self, weighted=name != "per_token", even=name == "mean")

    @property
    def yardsticks(self) -> tuple[Backend, ...]:
        return (linear_cross_entropy.LIGERS_MEAN,) if self.even else ()

    @classmethod
    def samples(cls) -> dict[str, Self]:
        return {
            "plain": cls(2, 16, 32, 64),
            "plain-weighted": cls(2, 16, 32, 64, True),
            "odd": cls(3, 5, 24, 97),
            "odd-weighted": cls(3, 5, 23, 97, True),
            "odd-one-token": cls(1, 1, 8, 3),
            "odd-one-token-weighted": cls(1, 1, 8, 3, True),
            "empty": cls(2, 0, 16, 24),
            "empty-weighted": cls(2, 0, 16, 24, True),
        }

    def workload(self, device: str, dtype: torch.dtype) -> Workload:
        config = SimpleNamespace(
            params_dtype=dtype, hidden_size=self.hidden_size, tensor_model_parallel_size=1
        )
        return linear_cross_entropy.workload(device, config, self.vocab_size)

    def make_inputs(self, generator: torch.Generator) -> Tensors:
        """Logits are standard normal, so that no label has all of the probability. A token in four
        has weight 0."""
        tokens = (self.seq, self.batch)
        weight = self.normal(generator, self.vocab_size, self.hidden_size)
        tensors = {
            "hidden": self.normal(generator, *tokens, self.hidden_size),
            "weight": weight * self.hidden_size**-0.5,
            "labels": torch.randint(
                self.vocab_size, tokens, generator=generator, device=generator.device
            ),
        }
        if self.even:
            how = {"dtype": torch.float32, "device": generator.device}
            tensors["loss_weights"] = torch.full(tokens, 1 / max(1, self.seq * self.batch), **how)
        elif self.weighted:
            drawn = torch.rand(tokens, generator=generator, device=generator.device)
            tensors["loss_weights"] = (drawn - 0.25).clamp(min=0) / max(1, drawn.numel())
        return tensors

    def call(self, operator: Head, **tensors: Tensor) -> Tensors:
        if self.weighted:
            total, _ = operator.weighted(**tensors)
            return {"total": total}
        return {"losses": operator.per_token(**tensors)}

    def roundings(self, name: str) -> float:
        """The logits, which the exponential multiplies by their size; and on the way back the
        gradient of the logits, the result, and its product with the gradient of the total."""
        return _LARGEST_LOGIT if name in ("losses", "total") else _LARGEST_LOGIT + 3

    def terms(self, name: str) -> int:
        tokens = self.seq * self.batch
        sums = {"losses": 0, "total": tokens, "dhidden": self.vocab_size, "dweight": tokens}
        return self.hidden_size + self.vocab_size + sums[name]

    def sums(
        self, directions: Tensors, hidden: Tensor, weight: Tensor, labels: Tensor,
        loss_weights: Tensor | None = None,
    ) -> dict[str, float]:  # fmt: skip
        """The label's gradient of a logit is its probability less 1: of a label with nearly all of
        the probability little is left. Its loss, lse less its logit, is as little."""
        hidden, labels = hidden.reshape(-1, self.hidden_size), labels.reshape(-1)
        if not labels.numel():
            return {}
        logits = hidden @ weight.T
        picked = logits.gather(1, labels[:, None])
        losses = (logits.logsumexp(1, keepdim=True).abs() + picked.abs())[:, 0]
        along = directions["total" if self.weighted else "losses"].to(hidden).abs().reshape(-1)
        if loss_weights is not None:
            losses = losses * loss_weights.reshape(-1).abs()
            along = along * loss_weights.reshape(-1).abs()
        ones = torch.ones_like(picked)
        terms = logits.softmax(1).scatter_add(1, labels[:, None], ones) * along[:, None]
        outputs = {"total": losses.sum()} if self.weighted else {"losses": losses.amax()}
        gradients = {"dhidden": terms @ weight.abs(), "dweight": terms.T @ hidden.abs()}
        return {name: float(x.amax()) for name, x in (outputs | gradients).items()}

    def flops(self) -> int:
        return 2 * self.seq * self.batch * self.hidden_size * self.vocab_size
