"""Run the ranks of one machine under torchrun's agent, and explain in one sentence how they failed.

The agent is torch.distributed.elastic's, as `torchrun --standalone` starts it. It polls the ranks
ten times a second; when one fails, it sends SIGTERM to the others, which the reaper of each ends
GRACE_S later, even if they wait in a collective.
"""

import contextlib
import json
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from megacpp_mcore.files import write_atomically
from megacpp_mcore.host.reaper import GRACE_S
from megacpp_mcore.training import heartbeat

_RANK = "megacpp_mcore.training.gpu.rank_process"
_AGENTS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # signals that end the agent
_HANDLED = (signal.SIGTERM, *_AGENTS)
# Exit codes of ranks that fail because another one did (the agent's SIGTERM, the NCCL watchdog's
# SIGABRT) -> how late they sort when looking for the first failure.
_SECONDARY = {-signal.SIGTERM: 3, -signal.SIGABRT: 2}


@dataclass(frozen=True)
class RanksOutcome:
    """How the ranks ended. status: exit status, 0 if all succeeded. reason: the first failure."""

    status: int
    reason: str | None = None


def run_ranks(module: str, argv: Sequence[str], count: int) -> RanksOutcome:
    """Run `python -m module argv...` as `count` ranks, and wait for them. If this process ends, for
    any cause, so do they."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if count > 1:  # as torchrun does: the ranks share the machine's cores
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=count, run_id=uuid.uuid4().hex,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1,
        signals_to_handle=",".join(number.name for number in _AGENTS),
    )  # fmt: skip
    words = ("-u", "-m", _RANK, str(os.getpid()), module, *argv)
    with _TermHandedOn(module) as term:
        try:
            elastic_launch(config, sys.executable)(*words)
        except ChildFailedError as error:
            if not term.came:
                return _outcome(error.failures, count)
            reason = "SIGTERM ended the launcher and its ranks"
            return RanksOutcome(128 + signal.SIGTERM, reason)
        except SignalException as error:
            reason = f"{error.sigval.name} ended the launcher and its ranks"
            return RanksOutcome(128 + error.sigval, reason)
    return RanksOutcome(128 + signal.SIGTERM if term.came else 0)


def record_failure(error: BaseException) -> None:
    """In a rank that fails: let the launcher name the error. Raises nothing.

    As torchrun's own handler, which a rank that is killed meanwhile leaves with a part of the file:
    its agent then fails to read that, instead of saying who was killed.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    with contextlib.suppress(Exception):  # such as a full disk: the error itself counts
        more = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
        said = {"message": f"{type(error).__name__}: {error}", "extraInfo": more}
        write_atomically(path, json.dumps({"message": said}))


class _TermHandedOn:
    """SIGTERM goes on to the ranks, which save and end: torchrun's agent would give them 30 s.

    A second one ends them at once. Without a rank yet, the agent ends as torchrun's does.
    module: what the ranks run, by which they are known among this process's children.
    """

    def __init__(self, module: str) -> None:
        self.came, self._module = 0, module
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "_TermHandedOn":
        self._before = {number: signal.getsignal(number) for number in _HANDLED}
        signal.signal(signal.SIGTERM, self._hand_on)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():  # the agent leaves its own in place
            signal.signal(number, handler)

    def _hand_on(self, number: int, frame: Any) -> None:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        self.came += 1
        told = False
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if self._module in child.cmdline():
                    child.send_signal(signal.SIGKILL if self.came > 1 else number)
                    told = True
        if not told:
            raise SignalException("no rank is there yet", signal.SIGTERM)


def _first_failure(failures: dict[int, Any]) -> tuple[int, Any]:
    """(rank, failure) of the root cause: a rank that ended itself because one makes no progress,
    whose name it gives; else a killed rank; else the earliest error.

    A rank that was killed GRACE_S after another failed was killed because of that. After a failure
    the collectives of the other ranks fail milliseconds later, but the agent's timestamps have
    whole seconds; the error files' times are finer.
    """

    def at(failure: Any) -> int:
        return _written_ns(failure) or failure.timestamp * 10**9

    first = min(map(at, failures.values()))

    def order(item: tuple[int, Any]) -> tuple[int, int, int]:
        rank, failure = item
        if failure.exitcode == heartbeat.EXIT_STATUS:
            return -1, _written_ns(failure) or 0, rank
        if written := _written_ns(failure):
            return 1, written, rank
        if failure.exitcode < 0:
            if at(failure) - first > GRACE_S * 10**9 / 2:
                return max(_SECONDARY.values()), 0, rank
            return _SECONDARY.get(failure.exitcode, 0), 0, rank
        return 1, failure.timestamp * 10**9, rank

    return min(failures.items(), key=order)


def _written_ns(failure: Any) -> int | None:
    """When the rank wrote its error file; None if it did not."""
    try:
        return os.stat(failure.error_file).st_mtime_ns
    except OSError:
        return None


def _outcome(failures: dict[int, Any], count: int) -> RanksOutcome:
    rank, failure = _first_failure(failures)
    who, code = f"rank {rank} of {count}", failure.exitcode
    if _written_ns(failure):
        said = failure.message if isinstance(failure.message, str) else failure.message["message"]
        # A rank that recorded its error may still be ended by the agent, or abort while it destroys
        # its process groups: then the status is that of one that failed as it did.
        codes = (code, *(failures[other].exitcode for other in sorted(failures)), 1)
        status = next(code for code in codes if code > 0)
        return RanksOutcome(status, f"{who} failed: {said.strip().splitlines()[0]}")
    if code > 0:
        return RanksOutcome(code, f"{who} ended with status {code}; its message is above")
    name = signal.Signals(-code).name
    guess = " (out of host memory, or by a user)" if name == "SIGKILL" else ""
    return RanksOutcome(128 - code, f"{who} was killed by {name}{guess}")
