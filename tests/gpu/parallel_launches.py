"""Launches of torchrun as processes: waited for, ended with their ranks, and where hosts meet."""

import contextlib
import random
import socket
import subprocess
import threading
import time
from collections.abc import Sequence

import psutil


def status(
    processes: Sequence[subprocess.Popen], limit_s: float, stopped: threading.Event | None = None
) -> int | str:
    """Wait until all have ended or one has failed. The others and the ranks that they have made
    outlive neither it, nor the limit, nor `stopped`."""
    deadline = time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline:
            if stopped is not None and stopped.is_set():
                return "stopped: no test waits for it any more"
            statuses = [process.poll() for process in processes]
            if failed := [status for status in statuses if status]:
                return failed[0]
            if None not in statuses:
                return 0
            time.sleep(0.1)
        return f"no end within {limit_s:.0f} s"
    finally:
        for process in processes:
            end(process)


def end(process: subprocess.Popen) -> None:
    """Kill a torchrun and its ranks, each of which is in a session of its own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for rank in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
        process.kill()
    process.wait()


def free_port() -> int:
    """One that is free now, below those that the kernel gives to NCCL's sockets meanwhile."""
    while True:
        port = random.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("localhost", port)):
            return port
