"""Read `.bin/.idx` pairs through Megatron's own GPTDataset, on any machine.

Megatron builds the sample order with its C++ helper, which its wheel ships compiled; nothing is
compiled here. Requests for which Megatron fails an assertion, loops forever or returns a shorter
dataset (an empty split, a split smaller than one sequence, a blend with too few samples) are
refused first.
"""

import contextlib
import hashlib
import logging
import os
import pickle
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers import MegatronTokenizer

from megacpp_mcore.files import sha256_file
from megacpp_mcore.training.data.blend import parse_data_path, read_checked
from megacpp_mcore.training.data.files import DataError, TokenFiles, paths

TokenDataset = GPTDataset | BlendedDataset

SAMPLE_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def build_datasets(
    data_path: str | os.PathLike | Sequence[str],
    *,
    seq_length: int,
    num_samples: tuple[int | None, int | None, int | None],
    split: str,
    seed: int,
    vocab_size: int,
    eod_id: int,
    eod_mask_loss: bool = False,
    reset_position_ids: bool = False,
    cache_dir: str | os.PathLike | None = None,
) -> tuple[TokenDataset | None, TokenDataset | None, TokenDataset | None]:
    """The (train, valid, test) datasets of one prefix or of a blend. Raises DataError.

    No attention masks are made: the model's attention is causal by itself. Works without
    `torch.distributed`; if that is initialised, call this on every rank.

    Args:
        data_path: a prefix, or a list as for Megatron's `--data-path`: prefixes, or alternating
            weights and prefixes (`["30", "a", "70", "b"]`).
        seq_length: tokens per sample; a sample reads one token more, for the labels.
        num_samples: minimum samples of each split, rounded up to whole epochs (a split of 2000
            samples has 2000 if 10 are requested). None: one epoch. 0: the dataset is None. Beyond
            one epoch the order depends on this number: a resumed run must use the same.
        split: Megatron's `--split`, such as `"98,2,0"`: shares of the documents, split by position;
            the dataset of share 0 is None.
        seed: for the order of documents and samples.
        vocab_size: all tokens are read, and must be below it.
        eod_mask_loss: no loss where the input is `eod_id` and the label is the first token of the
            next document.
        reset_position_ids: position ids restart after `eod_id`.
        cache_dir: where Megatron keeps its index files; None: in memory only.
    """
    _check_sizes(seq_length, num_samples)
    prefixes, weights = parse_data_path(data_path)
    pairs = [read_checked(prefix, vocab_size, eod_id) for prefix in prefixes]
    ranges = [split_documents(pair.lengths.size, split) for pair in pairs]
    _check_splits(pairs, ranges, seq_length, num_samples)
    sizes = [n if documents else 0 for documents, n in zip(ranges[0], num_samples, strict=True)]
    if weights is not None and None in sizes:
        raise DataError("a blend with weights has no epoch: num_samples must not be None")
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=(prefixes, weights),
        split=split,
        path_to_cache=_cache_folder(cache_dir, prefixes),
        tokenizer=_tokenizer(vocab_size, eod_id),
        reset_position_ids=reset_position_ids,
        reset_attention_mask=False,
        eod_mask_loss=eod_mask_loss,
        create_attention_mask=False,
    )
    built = _build(config, sizes)
    return tuple(None if size == 0 else ds for ds, size in zip(built, sizes, strict=True))


def split_documents(num_documents: int, split: str) -> list[tuple[int, int] | None]:
    """Documents [begin, end) of train, valid and test, as Megatron splits them; None for share 0.

    Raises DataError for a split that is not one to three shares separated by commas.
    """
    shares = [share.strip() for share in split.split(",")]
    if len(shares) > 3 or not all(re.fullmatch(r"\d+\.?\d*|\.\d+", share) for share in shares):
        raise DataError(
            f"split {split!r}: give up to three shares of train, valid and test, such as '98,2,0'"
        )
    if not any(float(share) for share in shares):
        raise DataError(f"split {split!r} gives every split the share 0; make one positive")
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    return [
        bounds and (round(bounds[0] * num_documents), round(bounds[1] * num_documents))
        for bounds in matrix
    ]


def batches(
    dataset: TokenDataset, micro_batch_size: int, start_sample: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Micro batches in the dataset's order, starting at `start_sample` (samples consumed so far).

    Each is a dict of [micro_batch_size, seq_length] tensors: tokens, labels and position_ids int64,
    loss_mask float32. An incomplete last batch is dropped, as by Megatron's samplers. Starting at n
    gives exactly what a full iteration yields after n samples.

    Raises DataError, at the call, for a size below 1, a start outside the dataset, and a dataset
    with less than one batch.
    """
    if micro_batch_size < 1:
        raise DataError(f"micro batch size {micro_batch_size}: at least 1 is needed")
    if len(dataset) < micro_batch_size:
        raise DataError(
            f"the dataset has {len(dataset)} samples, less than one micro batch of "
            f"{micro_batch_size}"
        )
    if not 0 <= start_sample <= len(dataset):
        raise DataError(f"cannot start at sample {start_sample}: the dataset has {len(dataset)}")
    return _batches(dataset, micro_batch_size, start_sample)


def order_digest(dataset: TokenDataset) -> str:
    """Hex sha256 of the order of samples: the document and offset at which each one starts.

    Runs with equal digests of the same files see the same samples in the same order. It is stored
    in checkpoints, so that a resumed run detects changed data.
    """
    digest = hashlib.sha256()
    parts = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
    if isinstance(dataset, BlendedDataset):
        digest.update(np.ascontiguousarray(dataset.dataset_index))
        digest.update(np.ascontiguousarray(dataset.dataset_sample_index))
    for part in parts:
        for index in (part.document_index, part.sample_index, part.shuffle_index):
            digest.update(np.ascontiguousarray(index))
    return digest.hexdigest()


def _batches(
    dataset: TokenDataset, size: int, start_sample: int
) -> Iterator[dict[str, torch.Tensor]]:
    for first in range(start_sample, len(dataset) - size + 1, size):
        samples = [dataset[index] for index in range(first, first + size)]
        yield {key: torch.stack([sample[key] for sample in samples]) for key in SAMPLE_KEYS}


def _check_sizes(seq_length: int, num_samples: Sequence[int | None]) -> None:
    if seq_length < 2:  # Megatron's C++ helper asserts this, which would end the process
        raise DataError(f"sequence length {seq_length}: at least 2 is needed")
    if len(num_samples) != len(Split) or any(n is not None and n < 0 for n in num_samples):
        raise DataError(
            f"num_samples {num_samples}: give train, valid and test, each None or at least 0"
        )


def _check_splits(
    pairs: Sequence[TokenFiles],
    ranges: Sequence[list[tuple[int, int] | None]],
    seq_length: int,
    num_samples: Sequence[int | None],
) -> None:
    for pair, bounds in zip(pairs, ranges, strict=True):
        for kind, documents, wanted in zip(Split, bounds, num_samples, strict=True):
            if documents is None:
                if wanted:
                    raise DataError(
                        f"{wanted} samples were asked of the {kind.name} split, whose share is 0"
                    )
                continue
            begin, end = documents
            tokens = int(pair.lengths[begin:end].sum(dtype=np.int64))
            # Megatron repeats epochs until it has enough tokens: forever if there are none.
            if tokens < seq_length + 1:
                raise DataError(
                    f"the {kind.name} split of {pair.prefix} is too small: {end - begin} documents "
                    f"with {tokens} tokens, one sample of sequence length {seq_length} needs "
                    f"{seq_length + 1}; give it a larger share, share 0, or more data"
                )


def _cache_folder(cache_dir: str | os.PathLike | None, prefixes: Sequence[str]) -> str:
    """A cache folder named by the digest of the `.idx` files' contents.

    Megatron's own cache key has only their paths, so a rebuilt dataset would be read with the old
    index.
    """
    if cache_dir is None:
        return ""  # for None, Megatron writes a folder next to the data; for "", nothing
    content = "".join(sha256_file(paths(prefix)[1]) for prefix in prefixes)
    folder = os.path.join(cache_dir, hashlib.sha256(content.encode()).hexdigest()[:16])
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot use the cache folder {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise DataError(f"cannot write to the cache folder {folder}")
    return folder


def _tokenizer(vocab_size: int, eod_id: int) -> Any:
    """As `--tokenizer-type NullTokenizer --vocab-size N --null-tokenizer-eod-id E`."""
    return MegatronTokenizer.from_pretrained(
        metadata_path={"library": "null-text"}, vocab_size=vocab_size, eod_id=eod_id
    )


@contextlib.contextmanager
def _no_cache_warning() -> Iterator[None]:
    """Suppress Megatron's warning that it cannot save an index, when it is not meant to."""
    loggers = [logging.getLogger(cls.__module__) for cls in (GPTDataset, BlendedDataset)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _build(config: GPTDatasetConfig, sizes: list[int | None]) -> list[TokenDataset | None]:
    builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config)
    try:
        with _no_cache_warning():
            built = builder.build()
    except IndexError as error:  # a blend that needs more samples than Megatron planned
        raise DataError(str(error)) from error
    except Exception as error:
        # Megatron raises a bare Exception because of an OSError where ranks are initialised.
        cause = error.__cause__ if type(error) is Exception else error
        if not isinstance(cause, OSError | EOFError | ValueError | pickle.UnpicklingError):
            raise
        where = f" (index cache: {config.path_to_cache}; remove it if it is damaged)"
        raise DataError(
            f"Megatron cannot build the datasets: {cause}{where if config.path_to_cache else ''}"
        ) from error
    for kind, dataset, size in zip(Split, built, sizes, strict=True):
        if dataset is not None and size is not None and len(dataset) < size:
            raise DataError(
                f"the {kind.name} split has {len(dataset)} samples, {size} were asked for: a blend "
                f"without weights gives one epoch; give weights to repeat it"
            )
    return built
