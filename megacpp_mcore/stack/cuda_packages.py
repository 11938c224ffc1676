"""The packages of the extra `[cuda]` at their pins: which, and their installation."""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.stack import PINS

# Installed with the packages of PINS: the two other parts of Transformer Engine, the parts of
# FlashAttention-4's compiler, and what they import. Dependencies that are only declared (onnx; of
# mamba-ssm transformers and tilelang; of the compiler its CUDA 12, cuda-python and protobuf) are
# left out: a gigabyte that nothing here imports, but for MIMO's kernels.
_DEPENDENCIES = {
    "transformer-engine-cu13": "2.17.1",
    "transformer-engine-torch": "2.17.1",
    "nvdlfw-inspect": "0.2.2",
    "pydantic": "2.14.3",
    "pydantic-core": "2.50.4",
    "annotated-types": "0.8.0",
    "typing-inspection": "0.4.5",
    "importlib-metadata": "10.2.0",
    "zipp": "4.1.2",
    "einops": "0.8.2",
    "nvidia-cutlass-dsl-libs-base": "4.6.2",
    "nvidia-cutlass-dsl-libs-core": "4.6.2",
    "nvidia-cutlass-dsl-libs-cu13": "4.6.2",
    "apache-tvm-ffi": "0.1.15.post2",
    "torch-c-dlpack-ext": "0.1.5",
}
PACKAGES = {pin.name: pin.version for pin in PINS if pin.cuda} | _DEPENDENCIES
# No wheel of these is for torch 2.11 with CUDA 13.
COMPILED = ("transformer-engine-torch", "causal-conv1d", "mamba-ssm")


class CudaPackageError(MegacppError):
    """A package cannot be built or installed here."""


class CudaBuildError(CudaPackageError):
    """A compiler or pip has failed."""

    exit_status = 1


def missing(folder: Path) -> list[str]:
    """ "name==version" of the packages without a wheel in `folder`."""
    there = {in_file_names(path.name) for path in folder.glob("*.whl")}
    return [
        f"{name}=={version}" for name, version in PACKAGES.items()
        if not any(file.startswith(f"{in_file_names(name)}_{in_file_names(version)}_")
                   for file in there)
    ]  # fmt: skip


def install(folders: Sequence[Path], network: bool) -> None:
    """Install PACKAGES into this Python, wheels of `folders` first, and nothing that they declare
    beyond. network: whether what is not in `folders` is fetched. Raises CudaPackageError."""
    found = [f"--find-links={folder}" for folder in folders]
    pinned = [f"{name}=={version}" for name, version in PACKAGES.items()]
    pip("install", *found, *([] if network else ["--no-index"]), "--no-deps", *pinned)


def fetch(folder: Path) -> None:
    """Download the wheels of the packages that have one into `folder`. Raises CudaPackageError."""
    pinned = [f"{name}=={PACKAGES[name]}" for name in PACKAGES if name not in COMPILED]
    pip("download", "--dest", str(folder), "--only-binary=:all:", "--no-deps", *pinned)


def in_file_names(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def pip_command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]


def pip(*arguments: str, environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(
        pip_command(arguments[0], "-q", *arguments[1:]), env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise CudaBuildError(f"{done.stdout.strip()}\npip {arguments[0]} failed")
