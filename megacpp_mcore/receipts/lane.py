"""What a run or a bench ran on: the device, the driver, the versions that influence its figures."""

import functools
import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from megacpp_mcore import __version__
from megacpp_mcore.stack import NOT_PINNED, OK, PINS

# Every package whose version can change a loss or a step time; absent ones are recorded as null.
PACKAGES = (*(pin.name for pin in PINS if pin.other != OK), *NOT_PINNED)
_PACKAGE = Path(__file__).resolve().parents[1]
_CHECKOUT = _PACKAGE.parent
_ELSEWHERE = ("specs", "recipes", "patches")  # in a checkout
_DRIVER = Path("/proc/driver/nvidia/version")


def lane(device: Literal["cpu"] | None = None) -> dict[str, Any]:
    """The `lane` of a receipt, as observed here. What is not there is null; nothing raises.

    device: "cpu" for work that runs on the CPU although there may be a GPU; None for this process's
    GPU where torch can use one, else the CPU.
    """
    found = _from_torch(device == "cpu")
    return {
        "device": found["device"],
        "driver": _driver() if found["device"]["type"] == "cuda" else None,
        "cuda": found["cuda"],
        "cudnn": found["cudnn"],
        "python": platform.python_version(),
        "packages": packages(),
        "os": platform.platform(),
        "cpu": {"name": _cpu_name(), "count": _cpu_count(), "threads": found["threads"]},
    }


def packages() -> dict[str, str | None]:
    """The installed version of each of PACKAGES."""
    return {name: _version(name) for name in PACKAGES}


def patches() -> dict[str, dict[str, Any]]:
    """Every package that the patch lane knows and that is installed here: its version, and the
    applied patches, id -> sha256 of the patch file of this plugin.

    Raises PatchError for a package whose patches were switched half way.
    """
    from megacpp_mcore.patching import PatchError, manifest, state

    found, lane = {}, manifest.load()
    for package in lane.packages:
        here = state.read(lane, package)
        if here.interrupted:
            raise PatchError(f"{package}: {here.interrupted}")
        if here.installed is not None:
            applied = here.applied
            found[package] = {
                "version": here.installed.version,
                "applied": {
                    patch.id: hashlib.sha256(patch.text).hexdigest()
                    for patch in lane.patches
                    if patch.package == package and patch.id in applied
                },
            }
    return found


def code() -> dict[str, Any]:
    """The version of this package, the sha256 of its modules and kernels, git's id of its folder,
    and the commit when it runs from a checkout of it.

    commit and dirty are null for an installed wheel, and where git is not there to ask. Receipts
    that are new do not make it dirty: else one of a series alone would name its commit.
    """
    commit = dirty = None
    if (_CHECKOUT / ".git").exists():
        commit = _git(_CHECKOUT, "rev-parse", "HEAD")
        dirty = _has_changes(_CHECKOUT)
    own = {"version": __version__, "sha256": code_sha256(), "tree": _tree(_PACKAGE)}
    return own | {"commit": commit, "dirty": dirty}


def is_traceable(code: Mapping[str, Any], checkout: Path = _CHECKOUT) -> bool:
    """Whether the code that ran can be found again: it was a commit's, or its tree is one of
    `checkout`'s history. A wheel has no history, so that its tree is taken at its word."""
    if "sha256" not in code:
        return False
    if code["commit"] and code["dirty"] is False:
        return True
    if "tree" not in code:
        return False
    return not code["commit"] or _has_tree(checkout, code["tree"])


def _has_tree(checkout: Path, tree: str) -> bool:
    """Whether a commit that HEAD is made of has this package as it is in `tree`. Not whether git
    knows the tree: it also knows what was added and never committed."""
    folder = _PACKAGE.name
    commits = _git(checkout, "rev-list", "HEAD", "--", folder)
    named = "\n".join(f"{commit}:{folder}" for commit in (commits or "").split())
    found = _git(checkout, "cat-file", "--batch-check=%(objectname)", given=named)
    return tree in (found or "").split()


@functools.cache
def _tree(folder: Path) -> str:
    """The id that git gives to the folder, from its files: a wheel has no git to ask.

    The recipes, specs and patches, which a wheel has in the package's folder, are not counted.
    """
    entries = []
    for path in folder.iterdir():
        if path.name == "__pycache__" or path.suffix in (".pyc", ".so") or path.name[0] == ".":
            continue
        if path.is_dir():
            if folder != _PACKAGE or path.name not in _ELSEWHERE:
                entries.append((f"{path.name}/", b"40000", bytes.fromhex(_tree(path))))
        else:
            content = path.read_bytes()
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).digest()
            entries.append((path.name, b"100644", blob))
    body = b"".join(
        b"%s %s\0%s" % (mode, name.rstrip("/").encode(), digest)
        for name, mode, digest in sorted(entries)
    )
    return hashlib.sha1(b"tree %d\0" % len(body) + body).hexdigest()


@functools.cache
def code_sha256() -> str:
    """Of this package's modules and kernels. One for a commit's checkout and its wheel, where the
    recipes, specs and patches lie in the package's folder (receipts have the recipe, and name the
    spec and the patches)."""
    folder, digest = _PACKAGE, hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        place = path.relative_to(folder)
        elsewhere = place.parts[0] in _ELSEWHERE
        if path.suffix in (".py", ".cu", ".cuh", ".json") and not elsewhere:
            content = path.read_bytes()
            digest.update(f"{place.as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _from_torch(cpu_only: bool) -> dict[str, Any]:
    cpu = {"type": "cpu", "name": _cpu_name(), "count": 1, "memory_bytes": None, "capability": None}
    found = {"device": cpu, "cuda": None, "cudnn": None, "threads": None}
    try:
        import torch
    except (ImportError, OSError):  # OSError: a CUDA library the build wants is not on the machine
        return found
    found["threads"] = torch.get_num_threads()
    if cpu_only or not torch.cuda.is_available():
        return found
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return found | {
        "device": {
            "type": "cuda",
            "name": properties.name,
            "count": torch.cuda.device_count(),
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
        },
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _driver() -> str | None:
    try:
        text = _DRIVER.read_text()
    except OSError:
        return None
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found.group(1) if found else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _cpu_count() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _has_changes(checkout: Path) -> bool | None:
    """Whether files are not the commit's, but for receipts and what git ignores."""
    status = _git(checkout, "status", "--porcelain", "--", ".", ":!examples/receipts")
    return None if status is None else bool(status)


def _git(checkout: Path, *arguments: str, given: str | None = None) -> str | None:
    command = ["git", "-C", str(checkout), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True, input=given
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
