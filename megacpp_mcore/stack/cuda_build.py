"""Build the packages of the extra `[cuda]` that have no wheel.

Each is compiled once for a Python, a torch and the GPUs' architectures, and kept in the user's
cache folder; a build that was interrupted continues after the last file that was compiled.
"""

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_mcore.files import cache_folder
from megacpp_mcore.host import memory
from megacpp_mcore.host.nvcc import find_nvcc
from megacpp_mcore.stack.cuda_packages import (
    PACKAGES,
    CudaBuildError,
    CudaPackageError,
    in_file_names,
    pip,
    pip_command,
)
from megacpp_mcore.terminal import has_room, left

_TOOLS = {"ninja": "1.13.2", "wheel": "0.48.0", "pybind11": "3.1.0"}

_JOB_BYTES = 4 << 30  # of a compiler on one file, at its peak
_DONE = re.compile(rb"\s*\[(\d+)/(\d+)\] ")  # ninja's
_GENCODE = re.compile(
    r'cc_flag\.append\("-gencode"\)\n\s*cc_flag\.append\("arch=compute_\d+,code=sm_\d+"\)'
)
Say = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """A package to compile. variables: for its setup.py, which otherwise downloads a wheel.

    lists_architectures: it has code for GPUs, and its setup.py names their architectures.
    """

    name: str
    variables: Mapping[str, str]
    lists_architectures: bool = False

    @property
    def version(self) -> str:
        return PACKAGES[self.name]

    @property
    def stem(self) -> str:
        """What its files' names begin with."""
        return f"{in_file_names(self.name)}-{self.version}"


SOURCES = (
    Source(
        "transformer-engine-torch",
        {"NVTE_FRAMEWORK": "pytorch", "NVTE_PROJECT_BUILDING": "1",
         "NVTE_PYTORCH_FORCE_BUILD": "TRUE"},
    ),
    Source("causal-conv1d", {"CAUSAL_CONV1D_FORCE_BUILD": "TRUE"}, lists_architectures=True),
    # without its extension, which is Mamba-1's scan: nine files of several minutes each
    Source("mamba-ssm", {"MAMBA_FORCE_BUILD": "TRUE", "MAMBA_SKIP_CUDA_BUILD": "TRUE"}),
)  # fmt: skip


def architectures(asked: str | None) -> tuple[str, ...]:
    """("90",): compute capabilities without the dot, of `asked` ("90", "80 90") or of the GPUs
    here. Raises CudaPackageError for another form, or where nothing is asked and no GPU is seen."""
    if asked:
        words = tuple(dict.fromkeys(re.split(r"[\s,;]+", asked.strip())))
        if wrong := [word for word in words if not re.fullmatch(r"\d{2,3}a?", word)]:
            raise CudaPackageError(
                f"CUDA_ARCHS {wrong[0]!r}: name compute capabilities without the dot, as in 90 "
                "(H100, H200) or '80 90'"
            )
        return words
    import torch

    found = {torch.cuda.get_device_capability(at) for at in range(torch.cuda.device_count())}
    if not found:
        raise CudaPackageError(
            "there is no GPU here to build for: name architectures, as in CUDA_ARCHS=90 (H100, "
            "H200)"
        )
    return tuple(f"{major}{minor}" for major, minor in sorted(found))


def jobs(asked: str | None = None) -> int:
    """How many files are compiled at a time: `asked` (MAX_JOBS), else a processor each as far as
    free memory goes, 4 GiB a compiler."""
    if asked is None:
        return max(1, min(len(os.sched_getaffinity(0)), memory.available() // _JOB_BYTES))
    if not asked.isdecimal() or int(asked) < 1:
        raise CudaPackageError(f"MAX_JOBS {asked!r}: a number from 1")
    return int(asked)


def build(
    archs: Sequence[str], jobs: int, say: Say, sources: Sequence[Source] = SOURCES
) -> list[Path]:
    """The wheel of each source, compiled unless the cache has it. say: takes lines for a person.

    Raises CudaPackageError with what is missing here, or with the end of the compiler's output.
    """
    wheels = []
    for source in sources:
        place = _place(source, archs)
        place.mkdir(parents=True, exist_ok=True)
        with _only_one(place):
            wheel = next(iter(place.glob(f"{source.stem}-*.whl")), None)
            if wheel is None:
                wheel = _compile(source, archs, jobs, place, say)
            else:
                say(f"{source.name} {source.version}: built before, {wheel}")
        wheels.append(wheel)
    return wheels


def _place(source: Source, archs: Sequence[str]) -> Path:
    """The folder of its wheels: of a Python and a torch, and of GPUs if it has code for them."""
    import torch

    key = f"cp{sys.version_info[0]}{sys.version_info[1]}-torch{torch.__version__}"
    of = "sm" + "-".join(sorted(archs)) if source.lists_architectures else "any-gpu"
    return cache_folder("wheels", key, of)


def _compile(source: Source, archs: Sequence[str], jobs: int, place: Path, say: Say) -> Path:
    environment = _environment(source, archs, jobs)
    tree = _unpacked(source, place, environment)
    out, log = place / f"{source.stem}.new", place / f"{source.stem}.log"
    shutil.rmtree(out, ignore_errors=True)
    of = f" for sm_{', sm_'.join(archs)}" if source.lists_architectures else ""
    say(f"{source.name} {source.version}: building{of}, {jobs} files at a time; output in {log}")
    command = ["wheel", "-v", "--no-deps", "--no-build-isolation", "--no-index", "-w", out, tree]
    began = time.monotonic()
    with open(log, "wb") as file, _running(pip_command(*command), environment) as child:
        for line in child.stdout:
            file.write(line)
            if done := _DONE.match(line):
                _tell(source.name, int(done[1]), int(done[2]), time.monotonic() - began, say)
        status = child.wait()
    built = list(out.glob(f"{source.stem}-*.whl"))
    if status or len(built) != 1:
        raise CudaBuildError(
            f"{source.name} {source.version} was not built (status {status}): {_why(log)}\nThe "
            f"whole output is in {log}; the same command goes on from here"
        )
    wheel = place / built[0].name
    os.replace(built[0], wheel)
    shutil.rmtree(tree, ignore_errors=True)
    shutil.rmtree(out)
    say(f"{source.name} {source.version}: built in {left(time.monotonic() - began)}, {wheel}")
    return wheel


def _why(log: Path) -> str:
    """The compiler's message, without its command line, else the end of the output."""
    text = log.read_text(errors="replace")
    failed = re.search(r"FAILED: .*\n.*\n((?:.*\n)*?)\s*ninja: build stopped", text)
    return "\n" + "\n".join(failed[1].splitlines()[:25] if failed else text.splitlines()[-25:])


def _tell(name: str, done: int, total: int, seconds: float, say: Say) -> None:
    rest = f", {left(seconds / done * (total - done))} left" if done < total else ""
    say(f"{name}: {done} of {total} files{rest}")


def progress(line: str) -> None:
    """Print a line on stderr; on a terminal, over the one before where both count files."""
    counting = re.fullmatch(r"[\w-]+: \d+ of (\d+) files.*", line)
    if counting and has_room(sys.stderr):
        end = "\n" if "left" not in line else ""
        print(f"\r{line}\x1b[K", end=end, file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)


def _unpacked(source: Source, place: Path, environment: Mapping[str, str]) -> Path:
    """Its source, unpacked over the files of an interrupted build, whose objects are reused."""
    archive = place / f"{source.stem}.tar.gz"
    if not archive.exists():
        fetched = place / f"{source.stem}.fetched"
        shutil.rmtree(fetched, ignore_errors=True)
        pip(
            "download", "--dest", str(fetched), "--no-deps", "--no-build-isolation",
            f"--no-binary={source.name}", f"{source.name}=={source.version}",
            environment=environment,
        )  # fmt: skip
        os.replace(fetched / archive.name, archive)
        shutil.rmtree(fetched)
    with tarfile.open(archive) as file:
        file.extractall(place, filter="data")
    tree = place / source.stem
    if source.lists_architectures:
        setup = tree / "setup.py"
        text, places = _GENCODE.subn("pass", setup.read_text())
        if not places:
            raise CudaPackageError(
                f"{setup} no longer names architectures as version {source.version} does: "
                f"delete {archive} if it is damaged"
            )
        setup.write_text(text)  # torch then takes TORCH_CUDA_ARCH_LIST
    return tree


def _environment(source: Source, archs: Sequence[str], jobs: int) -> dict[str, str]:
    """The environment of a build: CUDA's compiler, the headers of torch's own CUDA libraries, the
    limits."""
    import torch

    nvcc, site = find_nvcc(), Path(torch.__file__).parents[1]
    if nvcc is None:
        raise CudaPackageError(
            f"nvcc is not found (CUDA_HOME, PATH, /usr/local/cuda): install the CUDA "
            f"{torch.version.cuda} toolkit, or take wheels that another machine has built: make "
            "wheels-cuda there, WHEELS=FOLDER make env-cuda here"
        )
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", said)
    if release is None or release[1] != str(torch.version.cuda).partition(".")[0]:
        raise CudaPackageError(
            f"{nvcc} is of CUDA {release and release[0].split()[1]}, torch {torch.__version__} of "
            f"{torch.version.cuda}: name that toolkit in CUDA_HOME"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise CudaPackageError(
            f"Python.h is not in {sysconfig.get_path('include')}: install Python's headers "
            "(Debian: python3.12-dev)"
        )
    if shutil.which(os.environ.get("CXX", "c++").split()[0]) is None:
        raise CudaPackageError("there is no C++ compiler: install g++, or name one in CXX")
    asked = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True
    )
    found = re.search(r"^#\$ TOP=(.+)$", asked.stderr, re.MULTILINE)  # nvcc may be a link or script
    home = Path(found[1]).resolve() if found else Path(nvcc).resolve().parents[1]
    tools = _build_tools()
    headers = [site / "nvidia/cudnn/include", site / "nvidia/nccl/include",
               site / "nvidia/cu13/include", home / "include/cccl"]  # fmt: skip
    dotted = [f"{arch.rstrip('a')[:-1]}.{arch.removeprefix(arch.rstrip('a')[:-1])}"
              for arch in archs]  # fmt: skip
    before = {name: os.environ.get(name) for name in ("CPATH", "PYTHONPATH", "PATH")}
    return os.environ | dict(source.variables) | {
        "CUDA_HOME": str(home), "MAX_JOBS": str(jobs), "TORCH_CUDA_ARCH_LIST": ";".join(dotted),
        "CPATH": _joined(*headers, before["CPATH"]),
        "PYTHONPATH": _joined(tools, before["PYTHONPATH"]),
        "PATH": _joined(tools / "bin", home / "bin", before["PATH"]),
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


def _build_tools() -> Path:
    """A folder with what setup.py files import, apart from the environment, which stays as it is
    pinned."""
    folder = cache_folder("wheels", "tools-" + "-".join(_TOOLS.values()))
    if not (folder / "done").exists():
        pip("install", "--no-deps", "--target", str(folder), "--upgrade",
             *(f"{name}=={version}" for name, version in _TOOLS.items()))  # fmt: skip
        (folder / "done").touch()
    return folder


def _joined(*parts: object) -> str:
    return os.pathsep.join(str(part) for part in parts if part)


@contextlib.contextmanager
def _running(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen]:
    """A process whose compilers end with this block, also when it is left by Ctrl-C or SIGTERM,
    and with this process, also when that is killed."""
    supervised = [sys.executable, "-m", "megacpp_mcore.host.supervised", str(os.getpid())]
    child = subprocess.Popen(
        [*supervised, *command], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        yield child
    finally:
        child.terminate()
        child.stdout.close()
        child.wait()


@contextlib.contextmanager
def _only_one(place: Path) -> Iterator[None]:
    with open(place / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CudaPackageError(f"another process builds in {place}: wait for it") from None
        yield
