"""M2RNN's CUDA kernels, compiled with nvcc on first use (`megacpp_mcore.kernels.nvcc`)."""

import ctypes
import functools
from pathlib import Path

from megacpp_mcore.kernels import nvcc
from megacpp_mcore.kernels.nvcc import KernelBuildError, find_nvcc, reason

__all__ = ["KernelBuildError", "find_nvcc", "library", "reason"]

_SOURCES = Path(__file__).parent / "csrc"


@functools.cache
def library(architecture: str) -> ctypes.CDLL:
    """The kernels for `architecture` ("sm_90"). Raises KernelBuildError."""
    return nvcc.library(_SOURCES / "m2rnn.cu", architecture, "MEGACPP_BACKENDS=m2rnn=reference")
