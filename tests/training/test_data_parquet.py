"""Building from Parquet shards: every row arrives, nothing that is not a token does."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megacpp_mcore import cli
from megacpp_mcore.training.data.build import build
from megacpp_mcore.training.data.files import DataError, read_pair
from megacpp_mcore.training.data.parquet import ParquetShards


def write_shard(path, row_group_size=7, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def sequences(prefix):
    return [sequence.tolist() for sequence in IndexedDataset(str(prefix))]


def tokens_of(tmp_path, array, **options):
    write_shard(tmp_path / "in" / "s.parquet", ids=array)
    options = {"vocab_size": 1000, "eod_id": 999, "append_eod": False, **options}
    build(ParquetShards([tmp_path / "in"], "ids", "tokens", **options), tmp_path / "c")
    return sequences(tmp_path / "c")


@pytest.mark.parametrize("dtype", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_text_column_in_shard_and_row_order(tmp_path, dtype):
    rows = [f"row {i} größer".encode() for i in range(50)]
    folder = tmp_path / "in"
    write_shard(folder / "b" / "1.parquet", other=range(30), t=pa.array(rows[20:], dtype))
    write_shard(folder / "a.parquet", other=range(20), t=pa.array(rows[:20], dtype))
    (folder / "README.md").write_text("not a shard")
    manifest = build(ParquetShards([folder], "t", "text"), tmp_path / "c")
    assert sequences(tmp_path / "c") == [[*row, 256] for row in rows]
    assert manifest["source"]["rows"] == manifest["documents"] == 50
    assert manifest["skipped"] == {"not a Parquet shard": 1}
    assert read_pair(tmp_path / "c", 257, verify_hashes=True)


def test_null_and_empty_rows_are_left_out_and_counted(tmp_path):
    shard = write_shard(tmp_path / "s.parquet", t=["a", None, "", "b", None, *[None] * 7, "c"])
    manifest = build(ParquetShards([shard], "t", "text"), tmp_path / "c")
    assert sequences(tmp_path / "c") == [[97, 256], [98, 256], [99, 256]]
    assert manifest["skipped"] == {"empty row": 1, "null row": 9}


@pytest.mark.parametrize(
    "dtype", [pa.list_(pa.int64()), pa.large_list(pa.uint16()), pa.list_(pa.int32(), 3)]
)
def test_token_lists_of_every_kind(tmp_path, dtype):
    rows = np.random.default_rng().integers(0, 1000, (40, 3)).tolist()
    assert tokens_of(tmp_path, pa.array(rows, dtype)) == rows


def test_token_lists_of_many_lengths_with_nulls(tmp_path):
    rows = [[5], None, [], [0, 999, 65, 1], None, [7, 7]]
    assert tokens_of(tmp_path, pa.array(rows)) == [[5], [0, 999, 65, 1], [7, 7]]


def test_append_eod_ends_every_row(tmp_path):
    rows = [[5], [], [6, 999]]
    assert tokens_of(tmp_path, pa.array(rows), append_eod=True) == [[5, 999], [6, 999, 999]]


def test_all_of_uint16_can_be_used(tmp_path):
    assert tokens_of(tmp_path, pa.array([[0, 65535]]), vocab_size=65536) == [[0, 65535]]


@pytest.mark.parametrize("wrong", [-1, 1000, 65536, 2**40])
def test_token_id_out_of_range(tmp_path, wrong):
    with pytest.raises(DataError, match=rf"token id {wrong} is outside the vocabulary, 0\.\.999"):
        tokens_of(tmp_path, pa.array([[1], [2, wrong]]))
    assert not list(tmp_path.glob("*c*"))


def test_null_inside_a_token_list(tmp_path):
    with pytest.raises(DataError, match="holds a null"):
        tokens_of(tmp_path, pa.array([[1, None]]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 65537}, r"not in 1\.\.65536"),
        ({"vocab_size": 0}, r"not in 1\.\.65536"),
        ({"eod_id": 1000}, "outside the vocabulary"),
        ({"eod_id": -1}, "outside the vocabulary"),
    ],
)
def test_vocabulary_that_does_not_fit(tmp_path, options, message):
    with pytest.raises(DataError, match=message):
        tokens_of(tmp_path, pa.array([[1]]), **options)


def test_column_missing_or_of_another_kind(tmp_path):
    shard = write_shard(tmp_path / "s.parquet", t=["a"], ids=[[1]], x=[1.5], f=[[1.5]])
    with pytest.raises(DataError, match=r"no column 'text'.*t, ids, x, f"):
        ParquetShards([shard], "text", "text")
    for column, kind in [("x", "text"), ("ids", "text"), ("t", "tokens"), ("f", "tokens")]:
        with pytest.raises(DataError, match=rf"column '{column}' of .* is .*, not"):
            ParquetShards([shard], column, kind)


def test_second_shard_of_another_kind_is_seen_before_anything_is_read(tmp_path):
    write_shard(tmp_path / "in" / "a.parquet", t=["a"])
    write_shard(tmp_path / "in" / "b.parquet", t=[1])
    with pytest.raises(DataError, match=r"b\.parquet is int64, not text"):
        ParquetShards([tmp_path / "in"], "t", "text")


def test_files_that_are_no_parquet(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"int main();" * 50)
    with pytest.raises(DataError, match=r"cannot read .*a\.parquet as Parquet"):
        ParquetShards([tmp_path], "t", "text")
    (tmp_path / "a.parquet").rename(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"no \.parquet file"):
        ParquetShards([tmp_path], "t", "text")


def test_damaged_row_group(tmp_path):
    rows = [
        bytes(np.random.default_rng(i).integers(0, 256, 300).astype(np.uint8)) for i in range(9)
    ]
    shard = write_shard(tmp_path / "in" / "s.parquet", t=pa.array(rows))
    data = bytearray(shard.read_bytes())
    data[4:60] = bytes(range(100, 156))
    shard.write_bytes(data)
    with pytest.raises(DataError, match="cannot be decoded"):
        build(ParquetShards([shard], "t", "text"), tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_rows_are_counted_against_the_footer(tmp_path):
    shard = write_shard(tmp_path / "in" / "s.parquet", row_group_size=10_000, t=["a"] * 1000)
    data = shard.read_bytes()
    # FileMetaData.num_rows is the first i64 (thrift compact: 16, then zigzag varint) of the footer.
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    at = data.index(b"\x16\xd0\x0f", footer)
    shard.write_bytes(data[:at] + b"\x16\xd2\x0f" + data[at + 3 :])
    assert pq.read_metadata(shard).num_rows == 1001
    with pytest.raises(DataError, match="gave 1000 rows, but its footer says 1001"):
        build(ParquetShards([shard], "t", "text"), tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_a_shard_is_never_whole_in_memory(tmp_path):
    rows = [np.random.default_rng(i).bytes(1 << 17) for i in range(96)]
    shard = write_shard(tmp_path / "s.parquet", row_group_size=4, t=pa.array(rows))
    del rows
    source, before, peak = ParquetShards([shard], "t", "text"), pa.total_allocated_bytes(), 0
    for _ in source.documents(lambda count: None):
        peak = max(peak, pa.total_allocated_bytes() - before)
    group = 4 << 17
    # A compressed page, a decompressed page, a decoded batch and its cast; a group that Arrow frees
    # late (seen once in hundreds of readings); less than one group of offsets and rounding.
    assert peak < (4 + 1 + 1) * group
    assert shard.stat().st_size > 20 * group


def test_command_with_tokens_and_with_text(tmp_path, capsys):
    shard = write_shard(tmp_path / "s.parquet", ids=[[1, 2], [3]], t=["ab", "c"])
    common = ["data", "build", str(shard), "--out"]
    ids = ["--tokens-column", "ids", "--vocab-size", "500", "--append-eod"]
    assert cli.main([*common, str(tmp_path / "a"), *ids]) == 0
    assert "--vocab-size 500 --null-tokenizer-eod-id 499" in capsys.readouterr().out
    assert sequences(tmp_path / "a") == [[1, 2, 499], [3, 499]]
    assert cli.main([*common, str(tmp_path / "b"), "--text-column", "t"]) == 0
    assert sequences(tmp_path / "b") == [[97, 98, 256], [99, 256]]
