"""Packed documents of a micro batch: the host works out what Megatron reads from the GPU."""

import itertools
import random
from types import SimpleNamespace

import packed_ranks
import pytest
import ranks
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.utils import flatten_batch_for_packed_sequences
from packed_ranks import ROWS, sample_of

from megacpp_mcore.kernels.documents import shifted_left
from megacpp_mcore.stack import bridges
from megacpp_mcore.training.gpu.packed import _document_of_each_token, documents_of, shared

LENGTH = packed_ranks.LENGTH


def random_rows(generator: random.Random) -> list[list[int]]:
    """The documents' lengths of up to four rows; one document and single tokens among them."""
    rows = []
    for _ in range(generator.randint(1, 4)):
        cuts = sorted(generator.sample(range(1, LENGTH), generator.randint(0, LENGTH - 1)))
        ends = [0, *cuts, LENGTH]
        rows.append([end - start for start, end in itertools.pairwise(ends)])
    return rows


def megatrons(sample: dict[str, torch.Tensor]) -> PackedSeqParams:
    """What the batch was before the host worked it out: Megatron's functions on the device."""
    batch = flatten_batch_for_packed_sequences({"cu_seqlens_padded": None} | sample)
    offsets, padded = batch["cu_seqlens"].squeeze(0), batch["cu_seqlens_padded"]
    if padded is not None:
        offsets = padded = padded.squeeze(0)
    longest = int(batch["max_seqlen"].item())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets,
        cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest, max_seqlen_kv=longest, total_tokens=int(offsets[-1].item()),
        tokens_per_sample=LENGTH,
    )  # fmt: skip


def assert_same(found: PackedSeqParams, expected: PackedSeqParams) -> None:
    for name, value in vars(expected).items():
        got = getattr(found, name)
        if isinstance(value, torch.Tensor):
            assert got.dtype == value.dtype, name
            torch.testing.assert_close(got, value, rtol=0, atol=0)
        else:
            assert got == value and type(got) is type(value), name


CASES = [
    *(random_rows(random.Random(seed)) for seed in range(40)),
    [[LENGTH]], [[LENGTH], [LENGTH]], [[1] * LENGTH], [[1] * LENGTH, [LENGTH], [1, LENGTH - 1]],
]  # fmt: skip


@pytest.mark.parametrize("rows", CASES, ids=lambda rows: "-".join(str(len(row)) for row in rows))
def test_the_documents_are_megatrons(rows):
    sample = sample_of(rows)
    found = documents_of(sample).to("cpu").params(tokens_per_sample=LENGTH)
    assert_same(found, megatrons(sample))


def test_padding_behind_documents_counts_with_them():
    """Padded to multiples of four: real lengths 3, 4, 1 and 5 in two rows of eight and eight."""
    rows, real = [[4, 4], [4, 4]], [[3, 4], [1, 4]]
    sample = sample_of(rows) | {"cu_seqlens_padded": sample_of(rows)["cu_seqlens"]}
    sample["cu_seqlens"] = sample_of(real)["cu_seqlens"]
    sample = {key: value[..., : 8 if key in ROWS else None] for key, value in sample.items()}
    for key in ("cu_seqlens", "cu_seqlens_padded"):
        sample[key] = sample[key].clamp(max=8)
    found = documents_of(sample)
    assert found.padded.tolist() == [0, 4, 8, 12, 16] and found.total == 16
    assert_same(found.to("cpu").params(LENGTH), megatrons(dict(sample)))


def test_tokens_behind_the_last_document_are_one_of_their_own():
    """An empty tail and one with tokens, as PackedSeqParams numbers them."""
    for last in (12, 16):
        sample = sample_of([[5, 7]])
        sample["cu_seqlens"] = torch.tensor([[0, 5, 5, 12]], dtype=torch.int32)
        documents = documents_of(sample)
        params = documents.params(LENGTH)
        given = PackedSeqParams(cu_seqlens_q=documents.offsets, total_tokens=12)
        torch.testing.assert_close(params.seq_idx, given.seq_idx, rtol=0, atol=0)
        given = PackedSeqParams(cu_seqlens_q=documents.offsets, total_tokens=last)
        found = _document_of_each_token(documents.offsets, last)
        torch.testing.assert_close(found, given.seq_idx, rtol=0, atol=0)


def test_the_other_tensor_parallel_ranks_have_them_from_the_first(tmp_path):
    ranks.run_ranks(packed_ranks.check_shared, tmp_path)


def test_one_rank_needs_nobody():
    documents = documents_of(sample_of([[3, LENGTH - 3]]))
    assert shared(documents, SimpleNamespace(size=lambda: 1)) is documents


def bounds_of(rows: list[list[int]]) -> torch.Tensor:
    return documents_of(sample_of(rows)).offsets


MEGATRONS_ROLL = getattr(mtp._roll_tensor_packed_seq, "upstream", mtp._roll_tensor_packed_seq)


@pytest.mark.parametrize("rows", CASES[::4], ids=lambda rows: "-".join(map(str, map(len, rows))))
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_documents_move_as_megatron_moves_them(rows, dtype):
    bounds = bounds_of(rows)
    x = torch.randint(1, 99, (1, int(bounds[-1]))).to(dtype)
    expected, total = MEGATRONS_ROLL(x, -1, -1, PackedSeqParams(cu_seqlens_q=bounds))
    found = shifted_left(x, bounds)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found.sum() == total


@pytest.mark.parametrize("bounds", [[0, 0, 3, 3, 7], [0, 3, 5], [0, 0], [0, 9, 9]])
def test_empty_documents_and_a_tail_move_as_megatrons(bounds):
    bounds = torch.tensor(bounds, dtype=torch.int32)
    x = torch.arange(1, 10).view(1, 9)
    expected, _ = MEGATRONS_ROLL(x, -1, -1, PackedSeqParams(cu_seqlens_q=bounds))
    torch.testing.assert_close(shifted_left(x, bounds), expected, rtol=0, atol=0)


def test_megatron_moves_documents_on_the_device_after_the_bridge(monkeypatch):
    asked = []
    monkeypatch.setattr(mtp, "_roll_tensor_packed_seq", lambda *given: asked.append(given))
    for _ in range(2):  # once is enough, and twice the same
        bridges.shift_documents_on_the_device()
    params = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 2, 4]))
    moved, total = mtp.roll_tensor(torch.tensor([[1, 2, 3, 4]]), packed_seq_params=params)
    assert moved.tolist() == [[2, 0, 4, 0]] and total == 6 and not asked
    several = SimpleNamespace(size=lambda: 2)
    mtp.roll_tensor(torch.ones(1, 4), packed_seq_params=params, cp_group=several)
    assert len(asked) == 1  # over ranks: Megatron's


class NoReads(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuses what waits for a device: a value read by the host, a shape that depends on values,
    a copy that blocks. Of CPU tensors here, which stand for a GPU's."""

    WAITS = ("_local_scalar_dense", "nonzero", "repeat_interleave", "masked_select", "_to_copy")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        blocking = name != "_to_copy" or (kwargs or {}).get("device") not in (None, args[0].device)
        assert name not in self.WAITS or not blocking, function
        return function(*args, **(kwargs or {}))


def test_nothing_is_read_from_the_device():
    documents = documents_of(sample_of([[5, LENGTH - 5], [LENGTH]])).to("cpu")
    with NoReads():
        params = documents.params(LENGTH)
        shifted_left(torch.ones(1, 2 * LENGTH), params.cu_seqlens_q)
    with pytest.raises(AssertionError), NoReads():
        PackedSeqParams(cu_seqlens_q=documents.offsets, total_tokens=documents.total)
    with pytest.raises(AssertionError), NoReads():
        MEGATRONS_ROLL(torch.ones(1, 2 * LENGTH), -1, -1, params)
    with pytest.raises(AssertionError), NoReads():
        flatten_batch_for_packed_sequences(sample_of([[5, LENGTH - 5], [LENGTH]]))
