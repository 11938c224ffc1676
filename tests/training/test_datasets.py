"""Megatron's GPTDataset over our files: which samples come, in which order, and what is refused."""

import itertools
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.training.data import datasets
from megacpp_mcore.training.data.blend import prefixes
from megacpp_mcore.training.data.build import build
from megacpp_mcore.training.data.datasets import (
    batches,
    build_datasets,
    order_digest,
    split_documents,
)
from megacpp_mcore.training.data.files import DataError, read_pair
from megacpp_mcore.training.data.text import TextFiles
from megacpp_mcore.training.ready import verdict

EOD = 256
SEQ = 16


def corpus(tmp_path: Path, name: str = "c", count: int = 30, seed: int | None = None) -> Path:
    """Documents of 2..79 random bytes, written by our own build: with its end each is a sample of
    two tokens and their labels."""
    rng = np.random.default_rng(seed)
    folder = tmp_path / f"src-{name}"
    folder.mkdir()
    for i in range(count):
        text = rng.integers(1, 256, max(2, rng.integers(1, 80))).astype(np.uint8).tobytes()
        (folder / f"{i}.h").write_bytes(text)
    build(TextFiles([folder]), tmp_path / name)
    return tmp_path / name


def datasets_of(data_path, **changes):
    options = {
        "seq_length": SEQ,
        "num_samples": (None, None, None),
        "split": "80,20,0",
        "seed": 7,
        "vocab_size": 257,
        "eod_id": EOD,
        **changes,
    }
    return build_datasets(data_path, **options)


def all_tokens(dataset):
    return torch.stack([dataset[i]["tokens"] for i in range(len(dataset))])


def document_list(prefix):
    pair = read_pair(prefix)
    return [part.tolist() for part in np.split(pair.tokens, np.cumsum(pair.lengths)[:-1])]


class TestSamples:
    def test_an_epoch_is_the_documents_end_to_end_cut_into_samples(self, tmp_path):
        prefix = corpus(tmp_path)
        documents, (begin, end) = document_list(prefix), (0, 24)
        train, valid, test = datasets_of(prefix)
        assert test is None
        for dataset, (begin, end) in ((train, (0, 24)), (valid, (24, 30))):
            assert sorted(dataset.document_index.tolist()) == list(range(begin, end))
            stream = list(itertools.chain(*(documents[i] for i in dataset.document_index)))
            assert len(dataset) == (len(stream) - 1) // SEQ
            for position, place in enumerate(dataset.shuffle_index.tolist()):
                sample = dataset[position]
                text = stream[place * SEQ : place * SEQ + SEQ + 1]
                assert sample["tokens"].tolist() == text[:-1]
                assert sample["labels"].tolist() == text[1:]

    def test_splits_are_the_documents_split_documents_says(self, tmp_path):
        prefix = corpus(tmp_path, count=37)
        for split in ("80,20", "98,2,0", "50,25,25", "0.7,.2,0.1", "1", "0,1,0", "90, 5, 5"):
            ranges = split_documents(37, split)
            built = datasets_of(prefix, split=split, seq_length=2)
            for dataset, documents in zip(built, ranges, strict=True):
                assert (dataset is None) == (documents is None)
                if dataset is not None:
                    assert dataset.indices.tolist() == list(range(*documents))

    def test_loss_mask_and_position_ids_are_plain_unless_asked(self, tmp_path):
        train, _, _ = datasets_of(corpus(tmp_path))
        for i in range(len(train)):
            sample = train[i]
            assert set(sample) == {"tokens", "labels", "loss_mask", "position_ids"}
            assert sample["loss_mask"].tolist() == [1.0] * SEQ
            assert sample["position_ids"].tolist() == list(range(SEQ))

    def test_eod_mask_loss_and_reset_position_ids(self, tmp_path):
        prefix = corpus(tmp_path)
        train, _, _ = datasets_of(prefix, eod_mask_loss=True, reset_position_ids=True)
        ends = 0
        for i in range(len(train)):
            sample = train[i]
            tokens, positions, place = sample["tokens"].tolist(), [], 0
            for token in tokens:
                positions.append(place)
                place = 0 if token == EOD else place + 1
            assert sample["position_ids"].tolist() == positions
            assert sample["loss_mask"].tolist() == [float(token != EOD) for token in tokens]
            ends += tokens.count(EOD)
        assert ends > 10

    def test_more_samples_than_an_epoch_repeats_the_documents(self, tmp_path):
        prefix = corpus(tmp_path)
        epoch = len(datasets_of(prefix)[0])
        train, valid, _ = datasets_of(prefix, num_samples=(3 * epoch, 1, 0))
        assert len(train) >= 3 * epoch
        assert np.bincount(train.document_index, minlength=24).min() >= 3
        assert len(valid) >= 1

    def test_zero_samples_means_no_dataset(self, tmp_path):
        train, valid, test = datasets_of(corpus(tmp_path), num_samples=(5, 0, 0))
        assert train is not None and valid is None and test is None


class TestOrder:
    def test_same_seed_same_order(self, tmp_path):
        prefix = corpus(tmp_path)
        first, again = datasets_of(prefix)[0], datasets_of(prefix)[0]
        assert torch.equal(all_tokens(first), all_tokens(again))
        assert order_digest(first) == order_digest(again)
        other = datasets_of(prefix, seed=8)[0]
        assert not torch.equal(all_tokens(first), all_tokens(other))
        assert order_digest(first) != order_digest(other)

    def test_same_order_under_torch_distributed(self, tmp_path):
        prefix = corpus(tmp_path)
        alone = datasets_of(prefix, num_samples=(100, 10, 0))
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            gloo = datasets_of(prefix, num_samples=(100, 10, 0))
        finally:
            torch.distributed.destroy_process_group()
        for one, other in zip(alone[:2], gloo[:2], strict=True):
            assert torch.equal(all_tokens(one), all_tokens(other))

    def test_digest_sees_another_number_of_epochs(self, tmp_path):
        prefix = corpus(tmp_path)
        digests = {order_digest(datasets_of(prefix, num_samples=(n, 1, 0))[0]) for n in (5, 500)}
        assert len(digests) == 2


class TestBatches:
    def test_shapes_and_dtypes(self, tmp_path):
        batch = next(batches(datasets_of(corpus(tmp_path))[0], 3))
        assert {key: (tuple(value.shape), value.dtype) for key, value in batch.items()} == {
            "tokens": ((3, SEQ), torch.int64),
            "labels": ((3, SEQ), torch.int64),
            "loss_mask": ((3, SEQ), torch.float32),
            "position_ids": ((3, SEQ), torch.int64),
        }

    @pytest.mark.parametrize("size", [1, 3, 4])
    def test_every_start_gives_the_rest_of_the_whole(self, tmp_path, size):
        dataset = datasets_of(corpus(tmp_path))[0]
        whole = all_tokens(dataset)
        for start in range(len(dataset) + 1):
            found = list(batches(dataset, size, start))
            assert len(found) == (len(dataset) - start) // size
            for i, batch in enumerate(found):
                first = start + i * size
                assert torch.equal(batch["tokens"], whole[first : first + size])

    def test_batches_do_not_share_memory_with_the_dataset(self, tmp_path):
        dataset = datasets_of(corpus(tmp_path))[0]
        batch = next(batches(dataset, 1))
        before = {key: value.clone() for key, value in batch.items()}
        for value in batch.values():
            value.zero_()
        after = next(batches(dataset, 1))
        assert all(torch.equal(before[key], after[key]) for key in before)

    def test_refusals_come_at_the_call(self, tmp_path):
        dataset = datasets_of(corpus(tmp_path))[1]
        with pytest.raises(DataError, match="micro batch size 0"):
            batches(dataset, 0)
        with pytest.raises(DataError, match="cannot start at sample -1"):
            batches(dataset, 1, -1)
        with pytest.raises(DataError, match=f"cannot start at sample {len(dataset) + 1}"):
            batches(dataset, 1, len(dataset) + 1)
        with pytest.raises(DataError, match="less than one micro batch"):
            batches(dataset, len(dataset) + 1)


class TestBlend:
    def test_weights_set_the_shares(self, tmp_path):
        a, b = corpus(tmp_path, "a"), corpus(tmp_path, "b")
        train, valid, _ = datasets_of(["75", str(a), "25", str(b)], num_samples=(200, 20, 0))
        assert isinstance(train, BlendedDataset) and len(train) >= 200
        shares = np.bincount(train.dataset_index) / len(train)
        assert shares == pytest.approx([0.75, 0.25], abs=2 / len(train))
        batch = next(batches(train, 4))
        assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids"}
        assert order_digest(train) != order_digest(valid)

    def test_prefixes_alone_give_one_epoch_of_each(self, tmp_path):
        a, b = corpus(tmp_path, "a"), corpus(tmp_path, "b", 60)
        train, _, _ = datasets_of([str(a), str(b)])
        assert len(train) == len(datasets_of(a)[0]) + len(datasets_of(b)[0])
        with pytest.raises(DataError, match=rf"train split has {len(train)} samples, .* weights"):
            datasets_of([str(a), str(b)], num_samples=(len(train) + 1, 1, 0))

    @pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "x"])
    def test_bad_weights(self, tmp_path, weight):
        a = str(corpus(tmp_path, "a"))
        with pytest.raises(DataError, match=f"'{weight}' is not a weight"):
            datasets_of(["1", a, weight, a], num_samples=(5, 5, 0))

    def test_every_prefix_is_checked(self, tmp_path):
        a, b = corpus(tmp_path, "a"), corpus(tmp_path, "b")
        Path(f"{b}.bin").write_bytes(Path(f"{b}.bin").read_bytes()[:-2])
        with pytest.raises(DataError, match=r"b\.bin is .* truncated"):
            datasets_of(["1", str(a), "1", str(b)], num_samples=(5, 5, 0))

    def test_weights_need_sizes(self, tmp_path):
        a = str(corpus(tmp_path, "a"))
        with pytest.raises(DataError, match="no epoch"):
            datasets_of(["1", a, "1", a])
        assert datasets_of(["1", a, "1", a], num_samples=(5, 5, None))[2] is None
        train, valid, _ = datasets_of(["1", a, "1", a], num_samples=(5, 0, 0))
        assert len(train) >= 5 and valid is None

    def test_empty_data_path(self):
        with pytest.raises(DataError, match="data path is empty"):
            datasets_of([])

    def test_draws_that_megatron_did_not_plan_for(self, tmp_path):
        # Each of many light datasets adds one sample by rounding, and the heavy one must give more.
        light = [str(corpus(tmp_path, f"l{i}", 3, seed=i)) for i in range(12)]
        heavy = str(corpus(tmp_path, "heavy", 3, seed=99))
        path = ["1000", heavy, *itertools.chain(*(("0.001", prefix) for prefix in light))]
        one = len(datasets_of(heavy, split="1")[0])
        with pytest.raises(DataError, match="oversamples"):
            datasets_of(path, split="1", num_samples=(one, 0, 0))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (["a"], ["a"]),
        (["1", "a", "2"], ["1", "a", "2"]),  # an odd number: Megatron reads three prefixes
        (["1", "a", "2", "b"], ["a", "b"]),
        (["a", "1", "b", "2"], ["a", "1", "b", "2"]),
    ],
)
def test_every_dataset_of_a_recipe_is_looked_at(path, expected):
    """By Megatron's rule of what is a weight."""
    recipe = load_recipe("nam56r-tiny", [f"data.data_path={json.dumps(path)}"])
    assert prefixes(recipe) == expected
    refusals, notes = verdict(recipe)
    assert refusals == [] and f"no dataset yet at {', '.join(expected)}: " in notes[0]


@pytest.mark.parametrize("path", [["1", "a", "b", "c"], ["nan", "a"], ["0", "a", "1", "b"]])
def test_a_blend_without_a_weight_is_refused(path):
    recipe = load_recipe("nam56r-tiny", [f"data.data_path={json.dumps(path)}"])
    refusals, notes = verdict(recipe)
    assert "is not a weight" in refusals[0] and notes == []


class TestCache:
    def test_nothing_is_written_and_nothing_is_said_without_one(self, tmp_path, caplog):
        prefix = corpus(tmp_path)
        before = sorted(tmp_path.rglob("*"))
        with caplog.at_level(logging.WARNING):
            datasets_of(prefix)
        assert sorted(tmp_path.rglob("*")) == before
        assert caplog.records == []

    def test_gives_the_same_samples(self, tmp_path):
        prefix = corpus(tmp_path)
        wanted = all_tokens(datasets_of(prefix)[0])
        for _ in range(2):  # made, then read
            cached = datasets_of(prefix, cache_dir=tmp_path / "cache")[0]
            assert torch.equal(all_tokens(cached), wanted)
        assert len(list((tmp_path / "cache").rglob("*.npy"))) == 6

    def test_a_rebuilt_dataset_is_not_read_with_the_old_index(self, tmp_path):
        prefix = corpus(tmp_path)
        datasets_of(prefix, cache_dir=tmp_path / "cache")
        other = corpus(tmp_path, "other", 30)
        build(TextFiles([tmp_path / "src-other"]), prefix, overwrite=True)
        cached = datasets_of(prefix, cache_dir=tmp_path / "cache")[0]
        assert torch.equal(all_tokens(cached), all_tokens(datasets_of(other)[0]))

    def test_damaged_index_files(self, tmp_path):
        prefix = corpus(tmp_path)
        datasets_of(prefix, cache_dir=tmp_path / "cache")
        for path in sorted((tmp_path / "cache").rglob("*train*.npy")):
            whole = path.read_bytes()
            for size in (0, 1, 7, 20, 128, len(whole) - 1):
                path.write_bytes(whole[:size])
                with pytest.raises(DataError, match=r"index cache: .*remove it"):
                    datasets_of(prefix, cache_dir=tmp_path / "cache")
            path.write_bytes(b"x" * len(whole))
            with pytest.raises(DataError, match=r"index cache: .*remove it"):
                datasets_of(prefix, cache_dir=tmp_path / "cache")
            path.write_bytes(whole)
        assert datasets_of(prefix, cache_dir=tmp_path / "cache")

    def test_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(DataError, match="cannot use the cache folder"):
            datasets_of(corpus(tmp_path), cache_dir=tmp_path / "file")


class TestRefusals:
    def test_missing_data_says_how_to_build_it(self, tmp_path):
        with pytest.raises(DataError, match=r"x\.bin and .*x\.idx missing; .*megacpp data build"):
            datasets_of(tmp_path / "x")

    def test_damaged_data(self, tmp_path):
        prefix = corpus(tmp_path)
        path = Path(f"{prefix}.bin")
        path.write_bytes(path.read_bytes()[:-2])
        with pytest.raises(DataError, match="truncated"):
            datasets_of(prefix)

    def test_tokens_beyond_the_vocabulary(self, tmp_path):
        builder = IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=np.int32)
        builder.add_document(np.arange(300), [300])
        builder.finalize(str(tmp_path / "c.idx"))
        with pytest.raises(DataError, match="token 257 at position 257"):
            datasets_of(tmp_path / "c", split="1")

    def test_end_of_document(self, tmp_path):
        prefix = corpus(tmp_path)
        with pytest.raises(DataError, match="documents end with token 256, 0 was asked for"):
            datasets_of(prefix, eod_id=0)
        with pytest.raises(DataError, match="end-of-document id 257 is outside"):
            datasets_of(prefix, eod_id=257)

    def test_a_split_must_hold_one_sample(self, tmp_path):
        prefix = corpus(tmp_path)
        tokens = int(read_pair(prefix).lengths[24:].sum())
        assert len(datasets_of(prefix, seq_length=tokens - 1)[1]) == 1
        with pytest.raises(
            DataError, match=f"valid split of .* too small: 6 documents with {tokens}"
        ):
            datasets_of(prefix, seq_length=tokens)

    @pytest.mark.parametrize("num_samples", [(1, 1, 1), (None, None, None), (0, 0, 0)])
    def test_a_split_without_documents_does_not_hang(self, tmp_path, num_samples):
        with pytest.raises(DataError, match=r"test split of .* too small: 0 documents"):
            datasets_of(corpus(tmp_path), split="90,9.9,0.1", seq_length=2, num_samples=num_samples)

    def test_samples_of_a_split_without_share(self, tmp_path):
        with pytest.raises(DataError, match="3 samples were asked of the test split, whose share"):
            datasets_of(corpus(tmp_path), num_samples=(1, 1, 3))

    @pytest.mark.parametrize(
        "split", ["", "x", "-1,2", "1e2,1", "1,2,3,4", "50;50", "1,,2", "nan", "inf", "0,0,0", "."]
    )
    def test_split(self, tmp_path, split):
        with pytest.raises(DataError, match="split "):
            datasets_of(corpus(tmp_path), split=split)

    @pytest.mark.parametrize("seq_length", [-1, 0, 1])
    def test_sequence_length(self, tmp_path, seq_length):
        with pytest.raises(DataError, match=f"sequence length {seq_length}"):
            datasets_of(corpus(tmp_path), seq_length=seq_length)

    @pytest.mark.parametrize("num_samples", [(-1, 0, 0), (1, 2)])
    def test_num_samples(self, tmp_path, num_samples):
        with pytest.raises(DataError, match="num_samples"):
            datasets_of(corpus(tmp_path), num_samples=num_samples)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyError("a defect")])
def test_an_index_that_cannot_be_written_is_refused_in_a_line(error, tmp_path, monkeypatch):
    """Megatron raises a bare Exception for it, with the OSError as its cause; a defect is none."""

    def build(builder):
        raise Exception("Failed to write dataset materials") from error

    monkeypatch.setattr(datasets.BlendedMegatronDatasetBuilder, "build", build)
    told = "No space left on device" if isinstance(error, OSError) else "Failed to write"
    with pytest.raises(Exception, match=told) as raised:
        datasets_of([str(corpus(tmp_path))])
    assert (raised.type is DataError) == isinstance(error, OSError)
