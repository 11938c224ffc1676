"""Import the packages that doctor checks, in a fresh process: only an import shows a broken one.

The process has a time limit for each module. A module that ends it (a crash, an exit) or hangs is
reported as any other failure, and another process continues with the next module.
"""

import ctypes
import importlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata

from megacpp_mcore.host.processes import end_with_parent
from megacpp_mcore.stack import PROBES, Gpu, Probe

LIMIT_S = 120.0  # for one module: torch from a cold network disk takes half of it
_GPU = "gpu"


def probe(
    probes: Sequence[Probe] = PROBES, limit_s: float = LIMIT_S
) -> tuple[dict[str, str], Gpu | None]:
    """(module -> "" or why it cannot be imported, what torch says of the GPUs).

    Gpu is None without NVIDIA's driver. Modules of distributions that are optional and absent, or
    that need a driver which is not there, are left out.
    """
    driver = has_driver()
    names = [p.module for p in probes if _asked(p, driver)] + ([_GPU] if driver else [])
    found: dict[str, str] = {}
    gpu = Gpu(error="torch cannot be asked") if driver else None
    while remaining := [name for name in names if name not in found]:
        for name, result in _in_a_process(remaining, limit_s):
            if name == _GPU and isinstance(result, dict):
                gpu = Gpu(**result | {"devices": tuple(result["devices"])})
            elif name == _GPU:
                gpu = Gpu(error=result)
            found[name] = result if isinstance(result, str) else ""
    found.pop(_GPU, None)
    return found, gpu


def has_driver() -> bool:
    """Whether NVIDIA's driver library is on this machine."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _asked(probe: Probe, driver: bool) -> bool:
    if probe.optional:
        try:
            metadata.version(probe.package)
        except metadata.PackageNotFoundError:
            return False
    return driver or not probe.cuda


def _in_a_process(names: Sequence[str], limit_s: float):
    """Yield (name, "" or error) until all are imported or one ends the process."""
    child = subprocess.Popen(
        [sys.executable, "-m", "megacpp_mcore.stack.imports", str(os.getpid()), *names],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    lines: queue.Queue = queue.Queue()
    threading.Thread(target=_read, args=(child, lines), daemon=True).start()
    try:
        for name in names:
            try:
                line = lines.get(timeout=limit_s)
            except queue.Empty:
                yield name, f"its import did not end within {limit_s:g} s"
                return
            if line is None:
                yield name, f"its import ended the process with status {child.wait()}"
                return
            yield name, json.loads(line)
    finally:
        child.kill()
        child.wait()


def _read(child: subprocess.Popen, lines: queue.Queue) -> None:
    for line in child.stdout:
        lines.put(line)
    lines.put(None)


def gpu() -> Gpu:
    """What torch reports about the GPUs of this process; any failure of it is the finding."""
    try:
        import torch

        if not torch.cuda.is_available():
            return Gpu(error=f"torch {torch.__version__} finds no usable GPU")
        return Gpu(
            devices=tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))),
            cudnn=torch.backends.cudnn.version(),
            nccl=".".join(map(str, torch.cuda.nccl.version())),
        )
    except Exception as error:
        return Gpu(error=f"{type(error).__name__}: {error}")


def _import(name: str) -> str:
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    if getattr(module, "__file__", None) is None:  # pip was interrupted as it removed it
        where = ", ".join(getattr(module, "__path__", ()))
        return f"only a folder without __init__.py is there: {where}"
    if all(found.startswith("__") for found in vars(module)):  # a disk that was full, or lost it
        return f"nothing is in {module.__file__}"
    return ""


def main(parent: int, names: Sequence[str]) -> None:
    """Write one line for each of `names`, flushed, so that none is lost, in the fresh process,
    which ends with `parent`."""
    if os.getppid() == parent:  # not of a server that starts processes for others
        end_with_parent(parent)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a package may print, too
    if not any(name.startswith("transformer_engine") for name in names):
        # Megatron imports it, which fails without a driver: a check of its own.
        sys.modules.setdefault("transformer_engine", None)
    for name in names:
        result = asdict(gpu()) if name == _GPU else _import(name)
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
