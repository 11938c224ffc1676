"""The process of one rank of `run_ranks`: runs a module, and ends when its launcher ends.

A launcher that is killed by SIGKILL (out of host memory, or by a scheduler) cannot stop its ranks.
Without this they would keep training, hold their GPUs and overwrite the receipt.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(launcher: str, module: str, *argv: str) -> None:
    """Run `python -m module argv...` in this process, a child of the process id `launcher`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(launcher):  # the launcher ended before prctl took effect
            sys.exit(128 + signal.SIGTERM)
    sys.argv = [module, *argv]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
