"""What checksums cost a checkpoint: Megatron's own save of a GPU's tensors, with and without."""

import builtins
import shutil
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
GIB, TENSORS = 4, 16
ROUNDS = 8  # of one save each way; the quickest of each is compared: what disturbs a save slows it
MOST = 1.02


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
    values = GIB * 2**30 // 4 // TENSORS
    tensors = {f"w{n}": torch.randn(values, device="cuda") for n in range(TENSORS)}
    spent: dict[bool, list[float]] = {True: [], False: []}
    with single_process(0, "cuda"):
        for turn in range(2 * ROUNDS):
            on = turn % 2 == 0
            switch(on)
            folder = tmp_path / "checkpoint"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            state = {n: ShardedTensor.from_rank_offsets(n, x) for n, x in tensors.items()}
            started = time.perf_counter()
            dist_checkpointing.save(state, str(folder))
            spent[on].append(time.perf_counter() - started)
            assert (folder / checksums.NAME).exists() == on
    assert checksums.verify(folder) is False  # the last one has none
    ratio = min(spent[True]) / min(spent[False])
    print(f"{GIB} GiB in {min(spent[False]):.3f} s; with checksums {ratio:.4f} of that")
    print({"with" if on else "without": [f"{s:.3f}" for s in x] for on, x in spent.items()})
    assert ratio <= MOST, spent
