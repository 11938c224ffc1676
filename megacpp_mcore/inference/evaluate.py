"""How well a model predicts documents: bits per byte, by position and by kind of file, compared
with n-gram models."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megacpp_mcore.inference.loading import Loaded
from megacpp_mcore.inference.ngrams import NGrams, Text
from megacpp_mcore.inference.recipe import InferenceError
from megacpp_mcore.training.data.blend import parse_data_path
from megacpp_mcore.training.data.datasets import split_documents
from megacpp_mcore.training.data.files import TokenFiles, kinds_of

_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class Selection:
    """Documents [begin, end) of a pair. why: how they were chosen."""

    begin: int
    end: int
    why: str


@dataclass(frozen=True)
class _Window:
    """Tokens [first, last) of a document, which the model sees from `first` on only."""

    document: int
    first: int
    last: int


def select(
    pair: TokenFiles, recipe: dict[str, Any], documents: tuple[int, int] | None
) -> Selection:  # fmt: skip
    """The documents to evaluate: those asked for, else what the run held out of its own data, else
    all.

    Raises InferenceError for a range that is not one of the pair's.
    """
    count = pair.lengths.size
    if documents is not None:
        begin, end = documents
        if not 0 <= begin < end <= count:
            raise InferenceError(f"--documents {begin}:{end}: {pair.prefix} has 0:{count}")
        return Selection(begin, end, "as asked")
    data = recipe["data"]
    own = parse_data_path(data["data_path"])[0] if data["data_path"] else []
    if data["split"] and os.path.realpath(pair.prefix) in map(os.path.realpath, own):
        held_out = split_documents(count, data["split"])[1]
        if held_out and held_out[0] < held_out[1]:
            return Selection(*held_out, f"held out by the run's data.split {data['split']!r}")
    return Selection(0, count, "all of them")


def token_losses(
    loaded: Loaded, documents: Sequence[np.ndarray], say: Callable[[int], object] = lambda n: None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The loss in nats of every token of every document, and how many tokens the model saw before.

    Documents are cut into windows of the model's seq_length. The model sees the end of another
    document, or in a later window the token before it, and then the window's own tokens. say: gets
    the tokens done since the last call.
    """
    seq_length = loaded.recipe.model.seq_length
    windows = [
        _Window(number, first, min(first + seq_length, document.size))
        for number, document in enumerate(documents)
        for first in range(0, document.size, seq_length)
    ]
    windows.sort(key=lambda w: w.first - w.last)  # the longest first, rows of about one length
    losses = [np.empty(document.size, np.float32) for document in documents]
    places = [np.empty(document.size, np.int32) for document in documents]
    for batch in _batches(windows):
        found = _losses(loaded, documents, batch)
        for window, row in zip(batch, found, strict=True):
            size = window.last - window.first
            losses[window.document][window.first : window.last] = row[:size]
            places[window.document][window.first : window.last] = np.arange(1, size + 1)
        say(sum(window.last - window.first for window in batch))
    return losses, places


def _batches(windows: Sequence[_Window]) -> Iterator[list[_Window]]:
    start = 0
    while start < len(windows):
        rows = max(1, _BATCH_TOKENS // (windows[start].last - windows[start].first))
        yield list(windows[start : start + rows])
        start += rows


@torch.no_grad()
def _losses(
    loaded: Loaded, documents: Sequence[np.ndarray], batch: Sequence[_Window]
) -> np.ndarray:  # fmt: skip
    """Losses, (windows, tokens of the longest); those after a window's end have no meaning."""
    longest = max(window.last - window.first for window in batch)
    rows = np.full((len(batch), longest + 1), loaded.eod, np.int64)
    for row, window in zip(rows, batch, strict=True):
        if window.first:
            row[0] = documents[window.document][window.first - 1]
        own = documents[window.document][window.first : window.last]
        row[1 : own.size + 1] = own
    tokens = torch.from_numpy(rows).to(loaded.device)
    places = torch.arange(longest, device=loaded.device).expand(len(batch), -1)
    losses = loaded.model(tokens[:, :-1], places, None, labels=tokens[:, 1:].contiguous())
    if not torch.isfinite(losses).all():
        raise InferenceError("the model's losses are not finite: its weights are damaged")
    return losses.float().cpu().numpy()


def judge(
    loaded: Loaded, pair: TokenFiles, selection: Selection, *, counted: Sequence[np.ndarray],
    order: int, most_tokens: int, bytes_of: Callable[[np.ndarray], int],
    say: Callable[[int], object] = lambda n: None,
) -> dict[str, Any]:  # fmt: skip
    """Every figure of one evaluation, as JSON has it.

    counted: the documents that the baselines count n-grams in; none: no baselines. order: of the
    n-gram baseline. most_tokens: whole documents are taken from the selection's start until there
    are as many. bytes_of: the bytes of a document's text.
    """
    chosen = list(_documents(pair, selection, most_tokens))
    documents = [tokens for _, tokens in chosen]
    losses, places = token_losses(loaded, documents, say)
    sizes = np.array([bytes_of(tokens) for tokens in documents])
    total = float(sum(part.sum(dtype=np.float64) for part in losses))
    tokens = sum(map(len, losses))
    kinds = kinds_of(pair)
    names = ["all"] * len(chosen) if kinds is None else [kinds[number] for number, _ in chosen]
    return {
        "documents": len(documents), "tokens": tokens, "bytes": int(sizes.sum()),
        "selection": {"documents": [selection.begin, selection.end], "why": selection.why},
        **_figures(total, tokens, int(sizes.sum())),
        "positions": _by_position(np.concatenate(losses), np.concatenate(places)),
        "kinds": _by_kind(names, losses, sizes),
        "baselines": _baselines(documents, counted, loaded, order, int(sizes.sum())),
    }  # fmt: skip


def _documents(
    pair: TokenFiles, selection: Selection, most_tokens: int
) -> Iterator[tuple[int, np.ndarray]]:  # fmt: skip
    ends = np.cumsum(pair.lengths, dtype=np.int64)
    taken = 0
    for number in range(selection.begin, selection.end):
        if taken >= most_tokens:
            return
        yield number, pair.tokens[ends[number] - pair.lengths[number] : ends[number]]
        taken += int(pair.lengths[number])


def count_tokens(pair: TokenFiles, selection: Selection, most_tokens: int) -> int:
    """The tokens that `judge` reads."""
    return sum(tokens.size for _, tokens in _documents(pair, selection, most_tokens))


def documents_outside(
    pair: TokenFiles, selection: Selection, most_tokens: int
) -> list[np.ndarray]:  # fmt: skip
    """Documents before and after a selection, about `most_tokens` tokens of them at most."""
    before = [
        tokens for _, tokens in _documents(pair, Selection(0, selection.begin, ""), most_tokens)
    ]
    left = most_tokens - sum(map(len, before))
    behind = Selection(selection.end, pair.lengths.size, "")
    return before + [tokens for _, tokens in _documents(pair, behind, left)]


def _figures(nats: float, tokens: int, size: int) -> dict[str, float | None]:
    """loss: nats a token. bits_per_byte: of the whole text, its ends of documents included."""
    bits = nats / np.log(2) / size if size else None
    return {"loss": nats / max(tokens, 1), "bits_per_byte": None if bits is None else float(bits)}


def _by_position(losses: np.ndarray, places: np.ndarray) -> list[dict[str, Any]]:
    """The mean loss of tokens before which the model saw 1, 2, 3-4, 5-8, ... tokens."""
    bins = np.ceil(np.log2(places)).astype(int)
    return [
        {
            "from": 1 if number == 0 else 2 ** (number - 1) + 1, "to": 2**number,
            "tokens": int((bins == number).sum()),
            "loss": float(losses[bins == number].mean(dtype=np.float64)),
        }
        for number in np.unique(bins).tolist()
    ]  # fmt: skip


def _by_kind(
    names: Sequence[str], losses: Sequence[np.ndarray], sizes: np.ndarray
) -> list[dict[str, Any]]:  # fmt: skip
    """The most bytes first."""
    found = []
    for kind in sorted(set(names)):
        own = [number for number, name in enumerate(names) if name == kind]
        nats = float(sum(losses[number].sum(dtype=np.float64) for number in own))
        tokens, size = sum(losses[number].size for number in own), int(sizes[own].sum())
        figures = _figures(nats, tokens, size)
        found.append({"kind": kind or "(none)", "documents": len(own), "tokens": tokens,
                      "bytes": size, **figures})  # fmt: skip
    return sorted(found, key=lambda row: -row["bytes"])


def _baselines(
    documents: Sequence[np.ndarray], counted: Sequence[np.ndarray], loaded: Loaded, order: int,
    size: int,
) -> list[dict[str, Any]]:  # fmt: skip
    if not counted:
        return []
    model = NGrams(Text(counted, loaded.eod, order), loaded.recipe.model.vocab_size)
    found = model.losses(Text(documents, loaded.eod, order))
    rows = []
    for k in sorted({1, 2, order} & set(range(1, order + 1))):
        name = {1: "unigram", 2: "bigram"}.get(k, f"{k}-gram")
        figures = _figures(float(found[k - 1].sum()), found.shape[1], size)
        rows.append({"name": name, "counted_tokens": sum(map(len, counted)), **figures})
    return rows
