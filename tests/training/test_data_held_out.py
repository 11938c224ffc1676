"""Folders that are held out whole: as near to the share asked for as whole folders allow."""

import itertools
import json
import random

import numpy as np
import pytest

from megacpp_mcore import cli
from megacpp_mcore.training.data import resumable
from megacpp_mcore.training.data.build import build
from megacpp_mcore.training.data.files import DataError, read_pair
from megacpp_mcore.training.data.held_out import PARTS, nearest
from megacpp_mcore.training.data.text import TextFiles, TextOptions

UNLIKE = {"huge": 700, "large": 180, "middle": 60, "small": 31, "less": 19, "tiny": 9, "least": 1}


@pytest.fixture
def unlike(tmp_path):
    """Folders of unlike sizes, and one of nothing."""
    for name, size in {**UNLIKE, "none": 0}.items():
        (tmp_path / "src" / name).mkdir(parents=True)
        for part in range(2):
            text = name[:2] * 100 + str(part)
            (tmp_path / f"src/{name}/{part}.h").write_text((text * size)[: size * 100])
    return tmp_path / "src"


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_of_folders_is_nearer(seed):
    """But for the sums that count as one, at each of the folders."""
    drawn = random.Random(seed)
    sizes = [int(10 ** drawn.uniform(0, 6)) for _ in range(drawn.randrange(2, 10))]
    share, total = drawn.uniform(0.01, 0.99), sum(sizes)
    best = min(
        abs(sum(some) - share * total)
        for count in range(1, len(sizes))
        for some in itertools.combinations(sizes, count)
    )
    chosen = nearest(sizes, share)
    assert 0 < len(set(chosen)) == len(chosen) < len(sizes)
    found = abs(sum(sizes[index] for index in chosen) - share * total)
    assert found <= best + len(sizes) * total / PARTS


def test_some_folder_is_left_to_train_on():
    assert len(nearest([5, 5], 0.99)) == 1 and nearest([1, 1000], 0.9) == [1]


@pytest.mark.parametrize("told", [1, {}, {"folders": 1, "names": [1], "documents": 1, "tokens": 1},
                                  {"folders": 1, "names": [], "documents": -1, "tokens": 1},
                                  {"folders": 1, "names": [], "documents": 1}])  # fmt: skip
def test_a_manifest_that_tells_other_things_of_them_is_refused(unlike, tmp_path, told):
    build(TextFiles([unlike]), tmp_path / "c", quiet=True)
    manifest = json.loads((tmp_path / "c.json").read_text())
    (tmp_path / "c.json").write_text(json.dumps({**manifest, "held_out": told}))
    with pytest.raises(DataError, match="held_out is"):
        read_pair(tmp_path / "c")


@pytest.mark.slow
def test_many_folders_are_chosen_soon_and_differently_by_their_order():
    drawn = random.Random(0)
    sizes = [drawn.randrange(1, 10**7) for _ in range(20_000)]
    chosen = nearest(sizes, 0.05)
    assert abs(sum(sizes[i] for i in chosen) / sum(sizes) - 0.05) <= 1 / PARTS
    other = nearest(sizes[::-1], 0.05)
    assert {sizes[i] for i in chosen} != {sizes[::-1][i] for i in other}


@pytest.mark.parametrize("seed", ["1234", "1", "2", "3"])
def test_the_share_is_kept_with_folders_of_unlike_sizes_and_told(unlike, tmp_path, seed, capsys):
    prefix = str(tmp_path / "c")
    words = ["data", "build", str(unlike), "--out", prefix, "--held-out-folders", "0.05"]
    assert cli.main([*words, "--seed", seed, "--quiet"]) == 0
    said = capsys.readouterr().out
    pair = read_pair(prefix)
    train, held, _ = map(int, pair.manifest["split"].split(","))
    tokens = int(pair.lengths[train:].sum())
    assert tokens / pair.tokens.size == pytest.approx(0.05, abs=0.001)
    told = pair.manifest["held_out"]
    assert (told["documents"], told["tokens"], told["folders"]) == (
        held,
        tokens,
        len(told["names"]),
    )
    assert sum(UNLIKE[name] for name in told["names"]) == 50
    share = f"{100 * tokens / pair.tokens.size:.2f} % of the tokens, {held} documents of "
    assert f"{share}{told['folders']} folders: {', '.join(told['names'])}\n" in said
    assert f"data.split={train},{held},0" in said
    starts = np.cumsum(pair.lengths)[train - 1 : -1]
    assert {chr(pair.tokens[at]) + chr(pair.tokens[at + 1]) for at in starts} == {
        name[:2] for name in told["names"]
    }


def test_a_build_that_goes_on_holds_out_the_same(unlike, tmp_path, monkeypatch):
    options = TextOptions(held_out=0.05)
    whole = build(TextFiles([unlike], options=options), tmp_path / "whole", quiet=True)
    monkeypatch.setattr(resumable, "_COMMIT_TOKENS", 1)
    source, real = TextFiles([unlike], options=options), TextFiles.batches

    def one_batch(self, advance):
        yield next(real(self, advance))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TextFiles, "batches", one_batch)
        build(source, tmp_path / "c", quiet=True, resume=True)
    again = TextFiles([unlike], options=options)
    assert build(again, tmp_path / "c", quiet=True, resume=True) == whole
    assert again.earlier_bytes > 0 and json.loads((tmp_path / "c.json").read_text()) == whole


def test_one_folder_with_text_cannot_be_split(tmp_path):
    for name, text in (("a", "int x;"), ("b", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f.h").write_text(text)
    with pytest.raises(DataError, match="all files are in one folder, a: a split by folder needs"):
        TextFiles([tmp_path], options=TextOptions(held_out=0.5))
