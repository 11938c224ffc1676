"""What checksums cost a checkpoint: Megatron's own save of a GPU's tensors, with and without."""

import builtins
import math
import shutil
import statistics
import time

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megacpp_mcore.training.checkpoints import checksums, writer
from megacpp_mcore.training.cpu.megatron_setup import single_process

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
GIB, TENSORS = 2, 16
ROUNDS = 24  # pairs of saves, one each way, the first of a pair in turn
MOST = 1.02
MOST_ERROR = 0.02  # of the median ratio, at most: a file system noisier than that measures nothing


@pytest.fixture
def switch(monkeypatch):
    """A function that lets Megatron's writer write checksums, or none: torch's unread ones, too,
    are off."""
    for owner, name in ((filesystem_async, "open"), (serialization, "save_config")):
        monkeypatch.setattr(owner, name, getattr(owner, name, builtins.open), raising=False)
    writer.keep_no_process(asynchronous=False)

    def switch(on: bool) -> None:
        writer.install()
        if not on:
            filesystem_async.open = builtins.open
            serialization.save_config = writer._save_config

    yield switch
    torch.serialization.set_crc32_options(True)


def test_checksums_cost_less_than_a_fiftieth_of_a_save(tmp_path, switch):
    """The median of the pairs' ratios. One save of a GPU's host may take 5 % more or less than the
    next: the bound is `MOST` and two standard errors of that median, which the pairs tell."""
    values = GIB * 2**30 // 4 // TENSORS
    tensors = {f"w{n}": torch.randn(values, device="cuda") for n in range(TENSORS)}
    folder = tmp_path / "checkpoint"

    def seconds(on: bool) -> float:
        switch(on)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        state = {n: ShardedTensor.from_rank_offsets(n, x) for n, x in tensors.items()}
        started = time.perf_counter()
        dist_checkpointing.save(state, str(folder))
        spent = time.perf_counter() - started
        assert (folder / checksums.NAME).exists() == on
        return spent

    with single_process(0, "cuda"):
        seconds(True)  # the first save is slower
        assert checksums.verify(folder)
        pairs = []
        for turn in range(ROUNDS):
            order = (True, False) if turn % 2 == 0 else (False, True)
            spent = {on: seconds(on) for on in order}
            pairs.append((spent[True], spent[False]))
    ratios = [with_sums / without for with_sums, without in pairs]
    ratio = statistics.median(ratios)
    # 1.25 is the standard error of a median in those of a mean; the quartiles are a deviation of
    # 0.6745 away, and no outlier moves them
    low, _, high = statistics.quantiles(ratios, n=4)
    error = 1.25 * (high - low) / (2 * 0.6745) / math.sqrt(ROUNDS)
    quickest = min(without for _, without in pairs)
    print(f"{GIB} GiB in {quickest:.3f} s; with checksums {ratio:.4f} +- {error:.4f} of a save")
    print("with, without:", ", ".join(f"{a:.3f} {b:.3f}" for a, b in pairs))
    assert error <= MOST_ERROR, pairs
    assert ratio <= MOST + 2 * error, pairs
