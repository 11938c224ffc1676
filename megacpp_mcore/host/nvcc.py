"""Where the host's nvcc is."""

import os
import shutil


def find_nvcc() -> str | None:
    """The nvcc of CUDA_HOME, else of PATH, else of /usr/local/cuda, or None."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [*(f"{home}/bin/nvcc" for home in homes), "nvcc", "/usr/local/cuda/bin/nvcc"]
    return next(filter(None, map(shutil.which, candidates)), None)
