"""A `python` that starts at once: forked from a server that has imported what its programs need.

A process of its own costs five seconds of processor time to import torch and Megatron, so a test
whose point is not a start runs `warm.python()` where it would run `sys.executable`: with -c CODE,
-m MODULE or a script, arguments, any environment, folder and standard streams, and the exit status
of the program. A kill of that process, by a timeout say, kills the program.

A server of our own, not a fork of the test's process: a fork has the locks of its parent's threads,
which are not there to release them, and this server has no thread but the one (it refuses to begin
otherwise; torch starts its own with the first parallel loop, never as it is imported). On a host
with a GPU there is no server, as what Megatron imports there starts threads: Python is Python.
"""

import atexit
import contextlib
import functools
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED = "WARM_PYTHON"  # the variable with the command of pytest-xdist's leader, for its workers
_HERE = Path(__file__).parent
_DRIVER = Path("/proc/driver/nvidia/version")


@functools.cache
def python() -> str:
    """The command, with torch and Megatron imported as this package's commands import them."""
    return os.environ.get(SHARED) or Server("warm_preload").command


@contextlib.contextmanager
def as_sys_executable() -> Iterator[None]:
    """What the code under test starts with sys.executable starts at once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "executable", python())
        yield


@functools.cache
def folder_of_megacpp() -> str:
    """A folder for the PATH, in which `megacpp` is the command run by `python()`, and so is what it
    starts with sys.executable."""
    folder = tempfile.mkdtemp(prefix="warm-")
    atexit.register(shutil.rmtree, folder)
    command = Path(folder, "megacpp")
    program = f"import sys; sys.executable = {python()!r}\nfrom megacpp_mcore.cli import main\n"
    words = shlex.join([python(), "-c", f"{program}sys.exit(main())"])
    command.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    command.chmod(0o755)
    return folder


def close() -> None:
    """End the servers of this process."""
    for server in _SERVERS:
        server.close()


_SERVERS: list["Server"] = []


class Server:
    """A server, its folder and its command; it ends with the process that made it.

    preload: the module that it imports once a program asks. preload_by_path: a module that it
    imports, if given, once for every PYTHONPATH that a program asks for, in a server of that path.
    changes: of the environment it imports in.
    """

    def __init__(self, preload: str, preload_by_path: str = "", **changes: str) -> None:
        self.command = sys.executable
        # It needs pidfd_open and sockets of whole messages, and imports that start no thread.
        if sys.platform != "linux" or _DRIVER.exists():
            return
        folder = tempfile.mkdtemp(prefix="warm-")  # short: a socket's path has 107 bytes
        command = Path(folder, "python")
        command.write_text(f"#!{sys.executable} -SE\n{(_HERE / 'warm_client.py').read_text()}")
        command.chmod(0o755)
        self.command = str(command)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"{folder}/socket")
            listener.listen(64)  # programs wait there until the imports are done
            path = os.pathsep.join([str(_HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
            self._process = subprocess.Popen(
                [sys.executable, str(_HERE / "warm_server.py"), str(listener.fileno()), preload,
                 preload_by_path],
                pass_fds=[listener.fileno()], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                env=os.environ | changes | {"PYTHONPATH": path}, start_new_session=True,
            )  # fmt: skip
        self._folder = folder
        _SERVERS.append(self)
        atexit.register(self.close)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.stdin.close()
            self._process.wait(60)
            shutil.rmtree(self._folder)
