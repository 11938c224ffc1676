"""How the processes of asynchronous saves begin: the one that writes, and the one of its results.

Each is a new Python that imports this. The second needs no Megatron, which takes four seconds to
import while the rank waits; the first needs it as a rank does, see `bridges.before_megatron`.
"""

import multiprocessing
import os
import signal
from typing import Any

from megacpp_mcore.host.processes import end_with_parent


def end_with_rank(rank: int) -> None:
    """Let this process end with its parent, and at no SIGTERM: Slurm sends that to every process of
    a task, whose rank then saves."""
    end_with_parent(rank)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def loop(*arguments: Any) -> None:
    """In the place of Megatron's `PersistentAsyncCaller.async_loop`."""
    # The parent is the rank, or its fork server, which ends with it.
    end_with_rank(os.getppid())
    if not multiprocessing.parent_process().is_alive():
        return
    from megacpp_mcore.stack import bridges

    bridges.before_megatron(runs=False)
    from megacpp_mcore.training.checkpoints import writer

    writer.run_worker(*arguments)
