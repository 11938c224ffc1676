"""Megatron's tokenizer object of a recipe's arguments: ids and texts of `megacpp data build`."""

import sys

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.text import libraries
from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.training.cpu.megatron_setup import megatron_args
from megacpp_mcore.training.data.blend import check_data
from megacpp_mcore.training.data.build import build
from megacpp_mcore.training.data.files import DataError
from megacpp_mcore.training.data.text import TextFiles, TextOptions
from megacpp_mcore.training.gpu.train import _takes_transformers

pytest.importorskip("tokenizers", reason="the extra [tokenizer] is not installed")
from megacpp_mcore.training.data import megatron_tokenizer
from megacpp_mcore.training.data.tokenizer import EOD, TextTokenizer, TokenizerError, train

TEXT = """\
#include <vector>
template <typename T> T* get(std::vector<T>& all) { return all.size() ? &all[0] : 0; }  // größe
"""
TEXTS = [TEXT, "", "int x;\r\n\t  y->z::w();", f'"{EOD}"', "大\0🙂 é"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    out = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train([TEXT.encode() * 4], 280, out, progress=False)
    return out


@pytest.fixture
def settings(path):
    """settings(*changed): a recipe that names the tokenizer."""
    ours = TextTokenizer.read(path)
    named = ["data.tokenizer_type=HuggingFaceTokenizer", f"data.tokenizer_model={path}",
             f"data.tokenizer_sha256={ours.sha256}", "model.vocab_size=280",
             f"data.null_tokenizer_eod_id={ours.eod_id}"]  # fmt: skip
    return lambda *changed: load_recipe("nam56r-tiny", [*named, *changed])


@pytest.fixture
def served(monkeypatch):
    """Only in this test; transformers is not there."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(libraries, "HuggingFaceTokenizer", libraries.HuggingFaceTokenizer)
    megatron_tokenizer.serve()
    megatron_tokenizer.serve()  # again makes no difference


def test_megatrons_tokenizer_gives_the_ids_and_texts_of_the_data(settings, path, served, tmp_path):
    found = build_tokenizer(megatron_args(lower(settings()).argv))
    assert isinstance(found, MegatronTokenizerText)
    ours = TextTokenizer.read(path)
    assert (found.vocab_size, found.eod) == (ours.vocab_size, ours.eod_id) == (280, 0)
    for text, tokens in zip(TEXTS, ours.documents([t.encode() for t in TEXTS]), strict=True):
        assert [*found.tokenize(text), found.eod] == tokens.tolist()
        assert found.detokenize(tokens[:-1]) == text
    assert found.detokenize([*found.tokenize("a"), found.eod], skip_special_tokens=True) == "a"
    assert found.detokenize([*found.tokenize("a"), found.eod]) == f"a{EOD}"
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.cpp").write_text(TEXT)
    build(TextFiles([tmp_path / "src"], options=TextOptions(ours)), tmp_path / "c", quiet=True)
    dataset = IndexedDataset(str(tmp_path / "c"))  # its documents are views of it
    *ids, end = dataset[0].tolist()
    assert found.detokenize(ids) == TEXT and end == found.eod
    assert found.inv_vocab[end] == EOD and len(found.vocab) == found.vocab_size


def test_a_recipe_names_the_tokenizer_of_its_digest(settings, path):
    mock = "data.mock_data=true"
    check_data(settings(mock, "data.data_path=null"))
    other = f"data.tokenizer_sha256={'0' * 64}"
    for changed in (other, "data.null_tokenizer_eod_id=1", "model.vocab_size=281"):
        key = changed.partition("=")[0]
        with pytest.raises(DataError, match=rf"{path} has .*: set {key}="):
            check_data(settings(mock, "data.data_path=null", changed))
    with pytest.raises(TokenizerError, match=r"cannot read the tokenizer .*nowhere\.json"):
        check_data(settings(mock, "data.data_path=null", "data.tokenizer_model=nowhere.json"))


def test_what_the_vocabulary_of_a_dataset_cannot_take_is_refused(path):
    made = megatron_tokenizer.TokenizerJson(str(path), use_fast=True, additional_special_tokens=[])
    with pytest.raises(TokenizerError, match="no more special tokens"):
        made.add_special_tokens({"pad_token": "<pad>"})
    with pytest.raises(TokenizerError, match="without additional_special_tokens"):
        megatron_tokenizer.TokenizerJson(str(path), additional_special_tokens=["<pad>"])
    pieces = made.text_to_tokens(TEXT)
    assert made.tokens_to_ids(pieces) == made.text_to_ids(TEXT)
    assert made.ids_to_tokens(np.array(made.text_to_ids(TEXT))) == pieces
    assert made.tokens_to_text(pieces) == TEXT


def test_another_tokenizer_of_hugging_face_is_megatrons(served, monkeypatch):
    monkeypatch.setattr(libraries.HuggingFaceTokenizer, "of_hub", lambda path, **how: (path, how))
    assert libraries.HuggingFaceTokenizer("gpt2", use_fast=True) == ("gpt2", {"use_fast": True})


@pytest.mark.parametrize(
    ("named", "takes"),
    [
        (["--tokenizer-type", "NullTokenizer"], False),
        (["--tokenizer-type", "NullTokenizer", "--tokenizer-model", "a.json"], True),
        (["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "a.json"], False),
        (["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "gpt2"], True),
        (["--tokenizer-type", "TikTokenizer", "--tokenizer-model", "a.json"], True),
        (["--tokenizer-type", "NullTokenizer", "--tokenizer-metadata", "m.json"], True),
    ],
)
def test_transformers_is_left_alone_for_ours(named, takes):
    assert _takes_transformers([*named, "--seq-length", "8"]) == takes
