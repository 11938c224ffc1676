"""Compile the CUDA C++ of a kernel with nvcc on first use, and keep the library.

The library has a plain C interface and is called through ctypes: building it takes seconds, and
needs neither Python's headers nor torch's. Importing this module imports neither torch nor CUDA.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from megacpp_mcore.errors import MegacppError

TESTED_MAJOR = 9
_FLAGS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC")
_SOURCES = Path(__file__).parent / "csrc"


class KernelBuildError(MegacppError):
    """nvcc is missing or refuses the source, or its output cannot be stored or loaded."""


def find_nvcc() -> str | None:
    """The nvcc of CUDA_HOME, else of PATH, else of /usr/local/cuda, or None."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [*(f"{home}/bin/nvcc" for home in homes), "nvcc", "/usr/local/cuda/bin/nvcc"]
    return next(filter(None, map(shutil.which, candidates)), None)


@functools.cache
def reason() -> str | None:
    """Why the kernels cannot be built for this process's GPU, or None. Nothing is built."""
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major != TESTED_MAJOR:
        return (
            f"the GPU has compute capability {major}.{minor}; the kernels are tested on "
            f"{TESTED_MAJOR}.x only"
        )
    if find_nvcc() is None:
        return "nvcc, which compiles the kernels on first use, is not found (CUDA_HOME, PATH)"
    return None


@functools.cache
def library(architecture: str) -> ctypes.CDLL:
    """The kernels for `architecture` ("sm_90"), compiled on the first call.

    The file is under XDG_CACHE_HOME (~/.cache); its name has a hash of the sources, the flags and
    nvcc's version. Other processes that need it meanwhile wait for the one that builds it. Raises
    KernelBuildError with nvcc's message, or with why the file cannot be written or loaded.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise KernelBuildError(
            "nvcc is not found (CUDA_HOME, PATH, /usr/local/cuda): install the CUDA toolkit, or "
            "set MEGACPP_BACKENDS=m2rnn=reference"
        )
    path = _cache_folder() / f"m2rnn-{architecture}-{_fingerprint(nvcc)}.so"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    _compile(nvcc, architecture, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelBuildError(
            f"cannot keep or load the compiled kernels at {path}: {error}; name a folder for them "
            "in XDG_CACHE_HOME that can be written to and loaded from"
        ) from error


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "megacpp-mcore" / "kernels"


def _fingerprint(nvcc: str) -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    digest.update(subprocess.run([nvcc, "--version"], capture_output=True, check=True).stdout)
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(nvcc: str, architecture: str, path: Path) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    command = [nvcc, *_FLAGS, f"-arch={architecture}", "-o", temporary, _SOURCES / "m2rnn.cu"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        temporary.unlink(missing_ok=True)
        raise KernelBuildError(
            f"{nvcc} -arch={architecture} failed on m2rnn.cu with status {result.returncode}: "
            f"{result.stderr.strip()}"
        )
    os.replace(temporary, path)
