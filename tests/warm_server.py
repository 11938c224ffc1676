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
from types import ModuleType


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
    while True:
        ready, _, _ = select.select([listener, 0], [], [], 1.0)
        _reap()
        if 0 in ready:
            return None
        if not ready:
            continue
        connection, _ = listener.accept()
        data, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        words, folder, environment = json.loads(data)
        path = environment.get("PYTHONPATH", "")
        if not preload_by_path:
            if not os.fork():
                listener.close()
                return _begin(connection, streams, words, folder, environment)
        else:
            if path not in paths:
                paths[path] = f"{listener.getsockname()}.{len(paths)}"
                own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                own.bind(paths[path])
                own.listen(64)
                if not os.fork():
                    listener.close()
                    _close(connection, streams)
                    _add_to_path(path)
                    return serve(own, preload_by_path, "")
                own.close()
            connection.send(f"at {paths[path]}".encode())
        _close(connection, streams)


def _preload(module: str) -> None:
    importlib.import_module(module)
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise SystemExit(f"{module} started threads ({len(threads)}): their locks cannot be forked")
    gc.freeze()  # no program's collector visits, and so copies, what all of them share


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _close(connection: socket.socket, streams: list[int]) -> None:
    connection.close()
    for stream in streams:
        os.close(stream)


def _add_to_path(path: str) -> None:
    """Put the entries of a PYTHONPATH that are not there yet behind the script's own folder."""
    sys.path[1:1] = [entry for entry in path.split(os.pathsep) if entry and entry not in sys.path]


def _begin(connection, streams, words, folder, environment) -> list[str]:
    """In a fork of the server: fork the program, in which this returns, and see it to its end."""
    program = os.fork()
    if program:
        os.setpgid(program, program)  # here and there: whichever comes first
        for stream in streams:
            os.close(stream)
        ended = os.pidfd_open(program)
        select.select([connection, ended], [], [])
        # The program has ended, or its client has; what it started and left behind ends, too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program, signal.SIGKILL)
        _, status = os.waitpid(program, 0)
        with contextlib.suppress(BrokenPipeError):
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    connection.close()
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
    if kind == "-c":
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
        raise SystemExit(f"{kind} is not one of -c CODE, -m MODULE and a script")


if __name__ == "__main__":
    main()
