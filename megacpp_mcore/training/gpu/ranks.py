"""The ranks of one machine under torchrun's agent, and one sentence when they do not end well.

The agent is torch.distributed.elastic's, as `torchrun --standalone` starts it: it looks at the
ranks ten times a second, and when one ends it sends the others SIGTERM, and after 30 s SIGKILL. So
a rank that dies takes the others with it within a minute, whatever collective they wait in.
"""

import os
import signal
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_RANK = "megacpp_mcore.training.gpu.rank"
# How a rank ends that another rank's end has brought down: by the agent, by its NCCL watchdog.
_SECONDARY = {-signal.SIGTERM: 3, -signal.SIGABRT: 2}


@dataclass(frozen=True)
class Ended:
    """status: for the shell; 0 when every rank ended well. reason: else, what happened first."""

    status: int
    reason: str | None = None


def run_ranks(module: str, words: Sequence[str], count: int) -> Ended:
    """Run `python -m module words` as `count` ranks and wait for them; they end with this process,
    whatever ends it."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if count > 1:  # as torchrun: the ranks share the machine's cores
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=count, run_id=uuid.uuid4().hex,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-u", "-m", _RANK, str(os.getpid()), module, *words)
    except ChildFailedError as error:
        return _ended(*_first(error.failures), count)
    except SignalException as error:
        return Ended(128 + error.sigval, f"{error.sigval.name} ended the launcher and its ranks")
    return Ended(0)


def _first(failures: dict[int, Any]) -> tuple[int, Any]:
    """The failure that brought the others about: a rank that was killed, then the earliest error.

    The errors of the others, whose collectives fail, come milliseconds later: the agent's own
    timestamps have whole seconds.
    """

    def order(item: tuple[int, Any]) -> tuple[int, int, int]:
        rank, failure = item
        if written := _written_ns(failure):
            return 1, written, rank
        if failure.exitcode < 0:
            return _SECONDARY.get(failure.exitcode, 0), 0, rank
        return 1, failure.timestamp * 10**9, rank

    return min(failures.items(), key=order)


def _written_ns(failure: Any) -> int | None:
    """When the rank recorded its error, or None where it did not."""
    try:
        return os.stat(failure.error_file).st_mtime_ns
    except OSError:
        return None


def _ended(rank: int, failure: Any, count: int) -> Ended:
    who, code = f"rank {rank} of {count}", failure.exitcode
    if _written_ns(failure):
        said = failure.message if isinstance(failure.message, str) else failure.message["message"]
        # A rank whose error is recorded may still abort as it takes its process groups down.
        return Ended(code if code > 0 else 1, f"{who} failed: {said.strip().splitlines()[0]}")
    if code > 0:
        return Ended(code, f"{who} ended with status {code}; what it said is above")
    name = signal.Signals(-code).name
    guess = " (out of host memory, or by hand)" if name == "SIGKILL" else ""
    return Ended(128 - code, f"{who} was killed by {name}{guess}")
