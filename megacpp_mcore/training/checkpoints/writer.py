"""Bridges for Megatron's checkpoint writer: checksums as it writes, and no leftover process.

The writer opens every shard with `open`, writes it front to back, and syncs it. `install` counts
the CRC-32 of what passes; it is kept in a file `.sum-NAME` beside the shard until rank 0, which
writes `metadata.json` last of all, gathers them in `checksums.json`. Threads count it beside the
write. torch counts a CRC-32 of every tensor, too, and never looks at it: that one is disabled.
"""

import json
import multiprocessing
import os
import queue
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.files import sync
from megacpp_mcore.training.checkpoints import checksums, staging, worker

_SIDECAR = ".sum-"
_UNDISTURBED = "megacpp_mcore.training.checkpoints.undisturbed"
_save_config = serialization.save_config
_async_loop = PersistentAsyncCaller.async_loop
_is_done = PersistentAsyncCaller.is_current_async_call_done
_THREADS = 4  # that count checksums, of each file being written
_PIECE = 2 << 20  # bytes, the least that one of them takes; a shorter block is counted before
_PIECES = 2 * _THREADS  # of a block, at most: handing one out and joining it takes 10 us
_LOOK_S = 0.5  # between two looks at the worker of asynchronous saves, while it is waited for


class SaveWorkerError(MegacppError):
    """The process that writes asynchronous saves has ended."""

    exit_status = 1


class _SummedFile:
    """A file open for writing, with the CRC-32 of what was written."""

    def __init__(self, path: str, mode: str) -> None:
        self._path = Path(path)
        self._file = open(path, mode)  # noqa: SIM115 (closed by __exit__)
        self._crc, self._bytes = 0, 0
        self._threads = ThreadPoolExecutor(_THREADS)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._bytes += len(view)
        if len(view) < _PIECE:
            self._crc = zlib.crc32(data, self._crc)
            return self._file.write(data)
        size = max(_PIECE, -(-len(view) // _PIECES))
        pieces = [view[at : at + size] for at in range(0, len(view), size)]
        counting = [self._threads.submit(zlib.crc32, piece) for piece in pieces]
        try:
            return self._file.write(data)
        finally:  # torch may free the data when this returns
            for piece, crc in zip(pieces, counting, strict=True):
                self._crc = checksums.joined(self._crc, crc.result(), len(piece))

    def fileno(self) -> int:
        """Flushed: Megatron calls it to sync the file, and would leave the last block behind."""
        self._file.flush()
        return self._file.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_SummedFile":
        return self

    def __exit__(self, kind: Any, *error: object) -> None:
        self._threads.shutdown()
        self._file.close()
        if kind is None:
            entry = {"bytes": self._bytes, "crc32": f"{self._crc:08x}"}
            sidecar = self._path.with_name(_SIDECAR + self._path.name)
            sidecar.write_text(json.dumps(entry))


def install() -> None:
    """Let this process, and the workers of its asynchronous saves, write checksums."""
    torch.serialization.set_crc32_options(False)
    filesystem_async.open = _SummedFile
    serialization.save_config = _gather_and_save_config
    PersistentAsyncCaller.async_loop = staticmethod(worker.loop)
    PersistentAsyncCaller.schedule_async_call = _schedule_from_the_host
    PersistentAsyncCaller.is_current_async_call_done = _is_done_by_a_living_worker


def keep_no_process(asynchronous: bool) -> None:
    """Give the writer its queue of results, for which it would spawn a process that outlives us.

    asynchronous: saves happen in a worker, so the queue needs a process; it ends with this one.
    """
    if not asynchronous:
        filesystem_async._results_queue = queue.Queue()
    elif filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
        manager.start(initializer=worker.end_with_rank, initargs=(os.getpid(),))
        filesystem_async._results_queue = manager.Queue()
        # of the fork server, whose end Megatron would take for the worker's
        multiprocessing.set_forkserver_preload(["__main__", _UNDISTURBED])


def _schedule_from_the_host(self: PersistentAsyncCaller, request: Any) -> None:
    """Hand the worker a request, and return when it has the tensors. As Megatron's, but with
    tensors on the CPU, and an error instead of a wait for a worker that has ended.

    Raises SaveWorkerError.
    """
    if request.async_fn is None:  # nothing to write on this rank
        return
    if self.process is None:
        self.process = self._get_process(torch.distributed.get_rank())
    rank, buckets, results = request.async_fn_args
    with staging.on_the_host(buckets) as staged:
        self._persistent_preload_q.put(request.call_idx)
        self._persistent_queue.put(
            request._replace(async_fn_args=[rank, None, results], preload_fn=staged)
        )
        taken = self._persistent_preload_q
        with taken._cond:  # JoinableQueue.join, which has no time limit
            while not taken._unfinished_tasks._semlock._is_zero():
                _check_worker(self.process)
                taken._cond.wait(_LOOK_S)


def _is_done_by_a_living_worker(
    self: PersistentAsyncCaller, blocking: bool = False, no_dist: bool = False
) -> bool:
    """Megatron's question, which with `blocking` is asked until the worker answers.

    Raises SaveWorkerError.
    """
    while self.process and self.cur_item is None and self._persistent_comp_q.empty():
        _check_worker(self.process)
        if not blocking:
            break
        time.sleep(_LOOK_S / 10)
    return _is_done(self, blocking, no_dist)


def _check_worker(process: multiprocessing.Process) -> None:
    if not process.is_alive():
        raise SaveWorkerError(
            f"the process that writes asynchronous saves ended with status {process.exitcode} (its "
            "last words are above), so the checkpoint under way is not complete: resume from the "
            "one before it, or save with checkpoint.async_save = false"
        )


def run_worker(*arguments: Any) -> None:
    """Megatron's loop over the requests of saves, in the process that is to write them."""
    install()
    # Megatron's loop chooses a GPU, and would make a CUDA context there. It needs none.
    torch.cuda.device_count, torch.cuda.set_device = lambda: 1, lambda device: None
    _async_loop(*arguments)


def _gather_and_save_config(config: Any, checkpoint_dir: str) -> None:
    """On rank 0, when the shards are on the disk: the checksums, then `metadata.json`, and all that
    Megatron does not sync, so that nothing older is deleted before this checkpoint is there."""
    folder = Path(checkpoint_dir)
    if not folder.is_dir():  # an object store's
        _save_config(config, checkpoint_dir)
        return
    sidecars = list(folder.glob(f"{_SIDECAR}*"))
    shards = {p.name.removeprefix(_SIDECAR): json.loads(p.read_text()) for p in sidecars}
    with tempfile.TemporaryDirectory() as apart:
        _save_config(config, apart)
        config_files = {path.name: checksums.of_file(path) for path in Path(apart).iterdir()}
    checksums.write(folder, shards | config_files)
    for path in sidecars:
        path.unlink()
    _save_config(config, checkpoint_dir)
    others = (path for path in folder.iterdir() if path.name not in shards)
    for path in (*others, folder, folder.parent):
        sync(path)
