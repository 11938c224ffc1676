"""Several processes of one machine, each a rank of a gloo group, from the server of `warm`."""

import contextlib
import datetime
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import warm

from megacpp_mcore.stack import bridges

_RANK = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    function, arguments = pickle.load(file)
function(int(sys.argv[2]), *arguments)
"""


class RankError(Exception):
    """A rank has failed; its traceback is the message."""


def start(function: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Call function(rank, *arguments), a function of a module, in `ranks` processes at once.

    The variables that a launcher sets are there, and RENDEZVOUS, where the ranks of this call alone
    meet: a file of ranks that were killed would let the next ones wait for them. Raises RankError
    with what the first rank that failed wrote to its standard error; by then the others are killed.
    """
    path = os.pathsep.join(filter(None, sys.path))  # the test's own modules are found there
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(tempfile.NamedTemporaryFile())
        file.write(pickle.dumps((function, arguments)))
        file.flush()
        meeting = f"file://{stack.enter_context(tempfile.TemporaryDirectory())}/store"
        processes, logs = [], []
        for rank in range(ranks):
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "RENDEZVOUS": meeting}
            logs.append(stack.enter_context(tempfile.TemporaryFile("w+")))
            process = subprocess.Popen(
                [warm.python(), "-c", _RANK, file.name, str(rank)], stderr=logs[rank],
                env=os.environ | {name: str(n) for name, n in names.items()} | {"PYTHONPATH": path},
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        while any(process.poll() is None for process in processes):
            _raise_first(processes, logs)
            time.sleep(0.02)
        _raise_first(processes, logs)


def _raise_first(processes: list[subprocess.Popen], logs: list[IO[str]]) -> None:
    for rank, (process, log) in enumerate(zip(processes, logs, strict=True)):
        if process.poll():
            log.seek(0)
            raise RankError(f"rank {rank} ended with {process.returncode}:\n{log.read()}")


def run_ranks(check: Callable[[int, str], None], folder: Path, ranks: int = 2) -> None:
    """Call check(rank, folder) in every one of `ranks` processes; what one raises is raised here.

    check: a function of a module. The process group is there, Megatron's groups are not.
    """
    start(_rank, (check, ranks, str(folder)), ranks)


def _rank(rank: int, check: Callable[[int, str], None], ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # what a check draws without a seed is the same in every run
    bridges.install()
    meet(rank, ranks)
    check(rank, folder)
    dist.destroy_process_group()


def meet(rank: int, ranks: int) -> None:
    """Initialise this process's group over gloo, as one of the ranks of `start`. A rank that waits
    two minutes for another one fails."""
    dist.init_process_group(
        "gloo",
        init_method=os.environ["RENDEZVOUS"],
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=120),
    )
