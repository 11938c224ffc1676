"""Evaluation: losses of windows, n-grams by hand, kinds of files, and the command."""

import json
import math
import re
from collections import Counter

import numpy as np
import pytest
import torch

from megacpp_mcore import cli
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.inference import evaluate
from megacpp_mcore.inference.loading import loaded
from megacpp_mcore.inference.ngrams import NGrams, Text
from megacpp_mcore.inference.trained import trained
from megacpp_mcore.training.data.build import build
from megacpp_mcore.training.data.datasets import split_documents
from megacpp_mcore.training.data.files import DataError, kinds_of, packed_kinds, read_pair
from megacpp_mcore.training.data.text import TextFiles

EOD, VOCABULARY = 4, 5


def witten_bell(text, order, context, token):
    """The definition, by counting in lists."""
    if order == 0:
        return 1 / VOCABULARY
    context = context[len(context) - (order - 1) :]
    follows = Counter()
    for document in text:
        padded = [EOD] * 8 + document
        for place in range(8, len(padded)):
            if padded[place - order + 1 : place] == context:
                follows[padded[place]] += 1
    below = witten_bell(text, order - 1, context[1:], token)
    total, kinds = sum(follows.values()), len(follows)
    return (follows[token] + kinds * below) / (total + kinds) if total else below


@pytest.mark.parametrize("order", [1, 2, 4])
def test_ngrams_are_the_definitions(order):
    counted = [[0, 1, 0, 1, 2, EOD], [1, 1, EOD], [3, EOD]]
    judged = [[0, 1, 2, 2, EOD], [EOD], [2, 3, 0, 1, EOD]]
    model = NGrams(Text([np.array(d, np.uint16) for d in counted], EOD, order), VOCABULARY)
    found = model.losses(Text([np.array(d, np.uint16) for d in judged], EOD, order))
    assert found.shape == (order, 11)
    for k in range(1, order + 1):
        wanted = [
            -math.log(witten_bell(counted, k, [EOD] * 8 + document[:place], document[place]))
            for document in judged
            for place in range(len(document))
        ]
        np.testing.assert_allclose(found[k - 1], wanted, rtol=1e-12)


def test_an_ngrams_chances_are_one_together():
    counted = [np.array([0, 1, 0, 1, 2, EOD], np.uint16)]
    model = NGrams(Text(counted, EOD, 3), VOCABULARY)
    for context in ([0, 1], [3, 3], [EOD, EOD]):
        every = [np.array([*context, token], np.uint16) for token in range(VOCABULARY)]
        chances = [np.exp(-model.losses(Text([document], EOD, 3))[:, -1]) for document in every]
        np.testing.assert_allclose(np.sum(chances, axis=0), 1, rtol=1e-12)


def test_an_order_that_does_not_fit_is_refused():
    with pytest.raises(MegacppError, match="take a lower order"):
        NGrams(Text([np.array([1, 2])], 0, 4), 65536)
    with pytest.raises(MegacppError, match="no document"):
        NGrams(Text([], 0, 2), 257)


@pytest.mark.slow
def test_losses_are_a_whole_forward_passs(small_run, corpus):
    """Of a document in windows, one after the other, and of others in one batch with it."""
    documents = [np.frombuffer(bytes(range(n % 250)) * 3, np.uint8).astype(np.uint16)
                 for n in (7, 30, 2, 32, 33)]  # fmt: skip
    with loaded(trained(small_run), device="cpu") as found, torch.no_grad():
        length = found.recipe.model.seq_length
        losses, places = evaluate.token_losses(found, documents)
        for document, loss, place in zip(documents, losses, places, strict=True):
            ids = torch.tensor([256, *document.tolist()])
            for first in range(0, document.size, length):
                window = ids[first : first + length + 1]
                wanted = torch.nn.functional.cross_entropy(
                    found.model.next_token_logits(window[None, :-1])[0],
                    window[1:],
                    reduction="none",
                )
                np.testing.assert_allclose(
                    loss[first : first + length], wanted.numpy(), rtol=0, atol=1e-5
                )
                size = len(window) - 1
                assert place[first : first + length].tolist() == [*range(1, size + 1)]


def test_what_is_judged(corpus, monkeypatch):
    pair = read_pair(corpus)
    count = pair.lengths.size
    recipe = {"data": {"data_path": [str(corpus)], "split": "90,10,0"}}
    begin, end = split_documents(count, "90,10,0")[1]
    found = evaluate.select(pair, recipe, None)
    assert (found.begin, found.end) == (begin, end) and "held out" in found.why
    other = {"data": {"data_path": ["elsewhere"], "split": "90,10,0"}}
    assert evaluate.select(pair, other, None).end == count
    blend = {"data": {"data_path": ["0.5", "elsewhere", "0.5", str(corpus)], "split": "90,10,0"}}
    assert evaluate.select(pair, blend, None) == found
    monkeypatch.chdir(corpus.parent)
    for spelled in (corpus.name, f"./{corpus.name}", f"../{corpus.parent.name}/{corpus.name}"):
        assert evaluate.select(read_pair(spelled), recipe, None) == found
    assert evaluate.select(pair, recipe, (1, 3)) == evaluate.Selection(1, 3, "as asked")
    with pytest.raises(MegacppError, match=f"has 0:{count}"):
        evaluate.select(pair, recipe, (3, count + 1))
    outside = evaluate.documents_outside(pair, evaluate.Selection(2, 4, ""), 10**9)
    assert len(outside) == count - 2
    assert np.array_equal(outside[2], pair.tokens[pair.lengths[:4].sum() :][: pair.lengths[4]])


class TestKinds:
    def test_a_dataset_knows_its_documents_files(self, tmp_path):
        for name, text in (("a.h", "int a;"), ("b.CPP", "b"), ("c", "c"), ("d.h", "dd")):
            (tmp_path / name).write_text(text)
        build(TextFiles([tmp_path]), tmp_path / "out", quiet=True)
        pair = read_pair(tmp_path / "out", verify_hashes=True)
        kinds = kinds_of(pair)
        ends = np.cumsum(pair.lengths)
        texts = [bytes(pair.tokens[e - n : e - 1].astype(np.uint8)).decode()
                 for e, n in zip(ends, pair.lengths, strict=True)]  # fmt: skip
        assert dict(zip(texts, kinds, strict=True)) == {
            "int a;": ".h", "b": ".cpp", "c": "", "dd": ".h"
        }  # fmt: skip

    def test_damaged_ones_are_refused(self, tmp_path):
        (tmp_path / "a.h").write_text("a")
        build(TextFiles([tmp_path]), tmp_path / "out", quiet=True)
        path = tmp_path / "out.json"
        whole = json.loads(path.read_text())
        for kinds in (3, {"names": [".h"]}, {"names": [], **packed_kinds([".h"])} | {"names": []},
                      packed_kinds([".h", ".h"]), {"names": [".h"], "documents": "!"}):  # fmt: skip
            path.write_text(json.dumps(whole | {"kinds": kinds}))
            with pytest.raises(DataError, match="kinds of its documents are damaged"):
                kinds_of(read_pair(tmp_path / "out"))
        del whole["kinds"]
        path.write_text(json.dumps(whole))
        assert kinds_of(read_pair(tmp_path / "out")) is None

    def test_none_where_there_are_too_many(self):
        assert packed_kinds([]) is None
        assert packed_kinds([f".{n}" for n in range(256)]) is None


def check_page(text, found):
    """Every position is a point, at the height of its loss; every model and kind is a bar."""
    assert text.startswith("<!DOCTYPE html>") and "http" not in text and "<script" not in text
    points = [
        tuple(map(float, p.split(","))) for p in re.search(r'points="([^"]+)"', text)[1].split()
    ]
    assert len(points) == len(found["positions"])
    levels = [float(y) for y in re.findall(r'd="M60 ([\d.]+)H392"[^>]*dasharray', text)]
    assert len(levels) == len(found["baselines"])
    losses = [row["loss"] for row in (*found["positions"], *found["baselines"])]
    heights = [y for _, y in points] + levels
    tall = (max(heights) - min(heights)) / (max(losses) - min(losses))
    for loss, y in zip(losses, heights, strict=True):
        assert y == pytest.approx(min(heights) + (max(losses) - loss) * tall, abs=0.11)
    octaves = [math.log2(row["to"]) for row in found["positions"]]
    for octave, (x, _) in zip(octaves, points, strict=True):
        share = (octave - octaves[0]) / (octaves[-1] - octaves[0])
        assert x == pytest.approx(60 + share * 332, abs=0.11)
    widths = [float(w) for w in re.findall(r'style="width:([\d.]+)%', text)]
    models = [found["bits_per_byte"], *(row["bits_per_byte"] for row in found["baselines"])]
    kinds = [row["bits_per_byte"] for row in found["kinds"]]
    expected = [100 * bits / max(group) for group in (models, kinds) for bits in group]
    assert widths == pytest.approx(expected, abs=0.06)
    for row in (*found["baselines"], *found["kinds"]):
        assert row.get("name", row.get("kind")) in text


@pytest.mark.slow
def test_the_command(small_run, corpus, tmp_path, capsys):
    words = ["evaluate", str(small_run), "--data", str(corpus), "--documents", "0:3",
             "--tokens", "6000", "--order", "3"]  # fmt: skip
    page = tmp_path / "x.html"
    assert cli.main([*words, "--json", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    check_page(page.read_text(), found)
    rows = found["positions"]
    assert sum(row["tokens"] for row in rows) == found["tokens"]
    mean = sum(row["tokens"] * row["loss"] for row in rows) / found["tokens"]
    assert mean == pytest.approx(found["loss"], rel=1e-6)
    bits = found["loss"] * found["tokens"] / math.log(2) / found["bytes"]
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-9)
    assert found["bytes"] == found["tokens"] - found["documents"]
    assert [row["kind"] for row in found["kinds"]] == [".py"]
    names = [row["name"] for row in found["baselines"]]
    losses = [row["loss"] for row in found["baselines"]]
    assert names == ["unigram", "bigram", "3-gram"] and losses == sorted(losses, reverse=True)
    assert found["loss"] > losses[0]  # two steps of training are less than counting
    assert cli.main(words) == 0
    page = capsys.readouterr().out
    assert f"{found['bits_per_byte']:.4f}" in page and "3-gram" in page and ".py" in page


def test_refusals(small_run, corpus, tmp_path, capsys):
    words = ["evaluate", str(small_run), "--data", str(corpus)]
    for more, message in [
        (["--documents", "3"], "expected A:B"),
        (["--tokens", "0"], "at least 1"),
        (["--documents", "0:3", "--order", "12"], "order 12 over a vocabulary of 257 do not fit"),
        (["--data", str(tmp_path / "none")], "no dataset at"),
    ]:
        assert cli.main([*words, *more]) == 2
        assert message in capsys.readouterr().err
