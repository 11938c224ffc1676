"""The states of a batch of texts that are being generated, which may differ in length."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor

from megacpp_mcore.layers.inference_state import AttentionCache


class GenerationContext(StaticInferenceContext):
    """Megatron's static context whose rows may have different numbers of tokens.

    lengths: (b,) tokens so far in each row, on the model's device. `key_value_memory_dict` has an
    entry per layer with a state: a cache of attention, or the state of M or R.
    """

    def __init__(self, batch: int, max_sequence_length: int, device: torch.device | str) -> None:
        super().__init__(batch, max_sequence_length)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)

    def advance(self, tokens: int) -> None:
        """After the model has seen the next `tokens` of every row."""
        self.lengths += tokens
        self.increment_sequence_len_offset(tokens)

    @classmethod
    def joined(cls, contexts: Sequence["GenerationContext"]) -> "GenerationContext":
        """One context with the rows of several of the same model and capacity; those are emptied
        layer by layer, so that at most one layer's states are in memory twice."""
        first = contexts[0]
        whole = cls(0, first.max_sequence_length, first.lengths.device)
        whole.lengths = torch.cat([context.lengths for context in contexts])
        whole.max_batch_size = len(whole.lengths)
        whole.sequence_len_offset = max(context.sequence_len_offset for context in contexts)
        for layer in list(first.key_value_memory_dict):
            parts = [context.key_value_memory_dict.pop(layer) for context in contexts]
            whole.key_value_memory_dict[layer] = _joined(parts)
        return whole

    def state_bytes(self) -> dict[str, int]:
        """recurrent: of M and R, all rows, independent of their lengths. cache_per_token: of all
        attention layers, for one token of a row; cache: of the whole capacity, as allocated."""
        entries = self.key_value_memory_dict.values()
        caches = [entry for entry in entries if isinstance(entry, AttentionCache)]
        states = [entry for entry in entries if not isinstance(entry, AttentionCache)]
        return {
            "recurrent": sum(_bytes(x) for state in states for x in state),
            "cache_per_token": sum(_bytes(x[0, 0]) for cache in caches for x in cache),
            "cache": sum(_bytes(x) for cache in caches for x in cache),
        }


def _joined(parts: Sequence[Any]) -> Any:
    """The rows of several states of one layer."""
    kind = type(parts[0])
    dims = getattr(kind, "batch_dims", (0,) * len(parts[0]))
    columns = zip(*parts, strict=True)
    return kind(*(torch.cat(column, dim) for column, dim in zip(columns, dims, strict=True)))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
