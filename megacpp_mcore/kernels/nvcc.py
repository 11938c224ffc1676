"""Compile the CUDA C++ of a kernel with nvcc, and keep the library.

A run compiles what its recipe needs before it builds the model (`megacpp_mcore.training.kernels`);
elsewhere a library is compiled on first use. It has a plain C interface and is called through
ctypes: building it takes seconds, and needs neither Python's headers nor torch's. Importing this
module imports neither torch nor CUDA.
"""

import ctypes
import errno
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.files import cache_folder
from megacpp_mcore.host.nvcc import find_nvcc
from megacpp_mcore.surfaces.support import OfMachine, Unbuildable

TESTED_MAJOR = 9
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_HOST_COMPILERS = ("g++", "gcc", "c++", "cc")
_FLAGS = ("-O3", "-std=c++17", "-Xcompiler", "-fPIC")


class KernelBuildError(MegacppError):
    """nvcc is missing or refuses the source, or its output cannot be stored or loaded."""


@functools.cache
def untested_gpu() -> str | None:
    """Why this process's GPU, if it has one, is not one for which kernels are built, or None."""
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major != TESTED_MAJOR:
        return OfMachine(
            f"the GPU has compute capability {major}.{minor}; the kernels are tested on "
            f"{TESTED_MAJOR}.x only"
        )
    return None


@dataclass(frozen=True)
class Library:
    """CUDA C++ of ours, compiled for one GPU.

    source: the file with the entry points. Its folder's other .cu files are compiled at the same
    time, each by a process of its own, and linked with it. instead: surface=backend, the slower
    backend that a user without nvcc can name. feature: "a" for Hopper's own instructions.
    """

    source: Path
    instead: str
    feature: str = ""

    def reason(self) -> str | None:
        """Why it cannot be built for this process's GPU, or None. Nothing is built. Unbuildable
        where only nvcc is missing."""
        return untested_gpu() or (None if find_nvcc() else Unbuildable(self._no_nvcc()))

    @functools.cache  # noqa: B019  there are two of these in a process
    def load(self, architecture: str | None = None) -> ctypes.CDLL:
        """The library, compiled if it is not kept yet. architecture: by default this GPU's.

        The file is under XDG_CACHE_HOME (~/.cache); its name has a hash of all files in the
        source's folder, the flags and nvcc's version. Other processes that need it meanwhile wait
        for the one that compiles it. Raises KernelBuildError with nvcc's message, or with why the
        file cannot be written or loaded.
        """
        nvcc = find_nvcc()
        if nvcc is None:
            raise KernelBuildError(self._no_nvcc())
        architecture = architecture or self._architecture()
        name = f"{self.source.stem}-{architecture}-{fingerprint(nvcc, self.source.parent)}.so"
        path = cache_folder("kernels", name)
        try:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path.with_suffix(".lock"), "w") as lock:
                    _lock(lock)
                    if not path.exists():
                        _compile(nvcc, self.source, architecture, path)
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelBuildError(
                f"cannot keep or load the compiled kernels at {path}: {error}; name a folder for "
                "them in XDG_CACHE_HOME that can be written to and loaded from"
            ) from error

    def _architecture(self) -> str:
        import torch

        major, minor = torch.cuda.get_device_capability()
        return f"sm_{major}{minor}{self.feature}"

    def _no_nvcc(self) -> str:
        return (
            f"nvcc, which compiles {self.source.name}, is not found (CUDA_HOME, PATH, "
            "/usr/local/cuda): install the CUDA toolkit, or allow a slower backend by naming it, "
            f"{self.instead}, in the recipe's [backends] or in MEGACPP_BACKENDS"
        )


def _lock(file: IO[str]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise KernelBuildError(
            f"the file system of {file.name} has no locks ({error.strerror}), so that several "
            "processes would compile the kernels over one another: name a folder on a local disk "
            "in XDG_CACHE_HOME"
        ) from error


def fingerprint(nvcc: str, sources: Path) -> str:
    """A hash of nvcc's version, the flags and every file of the folder `sources`."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    digest.update(subprocess.run([nvcc, "--version"], capture_output=True, check=True).stdout)
    for source in sorted(sources.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(nvcc: str, source: Path, architecture: str, path: Path) -> None:
    number = architecture.removeprefix("sm_")
    target = f"-gencode=arch=compute_{number},code={architecture}"  # machine code, no PTX
    # In one piece: libraries are compiled side by side.
    sys.stderr.write(f"megacpp: compiling {source.name} for {architecture}: once\n")
    sys.stderr.flush()
    units = sorted(source.parent.glob("*.cu"))
    with tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as folder:
        objects = [Path(folder, f"{unit.stem}.o") for unit in units]
        _run([nvcc, target], {
            unit.name: [*_FLAGS, "-c", "-o", to, unit]
            for unit, to in zip(units, objects, strict=True)
        })  # fmt: skip
        whole = Path(folder, path.name)
        _run([nvcc, target], {source.name: ["-shared", "-o", whole, *objects]})
        os.replace(whole, path)


def _run(nvcc: list[str], words: dict[str, list[str | Path]]) -> None:
    """Run nvcc with its words for each of these files, all at once. Raises KernelBuildError for one
    that fails, when all have ended."""
    running = {}
    try:
        for name, own in words.items():
            running[name] = subprocess.Popen(
                [*nvcc, *own], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        ends = {name: process.communicate()[0].strip() for name, process in running.items()}
    finally:
        for process in running.values():
            process.kill()  # where Ctrl-C, or no place for another, came before its end
    for name, process in running.items():
        if process.returncode:
            # nvcc itself only says that it failed to preprocess a host compiler's properties.
            alone = not any(map(shutil.which, _HOST_COMPILERS))
            hint = ". nvcc needs a host compiler, and there is no g++: install one" if alone else ""
            raise KernelBuildError(
                f"{' '.join(nvcc)} failed on {name} with status {process.returncode}: "
                f"{ends[name]}{hint}"
            )
