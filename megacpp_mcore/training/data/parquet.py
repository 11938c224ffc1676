"""Parquet shards as documents: one document per row, read one row group at a time."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megacpp_mcore.training.data.files import DataError
from megacpp_mcore.training.data.sources import describe_sources, find_files
from megacpp_mcore.training.data.text import (
    BYTE_EOD_ID,
    BYTE_VOCAB_SIZE,
    MAX_DOCUMENT_TOKENS,
    byte_tokens,
)

MAX_VOCAB_SIZE = 2**16  # the .bin is uint16

_BATCH_ROWS = 1024


class ParquetShards:
    """Documents from one column of the shards, in shard and row order.

    Rows are not shuffled, so Megatron's `--split` holds out the last ones: shuffle the shards first
    if their order is meaningful.

    `kind` "text": a string or binary column, as byte-level tokens with an end of document.
    `kind` "tokens": a column of integer lists, each id in [0, vocab_size), written unchanged; with
    `append_eod`, `eod_id` is appended to every row. Null and empty rows are left out and counted.
    """

    unit = "row"
    max_tokens = None  # unknown before reading the column

    def __init__(
        self,
        sources: Sequence[str | os.PathLike],
        column: str,
        kind: Literal["text", "tokens"],
        *,
        include: Sequence[str] = (),
        vocab_size: int = BYTE_VOCAB_SIZE,
        eod_id: int = BYTE_EOD_ID,
        append_eod: bool = True,
    ) -> None:
        """Find the shards and check the column in each footer. Raises DataError."""
        if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
            raise DataError(
                f"vocabulary size {vocab_size} is not in 1..{MAX_VOCAB_SIZE}: the .bin is uint16"
            )
        if not 0 <= eod_id < vocab_size:
            raise DataError(
                f"end-of-document id {eod_id} is outside the vocabulary, 0..{vocab_size - 1}"
            )
        files, self._passed_over = find_files(sources, include)
        named = {Path(source) for source in sources}
        self.paths = [f.path for f in files if f.path.suffix == ".parquet" or f.path in named]
        self._passed_over["not a Parquet shard"] += len(files) - len(self.paths)
        if not self.paths:
            raise DataError(f"no .parquet file in {', '.join(map(str, sources))}")
        self._sources = describe_sources(sources)
        self._column, self._kind = column, kind
        self.vocab_size, self.eod_id, self._append_eod = vocab_size, eod_id, append_eod
        self._rows = {shard: self._check_footer(shard) for shard in self.paths}
        self.total = self.max_documents = sum(self._rows.values())

    def documents(self, advance: Callable[[int], Any]) -> Iterator[np.ndarray]:
        """Each document as uint16 tokens; `advance` gets the rows read since the last call.

        `skipped` is complete at the end.

        Raises DataError for a shard that cannot be decoded, an id out of range, and a number of
        rows that differs from the footer's.
        """
        self.skipped = self._passed_over.copy()
        for shard in self.paths:
            seen = 0
            for rows in self._row_batches(shard):
                yield from self._convert(rows, f"{shard}, rows {seen}..{seen + len(rows) - 1}")
                seen += len(rows)
                advance(len(rows))
            if seen != self._rows[shard]:
                raise DataError(
                    f"{shard} gave {seen} rows, but its footer says {self._rows[shard]}"
                )

    def describe(self) -> dict[str, Any]:
        """What was read, for the manifest."""
        return {
            "kind": f"parquet {self._kind}",
            "order": "shards and rows as given",
            "column": self._column,
            "append_eod": self._append_eod,
            "shards": len(self.paths),
            "rows": self.total,
            **self._sources,
        }

    def _check_footer(self, shard: Path) -> int:
        """Check the type of the shard's column. Returns the number of rows."""
        try:
            with pq.ParquetFile(shard) as file:
                schema, rows = file.schema_arrow, file.metadata.num_rows
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"cannot read {shard} as Parquet: {error}") from error
        index = schema.get_field_index(self._column)
        if index < 0:
            raise DataError(
                f"{shard} has no column {self._column!r} (or more than one); its columns are "
                f"{', '.join(schema.names)}"
            )
        if not (_is_text if self._kind == "text" else _is_token_list)(schema.field(index).type):
            wanted = "text or binary" if self._kind == "text" else "a list of integers"
            raise DataError(
                f"column {self._column!r} of {shard} is {schema.field(index).type}, not {wanted}"
            )
        return rows

    def _row_batches(self, shard: Path) -> Iterator[pa.Array]:
        try:
            with pq.ParquetFile(shard) as file:
                for group in range(file.num_row_groups):
                    for batch in file.iter_batches(
                        _BATCH_ROWS, row_groups=[group], columns=[self._column]
                    ):
                        yield batch.column(self._column)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{shard} cannot be decoded: {error}") from error

    def _convert(self, rows: pa.Array, where: str) -> Iterator[np.ndarray]:
        self.skipped["null row"] += rows.null_count
        rows = rows.drop_null()
        if self._kind == "text":
            documents = (byte_tokens(text) for text in rows.cast(pa.large_binary()).to_pylist())
            empty = 1
        else:
            documents = self._token_lists(rows, f"{where}, column {self._column!r}")
            empty = int(self._append_eod)
        for tokens in documents:
            if len(tokens) > empty:
                yield tokens
            else:
                self.skipped["empty row"] += 1

    def _token_lists(self, rows: pa.Array, where: str) -> Iterator[np.ndarray]:
        if len(rows) == 0:
            return
        values = rows.flatten()
        if values.null_count:
            raise DataError(f"{where}: a token list holds a null")
        ids = values.to_numpy(zero_copy_only=False)
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab_size):
            wrong = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise DataError(
                f"{where}: token id {wrong} is outside the vocabulary, 0..{self.vocab_size - 1}"
            )
        ids = ids.astype(np.uint16)
        ending = np.full(int(self._append_eod), self.eod_id, np.uint16)
        lengths = rows.value_lengths().to_numpy()
        if lengths.max() + ending.size > MAX_DOCUMENT_TOKENS:
            raise DataError(f"{where}: a row is longer than the limit of an .idx, 2**31 - 1")
        for row in np.split(ids, np.cumsum(lengths)[:-1]):
            yield np.concatenate((row, ending))


def _is_text(dtype: pa.DataType) -> bool:
    t = pa.types
    return any(
        test(dtype) for test in (t.is_string, t.is_large_string, t.is_binary, t.is_large_binary)
    )


def _is_token_list(dtype: pa.DataType) -> bool:
    t = pa.types
    lists = t.is_list(dtype) or t.is_large_list(dtype) or t.is_fixed_size_list(dtype)
    return lists and t.is_integer(dtype.value_type)
