"""Processes that end with the one that started them, however that ends."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Let Linux end this process, by that signal, as soon as the process `parent`, which started
    it, ends.

    A parent that is killed by SIGKILL (out of memory, or by a scheduler) can stop no process of its
    own: they would wait for it for ever, hold memory and GPUs, and write into its files.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
        if os.getppid() != parent:  # it ended before prctl took effect
            os._exit(128 + by)
