"""The embedding surface's case: the tokens of a micro batch, of several kinds of text."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from megacpp_mcore.kernels.case import OperatorCase, Tensors
from megacpp_mcore.kernels.embedding.reference import embedding
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.surfaces.workload import Workload

_BYTES = 257  # ids of a byte-level vocabulary, with its end of document
# torch's CUDA kernel for up to so many ids adds the gradients of this many tokens at a time to the
# 16-bit weight's; the one for more sums in float32 and rounds once.
_FEW_IDS, _ROUNDED_AFTER = 3072, 32


def _uniform(n: int, vocab: int, generator: torch.Generator) -> Tensor:
    return torch.randint(vocab, (n,), generator=generator, device=generator.device)


def _bytes(n: int, vocab: int, generator: torch.Generator) -> Tensor:
    """A few ids are most of the text: uniform numbers to the fourth power."""
    drawn = torch.rand(n, generator=generator, device=generator.device) ** 4
    return (drawn * min(vocab, _BYTES)).long()


def _distinct(n: int, vocab: int, generator: torch.Generator) -> Tensor:
    """As far as the vocabulary reaches."""
    found = torch.randperm(vocab, generator=generator, device=generator.device)
    return found.repeat(-(-n // vocab))[:n]


KINDS: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "uniform": _uniform,
    "bytes": _bytes,
    "distinct": _distinct,
    "equal": lambda n, vocab, generator: _uniform(1, vocab, generator).expand(n).clone(),
    "sorted": lambda n, vocab, generator: _uniform(n, vocab, generator).sort().values,
    "repeated": lambda n, vocab, generator: _uniform(-(-n // 7), vocab, generator)
    .repeat_interleave(7)[:n],
}  # fmt: skip


@dataclass(frozen=True)
class EmbeddingCase(OperatorCase):
    """weight (V, h), ids (b, s) -> embeddings (s, b, h). kind: of the ids, a name of `KINDS`."""

    batch: int
    seq: int
    hidden_size: int
    vocab_size: int
    kind: str = "uniform"

    surface = "embedding"
    definition = staticmethod(embedding)
    inputs = ("weight",)
    backward_reads_inputs = False
    variants = tuple(KINDS)

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        model, batch = recipe.model, recipe.schedule.micro_batch_size
        return cls(batch, model.seq_length, model.hidden_size, recipe.padded_vocab_size)

    def as_variant(self, name: str) -> Self:
        return replace(self, kind=name)

    @classmethod
    def samples(cls) -> dict[str, Self]:
        """Sizes of one block of the kernel, of several, and with a last one that is not full."""
        odd = {f"odd-{kind}": cls(3, 29, 20, 97, kind) for kind in KINDS}
        return {
            "plain": cls(2, 48, 64, 32),
            "plain-bytes": cls(2, 48, 16, 300, "bytes"),
            **odd,
            "odd-one-token": cls(1, 1, 23, 7),
            "odd-one-id": cls(2, 33, 1, 1),
            "empty": cls(2, 0, 16, 8),
        }

    def workload(self, device: str, dtype: torch.dtype) -> Workload:
        name = str(dtype).removeprefix("torch.")
        return Workload.of(
            device, name, hidden_size=self.hidden_size, tensor_model_parallel_size=1,
            sequence_parallel=False, weight_shards=1,
        )  # fmt: skip

    def make_inputs(self, generator: torch.Generator) -> Tensors:
        ids = KINDS[self.kind](self._tokens, self.vocab_size, generator)
        return {
            "weight": self.normal(generator, self.vocab_size, self.hidden_size),
            "ids": ids.view(self.batch, self.seq),
        }

    def call(self, operator: Any, **tensors: Tensor) -> Tensors:
        return {"embeddings": operator(**tensors)}

    def roundings(self, name: str) -> float:
        """None to the rows, which are copied; one to a gradient, but see _ROUNDED_AFTER."""
        if name == "embeddings":
            return 0
        return -(-self._tokens // _ROUNDED_AFTER) if self._tokens <= _FEW_IDS else 1

    def terms(self, name: str) -> int:
        """Terms of the gradient's sums: as many as the tokens, if all have one id."""
        return 1 if name == "embeddings" else max(1, self._tokens)

    def unread_bytes(self, tensors: Tensors) -> int:
        """The weight's rows that no token has."""
        ids, weight = tensors["ids"], tensors["weight"]
        return (self.vocab_size - ids.unique().numel()) * self.hidden_size * weight.element_size()

    def flops(self) -> int:
        """Additions of the gradient, as a product's: its backward pass has twice as many."""
        return self._tokens * self.hidden_size // 2

    @property
    def _tokens(self) -> int:
        return self.batch * self.seq
