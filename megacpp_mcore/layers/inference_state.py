"""What layers keep of earlier tokens at inference: a cache per attention layer and row.

A layer's entry stands in the static inference context's `key_value_memory_dict` under its number,
as Megatron's own does. M and R keep a state of fixed size there; attention keeps a column of the
cache a token.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megacpp_mcore.errors import MegacppError


class InferenceStateError(MegacppError):
    """An inference context that is not static, is full, or has no entry of a layer; or documents
    that are packed."""


def check_context(context: Any, packed_seq_params: Any) -> None:
    """Raise InferenceStateError for what no layer of ours keeps a state of."""
    if not context.is_static_batching():
        raise InferenceStateError(
            f"{type(context).__name__}: dynamic batching is not supported by megacpp's layers; use "
            "a StaticInferenceContext"
        )
    if packed_seq_params is not None:
        raise InferenceStateError(
            "packed documents are not supported at inference; pass one sequence per batch row"
        )


def entry_of(context: Any, layer: int) -> Any | None:
    """What the layer has left in the context, None before the first token.

    Raises InferenceStateError for a layer that has not seen the tokens before.
    """
    if context.sequence_len_offset == 0:
        return None
    if layer not in context.key_value_memory_dict:
        raise InferenceStateError(
            f"layer {layer} has no state at token {context.sequence_len_offset}: run the prompt "
            "through the model with the same inference context first"
        )
    return context.key_value_memory_dict[layer]


class AttentionCache(NamedTuple):
    """keys and values of the tokens so far, (b, max_sequence_length, ...) each.

    MLA: keys are the rotated part that the heads share, (..., pos_dim), and values the normalised
    latents, (..., kv_lora_rank), of which every head's keys and values are products. GQA: keys and
    values of every group.
    """

    keys: Tensor
    values: Tensor


class Rows:
    """Where the next tokens of a batch stand. lengths: (b,) tokens so far in each row.

    A context with `lengths` (`inference.context.GenerationContext`) has rows of different lengths;
    in Megatron's StaticInferenceContext all have `sequence_len_offset` tokens. Raises
    InferenceStateError when the context is full.
    """

    def __init__(self, context: Any, tokens: int, batch: int, device: torch.device) -> None:
        lengths = getattr(context, "lengths", None)
        if lengths is None:
            lengths = torch.full((batch,), context.sequence_len_offset, device=device)
        self.end = context.sequence_len_offset + tokens  # of the longest row, without reading it
        self.capacity = context.max_sequence_length
        self.positions = lengths[:, None] + torch.arange(tokens, device=device)  # (b, s)
        self.context = context
        if self.end > self.capacity:
            raise InferenceStateError(
                f"the inference context is of {self.capacity} tokens, and {self.end} are needed: "
                "make it longer"
            )

    def store(self, layer: int, keys: Tensor, values: Tensor) -> AttentionCache:
        """Append keys and values, (b, s, ...), of one layer; returns all so far, the longest row's
        end last. Other rows have arbitrary values after their own end: mask it by position.

        Raises InferenceStateError for a layer that has not seen the tokens before.
        """
        entry = entry_of(self.context, layer)
        if entry is None:
            entry = AttentionCache(
                *(x.new_zeros(x.shape[0], self.capacity, *x.shape[2:]) for x in (keys, values))
            )
            self.context.key_value_memory_dict[layer] = entry
        row = torch.arange(keys.shape[0], device=keys.device)[:, None]
        for cache, new in zip(entry, (keys, values), strict=True):
            cache[row, self.positions] = new
        return AttentionCache(*(cache[:, : self.end] for cache in entry))


_MOST_SCORES = 1 << 26  # elements of the float32 scores that are in memory at once


def attend(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of new tokens to all so far, in float32 (float64 for float64).

    q: (b, g, n, s, dqk), n queries of each of g groups of keys. k: (b, g, t, dqk). v: (b, g, t,
    dv). positions: (b, s), of the queries; the keys stand at 0..t - 1. window: how many earlier
    tokens a query sees, None: all. Returns (b, g, n, s, dv) in the dtype of the computation.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (q, k, v))
    at = torch.arange(k.shape[2], device=k.device)
    queries = max(1, _MOST_SCORES // (q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]))
    outputs = []
    for part, place in zip(q.split(queries, 3), positions.split(queries, 1), strict=True):
        seen = at <= place[..., None]  # (b, s, t)
        if window is not None:
            seen &= at >= place[..., None] - window
        scores = (part @ k[:, :, None].mT) * scale
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        outputs.append(scores.softmax(-1) @ v[:, :, None])
    return torch.cat(outputs, 3)


def rotate_at(table: tuple[Tensor, Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the positions (b, s), as (s, b, 1, pairs). table: (tokens, pairs) each."""
    cos, sin = (angles[positions.t()].unsqueeze(2) for angles in table)
    return cos, sin
