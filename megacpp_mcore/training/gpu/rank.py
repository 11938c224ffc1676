"""One rank of `run_ranks`: a module that ends when its launcher does, however that ends.

A launcher that is killed by SIGKILL (out of host memory, a scheduler's last word) cannot end its
ranks: they would train on, hold their GPUs and write their receipt again.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(launcher: str, module: str, *words: str) -> None:
    """Run `python -m module words` in this process, a child of the process `launcher`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(launcher):  # it ended before that was asked for
            sys.exit(128 + signal.SIGTERM)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
