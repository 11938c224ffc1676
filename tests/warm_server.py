"""The server of `warm`: imports when a client first asks, and forks a process for every program.

Arguments: the listening socket's number, the module to import, and the module to import once for
every PYTHONPATH. It ends when its standard input does, which is when its maker ends.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import weakref
from dataclasses import dataclass
from types import ModuleType

BARE = "WARM_BARE"  # a program with this variable has nothing that is imported for its PYTHONPATH


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    program = serve(listener, *sys.argv[2:])
    if program:
        os._exit(run(program))  # the end of an interpreter with Megatron in it takes a second


def serve(listener: socket.socket, preload: str, preload_by_path: str) -> list[str] | None:
    """Answer clients until the standard input ends.

    Returns once more in every fork that is to be a program: its words, with everything else set.
    """
    if 0 in select.select([listener, 0], [], [])[0]:
        return None
    _preload(preload)
    paths: dict[str, str] = {}  # PYTHONPATH -> the socket of its own server
    programs: dict[int, Program] = {}  # by the descriptors that tell that it or its client ended
    while True:
        ready, _, _ = select.select([listener, 0, *programs], [], [])
        if 0 in ready:
            for program in set(programs.values()):
                program.end()
            return None
        for program in {programs[descriptor] for descriptor in ready if descriptor in programs}:
            for descriptor in program.descriptors():
                del programs[descriptor]
            program.end()
        if listener not in ready:
            continue
        connection, _ = listener.accept()
        data, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        words, folder, environment = json.loads(data)
        path = environment.get("PYTHONPATH", "")
        if not preload_by_path or BARE in environment:
            pid = os.fork()
            if not pid:
                _close(listener, connection, *programs)
                return _begin(streams, words, folder, environment)
            os.setpgid(pid, pid)  # here and there: whichever comes first
            program = Program(pid, os.pidfd_open(pid), connection)
            programs |= dict.fromkeys(program.descriptors(), program)
        else:
            if path not in paths:
                paths[path] = f"{listener.getsockname()}.{len(paths)}"
                own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                own.bind(paths[path])
                own.listen(64)
                if not os.fork():
                    _close(listener, connection, *streams, *programs)
                    _add_to_path(path)
                    return serve(own, preload_by_path, "")
                own.close()
            connection.send(f"at {paths[path]}".encode())
            connection.close()
        _close(*streams)


@dataclass(frozen=True)
class Program:
    """A running program, and the client that waits for it."""

    pid: int
    pidfd: int
    client: socket.socket

    def descriptors(self) -> tuple[int, int]:
        return self.pidfd, self.client.fileno()

    def end(self) -> None:
        """It has ended, or its client has; what it started and left behind ends, too."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        with contextlib.suppress(BrokenPipeError):
            self.client.send(str(os.waitstatus_to_exitcode(status)).encode())
        _close(self.pidfd, self.client)


def _preload(module: str) -> None:
    importlib.import_module(module)
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise SystemExit(f"{module} started threads ({len(threads)}): their locks cannot be forked")
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False  # else each program ends by taking torch's operators apart, 27 ms
    gc.freeze()  # no program's collector visits, and so copies, what all of them share


def _close(*what: socket.socket | int) -> None:
    for each in what:
        os.close(each) if isinstance(each, int) else each.close()


def _add_to_path(path: str) -> None:
    """Put the entries of a PYTHONPATH that are not there yet behind the script's own folder."""
    sys.path[1:1] = [entry for entry in path.split(os.pathsep) if entry and entry not in sys.path]


def _begin(streams, words, folder, environment) -> list[str]:
    """In a fork of the server: what a new process has."""
    os.setpgid(0, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    _add_to_path(environment.get("PYTHONPATH", ""))
    return words


def run(words: list[str]) -> int:
    """Do what `python WORDS` does, the functions of atexit included; its exit status."""
    status = 0
    try:
        _execute(*words)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
            status = 1
        else:
            status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status & 0xFF


def _execute(kind: str, *rest: str) -> None:
    if kind == "-u":  # pytest-xdist's workers, who write to their descriptors themselves
        _execute(*rest)
    elif kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        module = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    elif kind == "-m":
        sys.argv, sys.path[0] = list(rest), os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif not kind.startswith("-"):
        sys.argv, sys.path[0] = [kind, *rest], os.path.dirname(os.path.abspath(kind))
        runpy.run_path(kind, run_name="__main__")
    else:
        raise SystemExit(f"{kind} is not one of -u, -c CODE, -m MODULE and a script")


if __name__ == "__main__":
    main()
