"""Which ptxas assembles Triton's kernels: not the one that Triton brings.

Triton 3.6.0 brings ptxas 12.8.93, which assembles some products of Hopper's tensor cores (wgmma)
wrong. Of one kernel of `mla_up` it computed an operand's descriptor from a register that held
something else: an illegal address on an H200, and it could have been wrong numbers. 12.9 and newer
assemble the same PTX right. Upstream saw more: wrong numbers by 12.8 and an invalid write by 13.0
(fla-org/flash-linear-attention #1262), and operands in registers that are overwritten while they
are read, which NVIDIA fixed in 13.3 (triton-lang/triton #11781).
"""

import importlib.util
import os
import re
import subprocess
from importlib import metadata
from pathlib import Path

VARIABLE = "TRITON_PTXAS_PATH"  # which Triton reads at every compilation
PACKAGE = "nvidia-cuda-nvcc"
RIGHT, FIXED = (12, 9), (13, 3)  # see above: the first without our error; without the others


def choose() -> None:
    """Let Triton use the ptxas of nvidia-cuda-nvcc, else that of torch (13.0 in its 2.11.0).

    A user's own choice stays. Inductor sets the variable too, to torch's, when it compiles first.
    """
    of_torch = _of_torch()
    if os.environ.get(VARIABLE) not in (None, str(of_torch)):
        return
    if (found := _of_package() or of_torch) is not None:
        os.environ[VARIABLE] = str(found)


def version() -> tuple[int, int] | None:
    """The version of the ptxas that Triton uses in this process; None where Triton or ptxas cannot
    be run."""
    path = os.environ.get(VARIABLE) or _of("triton", "backends/nvidia/bin/ptxas")
    if path is None:
        return None
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\d+)\.(\d+)", said.stdout)
    return (int(found[1]), int(found[2])) if found else None


def _of_package() -> Path | None:
    try:
        return _program(Path(metadata.distribution(PACKAGE).locate_file("nvidia/cu13/bin/ptxas")))
    except metadata.PackageNotFoundError:
        return None


def _of_torch() -> Path | None:
    return _of("torch", "bin/ptxas")


def _of(module: str, place: str) -> Path | None:
    spec = importlib.util.find_spec(module)
    return _program(Path(spec.origin).parent / place) if spec and spec.origin else None


def _program(path: Path) -> Path | None:
    return path if path.is_file() and os.access(path, os.X_OK) else None
