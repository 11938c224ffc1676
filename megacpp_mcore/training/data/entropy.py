"""The unigram and bigram entropy of a corpus, as reference values for a training loss."""

import os
from collections.abc import Callable

import numpy as np

from megacpp_mcore.training.data.files import DataError, read_pair

_CHUNK_TOKENS = 1 << 22
_DENSE_CODES = 1 << 24  # up to here, a table of all pairs is cheaper than sorting


def corpus_entropy(
    prefix: str | os.PathLike, documents: tuple[int, int] | None = None,
    advance: Callable[[int], object] = lambda tokens: None,
) -> tuple[float, float]:  # fmt: skip
    """Exact `(unigram, bigram)` entropy in nats per token, of documents [begin, end) or of all.

    With c(a) the count of token a, the end-of-document token included, and N the number of tokens:

        unigram = -sum_a c(a)/N log(c(a)/N)

    With c(a, b) the count of b right after a in the same document, c(a, .) = sum_b c(a, b), and M
    the number of such pairs (a document of n tokens, end included, has n - 1; no pair crosses
    documents, so the first token of a document is not predicted):

        bigram = -sum_ab c(a, b)/M log(c(a, b)/c(a, .))

    These are the lowest mean losses on these tokens of a model without context, and of one that
    sees only the previous token. Documents are the sequences of the `.idx`, as in `GPTDataset`.
    advance: is told the tokens counted since the last call.

    Raises DataError for a damaged pair, a range outside the corpus, and a range without two tokens
    in one document.
    """
    pair = read_pair(prefix)
    begin, end = documents if documents is not None else (0, pair.lengths.size)
    if not 0 <= begin < end <= pair.lengths.size:
        raise DataError(
            f"documents [{begin}, {end}) are not a range of {pair.prefix}, which has "
            f"{pair.lengths.size}"
        )
    ends = np.cumsum(pair.lengths, dtype=np.int64)
    first = int(ends[begin - 1]) if begin else 0
    tokens, lasts = pair.tokens[first : ends[end - 1]], ends[begin:end] - first - 1
    if tokens.min() < 0:
        raise DataError(f"{pair.prefix}.bin has a negative token id")
    vocab_size = int(tokens.max()) + 1
    unigrams = _count_tokens(tokens, vocab_size)
    codes, counts = _count_pairs(tokens, lasts, vocab_size, advance)
    if counts.size == 0:
        raise DataError(f"{pair.prefix}: no document in [{begin}, {end}) has two tokens")
    firsts = np.bincount(codes // vocab_size, weights=counts, minlength=vocab_size)
    bigram = np.dot(counts, np.log(firsts[codes // vocab_size] / counts)) / counts.sum()
    return _entropy(unigrams), float(bigram)


def _entropy(counts: np.ndarray) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(np.dot(shares, np.log(1 / shares)))


def _count_tokens(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, tokens.size, _CHUNK_TOKENS):
        counts += np.bincount(tokens[start : start + _CHUNK_TOKENS], minlength=vocab_size)
    return counts


def _count_pairs(
    tokens: np.ndarray, lasts: np.ndarray, vocab_size: int, advance: Callable[[int], object]
) -> tuple[np.ndarray, np.ndarray]:
    """Codes a * vocab_size + b of the pairs that occur, and how often; `lasts` start no pair."""
    found = []
    for start in range(0, tokens.size - 1, _CHUNK_TOKENS):
        stop = min(start + _CHUNK_TOKENS, tokens.size - 1)
        codes = tokens[start:stop].astype(np.int64) * vocab_size + tokens[start + 1 : stop + 1]
        inside = np.ones(codes.size, bool)
        inside[lasts[slice(*np.searchsorted(lasts, (start, stop)))] - start] = False
        found.append(_count(codes[inside], vocab_size**2))
        advance(stop - start)
    if not found:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    codes, where = np.unique(np.concatenate([codes for codes, _ in found]), return_inverse=True)
    counts = np.concatenate([counts for _, counts in found])
    return codes, np.bincount(where, weights=counts, minlength=codes.size).astype(np.int64)


def _count(codes: np.ndarray, num_codes: int) -> tuple[np.ndarray, np.ndarray]:
    if num_codes > _DENSE_CODES:
        return np.unique(codes, return_counts=True)
    table = np.bincount(codes, minlength=1)
    present = np.flatnonzero(table)
    return present, table[present]
