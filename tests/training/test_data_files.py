"""A damaged pair is refused, wherever the damage is, and by no other exception."""

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from megacpp_mcore.training.data import files
from megacpp_mcore.training.data.build import build
from megacpp_mcore.training.data.files import DataError, paths, read_pair
from megacpp_mcore.training.data.text import TextFiles

HEADER_BYTES = 34


def build_text(tmp_path: Path, contents: list[bytes], name: str = "c") -> Path:
    source = tmp_path / f"src-{name}"
    source.mkdir()
    for i, content in enumerate(contents):
        (source / f"{i}.h").write_bytes(content)
    build(TextFiles([source]), tmp_path / name)
    return tmp_path / name


@pytest.fixture
def prefix(tmp_path):
    return build_text(tmp_path, [b"int a;", b"long b = 1;", b"x", b"// c\n", b"\xff\xfe"])


def without_manifest(prefix):
    paths(prefix)[2].unlink()
    return prefix


def write_index(
    prefix, lengths, offsets=None, bounds=None, magic=b"MMIDIDX\0\0", version=1, code=8, counts=None
):
    """Write an .idx field by field, right unless told otherwise, and a .bin of the right size."""
    lengths = np.array(lengths, np.int32)
    itemsize = 1 if code not in DType._value2member_map_ else DType.size(code)
    ends = np.cumsum(lengths, dtype=np.int64) * itemsize
    offsets = np.concatenate(([0], ends))[:-1] if offsets is None else np.array(offsets)
    bounds = np.arange(lengths.size + 1) if bounds is None else np.array(bounds)
    counts = counts or (lengths.size, bounds.size)
    head = struct.pack("<9sQBQQ", magic, version, code, *counts)
    body = lengths.tobytes() + offsets.astype(np.int64).tobytes() + bounds.astype("<i8").tobytes()
    Path(f"{prefix}.idx").write_bytes(head + body)
    Path(f"{prefix}.bin").write_bytes(bytes(max(int(ends[-1]) if ends.size else 0, 0)))
    return prefix


def test_dtype_codes_are_megatrons():
    ours = {code: np.dtype(text).name for code, text in files._TOKEN_DTYPES.items()}
    ours |= files._FLOAT_DTYPES
    assert ours == {member.value: member.name for member in DType}


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.int64])
def test_pairs_that_megatron_wrote_are_read(tmp_path, dtype):
    rng = np.random.default_rng()
    sequences = [rng.integers(0, 100, n).astype(dtype) for n in (3, 1, 17, 4)]
    builder = IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=dtype)
    builder.add_document(np.concatenate(sequences[:2]), [3, 1])  # a document of two sequences
    for sequence in sequences[2:]:
        builder.add_document(sequence, [sequence.size])
    builder.finalize(str(tmp_path / "c.idx"))
    pair = read_pair(tmp_path / "c", vocab_size=100)
    assert pair.lengths.tolist() == [3, 1, 17, 4]
    assert np.array_equal(pair.tokens, np.concatenate(sequences))
    assert pair.manifest is None


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_our_index_is_what_megatron_writes(tmp_path, dtype):
    lengths = np.random.default_rng().integers(1, 2000, 300).astype(np.int32)
    builder = IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=dtype)
    for length in lengths:
        builder.add_document(np.zeros(length, dtype), [length])
    builder.finalize(str(tmp_path / "c.idx"))
    files.write_index(tmp_path / "ours.idx", lengths, np.dtype(dtype))
    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "c.idx").read_bytes()


def test_what_write_index_writes_is_right_unless_told_otherwise(tmp_path):
    prefix = write_index(tmp_path / "c", [3, 4])
    assert read_pair(prefix).lengths.tolist() == [3, 4]
    assert len(IndexedDataset(str(prefix))) == 2


def test_missing_files_are_both_named_with_the_command_that_builds_them(prefix, tmp_path):
    with pytest.raises(
        DataError, match=r"none\.bin and .*none\.idx missing; build it with: megacpp"
    ):
        read_pair(tmp_path / "none")
    paths(prefix)[0].unlink()
    with pytest.raises(DataError, match=r"^no dataset at .*: [^ ]*c\.bin missing;"):
        read_pair(prefix)
    with pytest.raises(DataError, match=r"without \.bin"):
        read_pair(f"{prefix}.bin")


@pytest.mark.parametrize("manifest", [True, False])
def test_idx_truncated_at_any_byte(prefix, manifest):
    if not manifest:
        without_manifest(prefix)
    idx = paths(prefix)[1]
    whole = idx.read_bytes()
    assert len(whole) == HEADER_BYTES + 5 * 20 + 8
    for size in range(len(whole)):
        idx.write_bytes(whole[:size])
        with pytest.raises(DataError, match="truncated"):
            read_pair(prefix, 257)
    idx.write_bytes(whole)
    assert read_pair(prefix, 257)


def test_any_changed_byte_of_the_idx_is_seen_by_the_manifest(prefix):
    idx = paths(prefix)[1]
    whole = idx.read_bytes()
    rng = np.random.default_rng()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= int(rng.integers(1, 256))
        idx.write_bytes(damaged)
        with pytest.raises(DataError):
            read_pair(prefix, 257)


def test_changed_idx_without_manifest_is_refused_or_still_consistent(prefix):
    idx = paths(without_manifest(prefix))[1]
    whole, lengths = idx.read_bytes(), read_pair(prefix).lengths
    rng = np.random.default_rng()
    for _ in range(600):
        damaged = bytearray(whole)
        for at in rng.integers(0, len(whole), rng.integers(1, 4)):
            damaged[at] = rng.integers(0, 256)
        idx.write_bytes(damaged)
        try:
            pair = read_pair(prefix, 257)
        except DataError:
            continue
        # Only the inner document bounds, which GPTDataset does not read, and the sign of uint16
        # cannot be told from the rest.
        assert np.array_equal(pair.lengths, lengths)


@pytest.mark.parametrize("change", [-1, 1, -2, 2, -(10**6)])
def test_bin_of_another_size(prefix, change):
    path = paths(prefix)[0]
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + bytes(change))
    word = "truncated" if change < 0 else "too long"
    with pytest.raises(DataError, match=rf"c\.bin is {path.stat().st_size} bytes.*{word}, or the"):
        read_pair(prefix)


def test_idx_of_another_dataset(prefix, tmp_path):
    other = build_text(tmp_path, [b"abc", b"de"], "other")
    paths(prefix)[1].write_bytes(paths(other)[1].read_bytes())
    with pytest.raises(DataError, match="belong to different datasets"):
        read_pair(prefix)


def test_files_of_a_dataset_of_the_same_size(tmp_path):
    mine = build_text(tmp_path, [b"abc", b"de"], "mine")
    other = build_text(tmp_path, [b"a", b"bcde"], "other")
    paths(mine)[1].write_bytes(paths(other)[1].read_bytes())
    with pytest.raises(DataError, match="idx_sha256"):
        read_pair(mine)
    paths(mine)[2].write_bytes(paths(other)[2].read_bytes())
    assert read_pair(mine)  # all sizes agree; only the hash of the .bin tells
    with pytest.raises(DataError, match=r"mine\.bin has sha256 .* changed after it was built"):
        read_pair(mine, verify_hashes=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"magic": b"MMIDIDX\0\1"}, "not a Megatron index"),
        ({"magic": b"TNTIDX\0\0\0"}, "not a Megatron index"),
        ({"version": 2}, "index version 2"),
        ({"code": 0}, r"dtype code 0 \(unknown\)"),
        ({"code": 9}, r"dtype code 9 \(unknown\)"),
        ({"code": 6}, r"dtype code 6 \(float64\)"),
        ({"lengths": [], "offsets": [], "bounds": [0]}, "is empty: 0 sequences, 0 documents"),
        ({"lengths": [], "offsets": [], "bounds": [0, 0]}, "is empty: 0 sequences, 1 documents"),
        ({"lengths": [3, 0, 4]}, "sequence 1 has length 0"),
        ({"lengths": [3, -1, 4]}, "sequence 1 has length -1"),
        ({"offsets": [0, 8, 14]}, "sequence 1 starts at byte 8"),
        ({"offsets": [2, 6, 14]}, "sequence 0 starts at byte 2"),
        ({"bounds": [0, 1, 2]}, "document bounds must rise from 0 to 3"),
        ({"bounds": [0, 2, 1, 3]}, "document bounds"),
        ({"bounds": [1, 3]}, "document bounds"),
        ({"counts": (2**63, 4)}, "truncated"),
        ({"counts": (2**64 - 1, 2**64 - 1)}, "truncated"),
        ({"counts": (2, 4)}, "too long"),
    ],
)
def test_wrong_fields(tmp_path, fields, message):
    write_index(tmp_path / "c", **{"lengths": [3, 4, 5], **fields})
    with pytest.raises(DataError, match=message):
        read_pair(tmp_path / "c")


def test_empty_files(tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"c{suffix}").write_bytes(b"")
    with pytest.raises(DataError, match="truncated: 0 bytes"):
        read_pair(tmp_path / "c")


@pytest.mark.parametrize("at", [0, 11, 28])
def test_token_beyond_the_vocabulary_is_named(prefix, at):
    path = paths(prefix)[0]
    tokens = np.fromfile(path, np.uint16)
    assert tokens.size == 30
    tokens[at] = 257
    path.write_bytes(tokens.tobytes())
    with pytest.raises(DataError, match=rf"token 257 at position {at}; the vocabulary is 0\.\.256"):
        read_pair(prefix, 257)
    assert read_pair(prefix)


def test_token_beyond_the_vocabulary_in_a_later_chunk(prefix, monkeypatch):
    monkeypatch.setattr(files, "_CHUNK_BYTES", 14)
    with pytest.raises(DataError, match=r"token 255 at position"):
        read_pair(without_manifest(prefix), 255)
    assert read_pair(prefix, 257)


def test_negative_tokens(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=np.int32)
    builder.add_document([5, -3, 2], [3])
    builder.finalize(str(tmp_path / "c.idx"))
    with pytest.raises(DataError, match="token -3 at position 1"):
        read_pair(tmp_path / "c", 257)


class TestManifest:
    def test_vocabulary_of_the_model_is_smaller(self, prefix):
        with pytest.raises(DataError, match=r"says vocab_size 257, above the 256 asked for"):
            read_pair(prefix, 256)

    @pytest.mark.parametrize("key", ["documents", "tokens", "idx_sha256"])
    def test_that_says_something_else(self, prefix, key):
        path = paths(prefix)[2]
        manifest = json.loads(path.read_text())
        manifest[key] = "0" * 64 if key == "idx_sha256" else manifest[key] + 1
        path.write_text(json.dumps(manifest))
        with pytest.raises(DataError, match=f"says {key} {manifest[key]}"):
            read_pair(prefix)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "[]",
            "null",
            "\xff",
            "[" * 100_000,
            '{"schema": "megacpp-data/2"}',
            '{"schema": "megacpp-data/1"}',
            '{"schema": "megacpp-data/1", "documents": "5"}',
            " " * (1 << 20) + "{}",
        ],
        ids=lambda text: repr(text[:20]),
    )
    def test_that_is_none(self, prefix, text):
        path = paths(prefix)[2]
        path.write_text(text, encoding="latin-1")
        with pytest.raises(DataError, match=re.escape(f"{path} is not a manifest")):
            read_pair(prefix)

    def test_tokens_are_held_to_its_vocabulary_when_verifying(self, prefix):
        path = paths(prefix)[2]
        manifest = json.loads(path.read_text())
        path.write_text(json.dumps({**manifest, "vocab_size": 256, "eod_id": 255}))
        with pytest.raises(DataError, match=r"token 256 at position .* 0\.\.255"):
            read_pair(prefix, verify_hashes=True)

    def test_is_needed_to_verify(self, prefix):
        with pytest.raises(DataError, match="cannot be verified"):
            read_pair(without_manifest(prefix), verify_hashes=True)
