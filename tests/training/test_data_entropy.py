"""corpus_entropy against its definition, counted pair by pair."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megacpp_mcore.training.data import entropy
from megacpp_mcore.training.data.entropy import corpus_entropy
from megacpp_mcore.training.data.files import DataError


def write(prefix, documents):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def brute_force(documents):
    unigrams = Counter(token for document in documents for token in document)
    pairs = Counter(pair for d in documents for pair in itertools.pairwise(d))
    firsts = Counter(first for d in documents for first in d[:-1])
    total, total_pairs = unigrams.total(), pairs.total()
    return (
        -sum(c / total * math.log(c / total) for c in unigrams.values()),
        -sum(c / total_pairs * math.log(c / firsts[a]) for (a, _), c in pairs.items()),
    )


documents_strategy = st.lists(
    st.lists(st.sampled_from([0, 1, 2, 65, 256, 65535]), min_size=1, max_size=12),
    min_size=1,
    max_size=8,
).filter(lambda documents: any(len(document) > 1 for document in documents))


@settings(deadline=None, max_examples=60)
@given(documents=documents_strategy, chunk=st.integers(1, 9), dense=st.booleans())
def test_against_brute_force(tmp_path_factory, documents, chunk, dense):
    prefix = write(tmp_path_factory.mktemp("corpus") / "c", documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entropy, "_CHUNK_TOKENS", chunk)
        # 65535**2 pairs are always sorted; without that token, a table unless it is forbidden
        patch.setattr(entropy, "_DENSE_CODES", 1 << 24 if dense else 0)
        # sums of at most 100 terms below log(100), in fp64
        assert corpus_entropy(prefix) == pytest.approx(brute_force(documents), abs=1e-13)


def test_of_a_range_of_documents(tmp_path):
    rng = np.random.default_rng()
    documents = [rng.integers(0, 5, rng.integers(2, 30)).tolist() for _ in range(20)]
    prefix = write(tmp_path / "c", documents)
    for begin, end in [(0, 20), (0, 1), (19, 20), (3, 11)]:
        expected = brute_force(documents[begin:end])
        assert corpus_entropy(prefix, (begin, end)) == pytest.approx(expected, abs=1e-13)


def test_known_values(tmp_path):
    # Every token tells the next one; 4 tokens equally often.
    prefix = write(tmp_path / "c", [[0, 1, 2, 3]] * 5)
    assert corpus_entropy(prefix) == pytest.approx((math.log(4), 0.0), abs=1e-13)


def test_no_pair_crosses_documents(tmp_path):
    # Within documents 1 is always followed by 2; across them, a 2 by a 1 and a 3 by turns.
    prefix = write(tmp_path / "c", [[1, 2], [3, 2]] * 10)
    assert corpus_entropy(prefix)[1] == 0.0


@pytest.mark.parametrize("documents", [(-1, 2), (0, 4), (2, 2), (2, 1), (3, 3)])
def test_range_outside_the_corpus(tmp_path, documents):
    prefix = write(tmp_path / "c", [[1, 2], [3, 4], [5, 6]])
    with pytest.raises(DataError, match="are not a range of"):
        corpus_entropy(prefix, documents)


def test_documents_of_one_token_have_no_bigram(tmp_path):
    prefix = write(tmp_path / "c", [[256], [256]])
    with pytest.raises(DataError, match=r"no document .* has two tokens"):
        corpus_entropy(prefix)
