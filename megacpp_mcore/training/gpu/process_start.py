"""When this process and its launcher started, from /proc."""

import contextlib
import os
import time
from pathlib import Path


def start_times() -> dict[str, float]:
    """cold_start_s: seconds since this process started. launch_s: how long after its parent, the
    launcher, it started; absent for ranks that torchrun restarted, and without /proc."""
    started = _started(os.getpid())
    found = {"cold_start_s": round(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 3)}
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":  # `megacpp train --gpus`, torchrun
        with contextlib.suppress(OSError):
            found["launch_s"] = round(started - _started(os.getppid()), 3)
    return found


def _started(pid: int) -> float:
    """When a process started, in seconds of CLOCK_BOOTTIME, to a clock tick: see proc(5).

    psutil's start time is less exact: it may be off by a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
