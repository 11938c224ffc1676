"""Run a command that ends, with all that it has started, when the process PARENT ends.

    python -m megacpp_mcore.host.supervised PARENT COMMAND ...

SIGTERM ends them, too. A compiler that outlives its build would write the object files of the next.
"""

import contextlib
import os
import signal
import subprocess
import sys

import psutil

from megacpp_mcore.host.processes import end_with_parent


def _end(*_: object) -> None:
    started = psutil.Process().children(recursive=True)
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(started, timeout=10)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    end_with_parent(int(sys.argv[1]), signal.SIGTERM)
    sys.exit(subprocess.call(sys.argv[2:]))
