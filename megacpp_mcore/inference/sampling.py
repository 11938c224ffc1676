"""The choice of the next token from its logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megacpp_mcore.inference.recipe import InferenceError


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 always takes the likeliest token. top_k: only the k likeliest; None: all.
    top_p: only the likeliest that have together at least this probability, at least one; 1: all.

    Raises InferenceError for other values.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InferenceError(f"--temperature {self.temperature}: it must be at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise InferenceError(f"--top-k {self.top_k}: at least 1 is needed")
        if not 0 < self.top_p <= 1:
            raise InferenceError(f"--top-p {self.top_p}: it must be above 0 and at most 1")

    def probabilities(self, logits: Tensor) -> Tensor:
        """(V,) logits -> (V,) float64 probabilities on the CPU, 0 for what is never chosen.

        Temperature first, then top_k, then top_p of what is left.
        """
        logits = logits.double().cpu()
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
        kept = (logits - logits.max()) / self.temperature
        order = kept.argsort(descending=True, stable=True)
        chances = kept[order].softmax(0)
        if self.top_k is not None:
            chances[self.top_k :] = 0
        before = chances.cumsum(0) - chances
        chances[before >= self.top_p * chances.sum()] = 0
        chosen = torch.zeros_like(chances)
        chosen[order] = chances / chances.sum()
        return chosen

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """One token. generator: on the CPU; the same state and logits give the same token."""
        return int(torch.multinomial(self.probabilities(logits), 1, generator=generator))
