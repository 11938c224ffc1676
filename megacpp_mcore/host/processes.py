"""Processes that end with the one that started them, however that ends."""

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

from megacpp_mcore.host.reaper import SIGNALS, signal_at_parents_end


def end_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Let Linux end this process, by that signal, as soon as the process `parent`, which started
    it, ends.

    A parent that is killed by SIGKILL (out of memory, or by a scheduler) can stop no process of its
    own: they would wait for it for ever, hold memory and GPUs, and write into its files.
    """
    if sys.platform == "linux":
        signal_at_parents_end(by)
        if os.getppid() != parent:  # it ended before that took effect
            os._exit(128 + by)


END_S = 15  # what a rank that has failed may take to leave


def end_within(seconds: int) -> None:
    """End the workers of this process now, and the process itself in `seconds`, with every thread's
    stack on stderr, unless it ends before. For a rank that has failed: others wait for its end.

    Megatron's data workers only note SIGTERM, by which multiprocessing ends workers before it waits
    for them without a limit: that held every failed rank for ever. The limit is for what else may
    wait: joins of threads, destructors of NCCL and CUDA. faulthandler's timer needs no interpreter
    lock; destructors that run after Python's end are ended by SIGALRM.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises at a data worker's end
    for worker in multiprocessing.active_children():
        worker.kill()
    faulthandler.dump_traceback_later(seconds, exit=True)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds + 2)


_reapers: list[subprocess.Popen] = []  # of this process: one, kept from the garbage collector


def end_children_with_this(launcher: int = 0) -> None:
    """Let all that this rank starts end when it ends, however it ends: see `reaper`.

    launcher: the process whose SIGTERM to the rank's group says that another rank has failed. Does
    nothing the second time, and in a process that leads no session, whose group others may be in.
    """
    if sys.platform != "linux" or os.getsid(0) != os.getpid() or _reapers:
        return
    script = str(Path(__file__).with_name("reaper.py"))
    # Signals that come before it listens wait for it: the mask is inherited.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        _reapers.append(subprocess.Popen(
            [sys.executable, "-I", "-S", script, str(os.getpid()), str(launcher)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ))  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
