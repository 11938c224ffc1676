"""Smoothed n-gram models, the baselines of `megacpp evaluate`."""

from collections.abc import Sequence

import numpy as np

from megacpp_mcore.inference.recipe import InferenceError

_CODES = 2**62  # an n-gram is one integer below it


def fits(order: int, vocab_size: int) -> bool:
    """Whether an n-gram of that order fits into an integer."""
    return order >= 1 and vocab_size**order < _CODES


def check_order(order: int, vocab_size: int) -> None:
    """Raises InferenceError where an n-gram of that order does not fit into an integer."""
    if not fits(order, vocab_size):
        raise InferenceError(
            f"n-grams of order {order} over a vocabulary of {vocab_size} do not fit into 62 bits: "
            "take a lower order"
        )


class NGrams:
    """Witten-Bell smoothed n-grams of every order up to n (Chen and Goodman 1998, 2.6):

        p_k(w | h) = (c(h w) + t(h) p_{k-1}(w | h')) / (c(h) + t(h)),   p_0 = 1 / vocabulary

    with t(h) the number of different tokens seen after h, and h' the context without its first
    token. Before a document there are ends of documents, so that its first tokens have contexts,
    too. Order 1 is the unigram, 2 the bigram.
    """

    def __init__(self, text: "Text", vocab_size: int) -> None:
        """Count. Raises InferenceError where an n-gram does not fit into an integer."""
        self.vocab_size, self.order = vocab_size, text.order
        check_order(text.order, vocab_size)
        if not text.targets.size:
            raise InferenceError("there is no document to count n-grams in")
        self._tables = []
        for k in range(1, text.order + 1):
            grams, counts = np.unique(text.codes(k, vocab_size), return_counts=True)
            contexts, first = np.unique(grams // vocab_size, return_index=True)
            totals = np.add.reduceat(counts, first)
            kinds = np.diff(np.append(first, grams.size))
            self._tables.append((grams, counts, contexts, totals, kinds))

    def losses(self, text: "Text") -> np.ndarray:
        """(order, tokens of all documents): the loss of each in nats, under each order's model."""
        p = np.full(text.targets.size, 1 / self.vocab_size)
        found = np.empty((self.order, p.size))
        for k, (grams, counts, contexts, totals, kinds) in enumerate(self._tables, 1):
            codes = text.codes(k, self.vocab_size)
            c = _looked_up(grams, counts, codes)
            total, t = (
                _looked_up(contexts, values, codes // self.vocab_size) for values in (totals, kinds)
            )
            seen = total > 0
            p = np.where(seen, (c + t * p) / np.where(seen, total + t, 1), p)
            found[k - 1] = -np.log(p)
        return found


class Text:
    """Documents, each with order - 1 ends of documents before it. targets: where in `tokens` their
    own tokens are."""

    def __init__(self, documents: Sequence[np.ndarray], eod: int, order: int) -> None:
        self.order = order
        pad = np.full(order - 1, eod, np.int64)
        parts = [part for document in documents for part in (pad, document)]
        self.tokens = np.concatenate(parts).astype(np.int64) if parts else pad
        own = [np.repeat((False, True), (pad.size, document.size)) for document in documents]
        self.targets = np.flatnonzero(np.concatenate(own)) if own else np.empty(0, np.int64)

    def codes(self, k: int, vocab_size: int) -> np.ndarray:
        """Each target behind the k - 1 tokens before it, as one integer of k digits."""
        codes = np.zeros(self.targets.size, np.int64)
        for back in range(k - 1, -1, -1):
            codes = codes * vocab_size + self.tokens[self.targets - back]
        return codes


def _looked_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """values at `wanted`, 0 for what is not among the sorted keys."""
    place = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
    return np.where(keys[place] == wanted, values[place], 0)
