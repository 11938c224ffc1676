"""Gather the facts about this machine for `stack.doctor`; other processes import the packages."""

import glob
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.host import ptxas
from megacpp_mcore.stack import PINS, Facts, Library, imports

_CUDNN = "nvidia-cudnn-cu13"
_ALSO = (
    "transformer-engine-cu13",
    "transformer-engine-torch",
    "nvidia-cublas",
    _CUDNN,
    "nvidia-nccl-cu13",
    "deep-ep",
)
_MODULES = ("selective_scan_cuda",)
_PROGRAMS = {"cc": ("cc", "gcc", "clang"), "c++": ("c++", "g++", "clang++"), "nvcc": ("nvcc",)}
_ENVIRONMENT = ("MEGACPP_BACKENDS", "TRITON_INTERPRET")


def gather() -> Facts:
    """The facts about this machine. Absent things are left out; nothing raises."""
    torch = _spec("torch")  # not always of this environment: a container's, seen from one in it
    site = Path(torch.origin).parents[1] if torch else Path(sysconfig.get_path("purelib"))
    own = site / "nvidia" / "cudnn"
    lane, lane_error = _lane()
    imported, gpu = imports.probe()
    ptxas.choose()  # as a run does
    return Facts(
        python=tuple(sys.version_info[:3]),
        versions=_versions([*(pin.name for pin in PINS), *_ALSO]),
        imports=imported,
        gpu=gpu,
        cudnn=tuple(cudnn_in_order(os.environ, own)),
        cudnn_of_torch=str(own),
        modules=frozenset(name for name in _MODULES if _spec(name)),
        programs=_programs(),
        environment={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        ptxas=ptxas.version(),
        deep_ep_nvshmem=_deep_ep_nvshmem(),
        lane=lane,
        lane_error=lane_error,
    )


def cudnn_in_order(environment: Mapping[str, str], of_torch: Path) -> Iterator[Library]:
    """Every libcudnn that Transformer Engine may load, in its search order.

    Under CUDNN_HOME, CUDNN_PATH, CUDA_HOME, CUDA_PATH and /usr/local/cuda, then by the loader
    (LD_LIBRARY_PATH and the system's folders), last in torch's own packages. (TE 2.17,
    transformer_engine/common/__init__.py.)
    """
    folders = [environment.get(name) for name in ("CUDNN_HOME", "CUDNN_PATH", "CUDA_HOME",
                                                  "CUDA_PATH")]  # fmt: skip
    for folder in [*folders, "/usr/local/cuda"]:
        found = glob.glob(f"{folder}/**/libcudnn.so*", recursive=True) if folder else []
        found = [path for path in found if "stub" not in path]
        if found:
            yield _library(max(found, key=os.path.basename), of_torch)
    searched = filter(None, environment.get("LD_LIBRARY_PATH", "").split(":"))
    for folder in [*searched, *glob.glob("/usr/lib/*-linux-gnu"), "/usr/lib64", "/usr/local/lib"]:
        if os.path.exists(f"{folder}/libcudnn.so"):
            yield _library(f"{folder}/libcudnn.so", of_torch)
    yield from (_library(path, of_torch) for path in glob.glob(f"{of_torch}/lib/libcudnn.so*"))


def _library(path: str, of_torch: Path) -> Library:
    real = Path(path).resolve()
    if real.is_relative_to(of_torch.resolve()):
        return Library(path, _versions([_CUDNN]).get(_CUDNN), of_torch=True)
    numbered = re.search(r"\.so\.(\d+\.\d+\.\d+)$", real.name)
    return Library(path, numbered.group(1) if numbered else None)


def _versions(names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _programs() -> dict[str, str]:
    chosen = {"cc": os.environ.get("CC"), "c++": os.environ.get("CXX")}
    found = {}
    for name, candidates in _PROGRAMS.items():
        command = (chosen.get(name) or "").split()  # CC may include options
        wanted = command[:1] or candidates
        path = next(filter(None, map(shutil.which, wanted)), None)
        if path:
            found[name] = path
    cuda_home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if "nvcc" not in found and os.path.exists(f"{cuda_home}/bin/nvcc"):
        found["nvcc"] = f"{cuda_home}/bin/nvcc"
    return found


def _spec(module: str) -> Any:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):  # ValueError: hidden by a None in sys.modules
        return None


def _deep_ep_nvshmem() -> bool | None:
    """A build without NVSHMEM contains an assertion's message; None if not installed."""
    spec = _spec("deep_ep_cpp")
    if spec is None or spec.origin is None:
        return None
    return b"NVSHMEM is disable" not in Path(spec.origin).read_bytes()


def _lane() -> tuple[tuple[dict[str, Any], ...], str]:
    from megacpp_mcore.patching import manifest, state

    try:
        return tuple(state.status(manifest.load())), ""
    except MegacppError as error:
        return (), str(error)
