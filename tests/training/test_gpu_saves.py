"""Saves of Megatron's loop: what they replace, what they leave, and when."""

import os
import signal
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from megacpp_mcore.stack import bridges
from megacpp_mcore.training.checkpoints import checksums, folder
from megacpp_mcore.training.gpu import saves as module
from megacpp_mcore.training.gpu.resume import ResumeError
from megacpp_mcore.training.gpu.saves import Saves


def written(path: Path, content: str) -> None:
    path.mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata", "metadata.json"):
        (path / name).write_text(content)
    checksums.write(path, {})


@pytest.fixture
def loop(tmp_path, monkeypatch):
    """Megatron as `Saves` sees it; `loop.pending` is the asynchronous save under way."""
    args = SimpleNamespace(save=str(tmp_path), ckpt_format="torch_dist", async_save=False,
                           load=str(tmp_path), finetune=False, iteration=0)  # fmt: skip
    found = SimpleNamespace(args=args, pending=None, said=[])

    def finalize(blocking=False, terminate=False):
        if found.pending and blocking:
            found.pending()
            found.pending = None

    monkeypatch.setattr(module, "get_args", lambda: args)
    monkeypatch.setattr(module, "is_empty_async_queue", lambda: found.pending is None)
    monkeypatch.setattr(module.training, "maybe_finalize_async_save", finalize)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    found.finalize = finalize
    return found


def test_a_checkpoint_of_the_same_iteration_makes_way_only_for_a_complete_one(loop, tmp_path):
    written(folder.path_of(tmp_path, 4), "old")

    def killed():
        folder.path_of(tmp_path, 4).mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Saves(None).save(killed, 4)
    assert folder.complete(tmp_path) == []
    folder.recover(tmp_path)
    assert (folder.path_of(tmp_path, 4) / ".metadata").read_text() == "old"
    Saves(None).save(lambda: written(folder.path_of(tmp_path, 4), "new"), 4)
    assert os.listdir(tmp_path) == ["iter_0000004"]
    assert (folder.path_of(tmp_path, 4) / ".metadata").read_text() == "new"


def test_the_newest_checkpoints_are_kept(loop, tmp_path):
    saves = Saves(2)
    for iteration in (1, 2, 3, 4):
        saves.save(lambda i=iteration: written(folder.path_of(tmp_path, i), "x"), iteration)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000003", "iter_0000004"]


def test_an_asynchronous_save_ends_before_the_next_begins_and_deletes_nothing_before(
    loop, tmp_path
):
    loop.args.async_save = True
    saves, order = Saves(1), []

    def begin(iteration):
        def end():
            order.append(f"{iteration} ends")
            written(folder.path_of(tmp_path, iteration), "x")

        order.append(f"{iteration} begins")
        loop.pending = end

    saves.save(lambda: begin(1), 1)
    loop.finalize()
    saves.tidy()
    assert folder.complete(tmp_path) == []  # it is under way
    saves.save(lambda: begin(2), 2)
    assert order == ["1 begins", "1 ends", "2 begins"]
    saves.tidy()
    assert folder.complete(tmp_path) == [1]  # kept while 2 is under way
    loop.finalize(blocking=True)
    saves.tidy()
    assert folder.complete(tmp_path) == [2]


@pytest.mark.parametrize(("named", "held", "good"), [(6, 6, True), (6, 4, False), (-1, 0, True),
                                                     (None, 0, True), (0, 0, True)])  # fmt: skip
def test_what_was_loaded_is_of_the_iteration_of_its_name(loop, monkeypatch, named, held, good):
    monkeypatch.setattr(module.checkpointing, "get_loaded_iteration", lambda: named)
    loop.args.iteration = held
    if good:
        module.check_what_was_loaded()
    else:
        with pytest.raises(ResumeError, match="iter_0000006 is of iteration 4"):
            module.check_what_was_loaded()


@pytest.fixture
def saving(tmp_path):
    """begin(values, start): Megatron's queue with the request to save them, and its caller."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async

    from megacpp_mcore.training.checkpoints import writer
    from megacpp_mcore.training.cpu.megatron_setup import quiet, single_process

    path = folder.path_of(tmp_path, 3)
    path.mkdir()
    bridges.install()
    writer.install()
    caller = async_utils.PersistentAsyncCaller
    filesystem_async._results_queue = None
    writer.keep_no_process(asynchronous=True)
    manager = filesystem_async._results_queue._manager

    queues = []

    def begin(values, start):
        if start == "forkserver":
            async_utils.AsyncCallsQueue.warmup_persistent_caller(0, mp_mode=start)
        sharded = ShardedTensor.from_rank_offsets
        request = dist_checkpointing.save(
            {name: sharded(name, tensor) for name, tensor in values.items()}, str(path),
            async_sharded_save=True, async_strategy="mcore",
        )  # fmt: skip
        queues.append(async_utils.AsyncCallsQueue(persistent=True))
        return queues[0], request, caller

    try:
        with quiet(), single_process(1):
            yield path, begin
    finally:
        if caller._persistent_process is not None:
            queues[0]._get_async_caller().close(abort=True)
        manager.shutdown()
        writer.keep_no_process(asynchronous=False)
        forkserver._forkserver._stop()


@pytest.mark.slow
@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_an_asynchronous_save_has_checksums_and_its_processes_end(saving, start):
    """Megatron's own queue of calls, the write in the worker that recipes ask for. Megatron starts
    it by a fork server before training; without that, the first save does, and spawns it. Slurm's
    SIGTERM, which goes to every process of a task, ends none of them before the rank has saved."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    path, begin = saving
    values = {
        "w": torch.randn(100_001), "bf16": torch.randn(3, 5).bfloat16(),
        "turned": torch.randn(7, 11).t(), "part": torch.randn(1_000_000)[5:8],
        "number": torch.tensor([7]),
    }  # fmt: skip
    kept = {name: tensor.clone() for name, tensor in values.items()}
    queue, request, caller = begin(values, start)
    queue.schedule_async_request(request)
    worker = caller._persistent_process
    assert worker.is_alive() and not folder.is_complete(path)
    for process in psutil.Process().children(recursive=True):
        process.send_signal(signal.SIGTERM)
    for tensor in values.values():  # the run goes on
        tensor.zero_()
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    assert not worker.is_alive()
    sharded = ShardedTensor.from_rank_offsets
    found = dist_checkpointing.load(
        {name: sharded(name, torch.empty_like(x)) for name, x in values.items()}, str(path)
    )
    assert folder.is_complete(path) and checksums.verify(path)
    assert "__0_0.distcp" in checksums.read(path) and not list(path.glob(".sum-*"))
    for name, tensor in kept.items():
        assert torch.equal(found[name], tensor), name
    assert sum(file.stat().st_size for file in path.iterdir()) < 500_000  # no views' storages


@pytest.mark.slow
def test_a_worker_of_saves_that_has_ended_ends_the_run_with_a_sentence(saving):
    """Killed before it has the tensors, or as it writes: a wait for it would never end."""
    from megacpp_mcore.training.checkpoints.writer import SaveWorkerError

    path, begin = saving
    os.mkfifo(path / "__0_0.distcp")  # as long as nobody reads, the worker waits in its write
    queue, request, caller = begin({"w": torch.randn(1000)}, "forkserver")
    queue.schedule_async_request(request)
    assert queue.maybe_finalize_async_calls(blocking=False) == []
    caller._persistent_process.kill()
    caller._persistent_process.join()
    for attempt in (
        lambda: queue.maybe_finalize_async_calls(blocking=False),
        lambda: queue.maybe_finalize_async_calls(blocking=True),
        lambda: queue.schedule_async_request(request),
    ):
        with pytest.raises(SaveWorkerError, match=r"ended with status .* checkpoint.async_save"):
            attempt()
    assert not folder.is_complete(path)
