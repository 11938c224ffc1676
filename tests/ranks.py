"""Several processes of one machine, each a rank of a gloo group."""

import datetime
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megacpp_mcore.stack import bridges


def run_ranks(check: Callable[[int, str], None], folder: Path, ranks: int = 2) -> None:
    """Call check(rank, folder) in every one of `ranks` processes; what one raises is raised here.

    check: a function of a module. The process group is there, Megatron's groups are not.
    """
    mp.spawn(_rank, args=(check, ranks, str(folder)), nprocs=ranks)


def _rank(rank: int, check: Callable[[int, str], None], ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    bridges.before_megatron()
    bridges.install()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=120),
    )
    check(rank, folder)
    dist.destroy_process_group()
