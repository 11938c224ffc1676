"""Ends what a rank has started when the rank ends, however that ends:

    python reaper.py RANK LAUNCHER

torchrun's agent starts every rank as the leader of a session, in whose process group its children
stay: workers of its data and of its saves, compilers, fork servers. A rank that is killed can end
none of them. This process is in the group, too, so the group's number is not given to another.

`megacpp train --gpus` sends SIGTERM to the whole group when another rank has failed. A rank whose
handler only notes the signal would wait in a collective until the agent's 30 s are over, so the
group is killed GRACE_S after it. From any other process than LAUNCHER the signal is a request to
save, which takes its time; 0: no process is.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

GRACE_S = 10.0  # for ranks to name their own errors, or dump their stacks, after another failed
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_RANK_ENDED = signal.SIGUSR1
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, _RANK_ENDED}
_TO_END_S = 5.0  # what the rank has started has this long to end after SIGTERM


def signal_at_parents_end(number: signal.Signals) -> None:
    """Let Linux send this process the signal as soon as its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def main(rank: int, launcher: int) -> None:
    """Wait for the end of the process `rank`, our parent; then end its group, this process too."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    signal_at_parents_end(_RANK_ENDED)
    deadline = None
    while os.getppid() == rank:
        if deadline is None:
            came = signal.sigwaitinfo(SIGNALS)
            if (came.si_signo, came.si_pid) == (signal.SIGTERM, launcher):
                deadline = time.monotonic() + GRACE_S
        elif (left := deadline - time.monotonic()) > 0:
            signal.sigtimedwait(SIGNALS, left)
        else:
            os.killpg(0, signal.SIGKILL)
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + _TO_END_S
    while _others() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(0, signal.SIGKILL)


def _others() -> bool:
    """Whether the group has a living process besides this one."""
    group, own = os.getpgrp(), os.getpid()
    for path in Path("/proc").iterdir():
        if not path.name.isdigit() or int(path.name) == own:
            continue
        try:  # proc(5): state, parent and group follow the name in parentheses
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            return True
    return False


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
