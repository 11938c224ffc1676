"""The pinned software stack, and the facts about a machine that `doctor` checks against it.

    stack_facts = facts.gather()              what this machine has
    checks = doctor.examine(stack_facts)      one Check per pin and known trap

Facts are plain data, so the stack of another machine can be examined, too.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

OK, WARN, FAIL, NOT_APPLICABLE = "ok", "warn", "fail", "not applicable"
Status = Literal["ok", "warn", "fail", "not applicable"]

PYTHON = (3, 12)


@dataclass(frozen=True)
class Pin:
    """A package of the pinned stack.

    cuda: part of the `[cuda]` extra, which machines without a GPU do not need. missing, other: the
    status if the package is needed, but absent or of another version. why: what it is for. get: the
    command that installs it.
    """

    name: str
    version: str
    cuda: bool = False
    missing: Status = FAIL
    other: Status = WARN
    why: str = ""
    get: str = ""


CUDA_GET = "megacpp cuda install"
_optional_cuda = partial(Pin, cuda=True, missing=WARN, get=CUDA_GET)

PINS = (
    Pin("torch", "2.11.0", other=FAIL, why="kernels and seams are written for this version"),
    Pin("triton", "3.6.0", missing=WARN, why="the version that torch 2.11 is built for"),
    Pin("megatron-core", "0.19.2", other=FAIL, why="specs and patches are for this version only"),
    Pin("numpy", "2.2.6", why="the version that the tests run with"),
    Pin("psutil", "7.2.2", other=OK, why="Megatron imports it in every save of a checkpoint"),
    Pin("transformer-engine", "2.17.1", cuda=True, get=CUDA_GET,
        why="GPU recipes use its router and permute fusion, linears, norms and experts"),
    _optional_cuda("mamba-ssm", "2.3.2.post1", why="upstream's Mamba-3 kernels"),
    _optional_cuda("causal-conv1d", "1.7.0", why="Megatron's own Mamba-2 mixer"),
    _optional_cuda("flash-attn-4", "4.0.0b36", why="the fastest attention on an H200"),
    _optional_cuda("quack-kernels", "0.6.4", why="FlashAttention-4's kernels are written in it"),
    _optional_cuda("nvidia-cutlass-dsl", "4.6.2", why="FlashAttention-4's compiler"),
    _optional_cuda("nvidia-cuda-nvcc", "13.4.92", why="its ptxas assembles Triton's kernels right"),
    _optional_cuda("liger-kernel", "0.8.5", why="benches compare our loss and experts with it"),
)  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """A module that doctor imports. package: its distribution. get: what reinstalls it.

    optional: only where that is installed. cuda: only where there is NVIDIA's driver.
    """

    module: str
    package: str
    get: str
    optional: bool = False
    cuda: bool = False


def _reinstall(package: str) -> str:
    return f"pip install --force-reinstall --no-deps '{package}'"


# In the order of their import; the first ones are imported by those behind them.
PROBES = (
    Probe("psutil", "psutil", _reinstall("psutil>=6")),
    Probe("numpy", "numpy", _reinstall("numpy==2.2.6")),
    Probe("pyarrow.parquet", "pyarrow", _reinstall("pyarrow>=18")),
    Probe("jsonschema", "jsonschema", "pip install --force-reinstall 'jsonschema>=4.23'"),
    Probe("tomlkit", "tomlkit", _reinstall("tomlkit>=0.13")),
    Probe("tqdm", "tqdm", _reinstall("tqdm>=4.67")),
    Probe("torch", "torch", _reinstall("torch==2.11.0")),
    Probe("triton", "triton", _reinstall("triton==3.6.0"), optional=True),
    Probe("megatron.core", "megatron-core", _reinstall("megatron-core==0.19.2")),
    Probe(
        "megatron.core.datasets.helpers_cpp", "megatron-core", _reinstall("megatron-core==0.19.2")
    ),
    Probe("transformer_engine.pytorch", "transformer-engine", CUDA_GET, optional=True, cuda=True),
)
# Optional, in any version; receipts record which one was used.
NOT_PINNED = ("deep-ep", "flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl")


@dataclass(frozen=True)
class Library:
    """A shared library on disk. version: None if unknown. of_torch: installed with torch."""

    path: str
    version: str | None
    of_torch: bool = False


@dataclass(frozen=True)
class Gpu:
    """What torch reports about the GPUs. error: why it cannot use them, or "".

    cudnn: as torch.backends.cudnn.version() (91900 is 9.19.0). nccl: of the library in use.
    """

    devices: tuple[str, ...] = ()
    cudnn: int | None = None
    nccl: str | None = None
    error: str = ""


@dataclass(frozen=True)
class Facts:
    """What a machine has; the only input of every check.

    versions: distribution -> version of those installed. imports: module -> "" or why a fresh
    process cannot import it. gpu: None without NVIDIA's driver. cudnn:
    the libcudnn files in Transformer Engine's search order. cudnn_of_torch: the folder of torch's
    own cuDNN. modules: the importable ones among those that checks ask about. programs: name ->
    path of those found. ptxas: release of the one that assembles Triton's kernels.
    deep_ep_nvshmem: whether DeepEP was built with NVSHMEM; None if absent.
    lane: status rows of the patch lane; lane_error: why they could not be read.
    """

    python: tuple[int, int, int]
    versions: dict[str, str]
    imports: dict[str, str] = field(default_factory=dict)
    gpu: Gpu | None = None
    cudnn: tuple[Library, ...] = ()
    cudnn_of_torch: str = ""
    modules: frozenset[str] = frozenset()
    programs: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    ptxas: tuple[int, int] | None = None
    deep_ep_nvshmem: bool | None = None
    lane: tuple[dict[str, Any], ...] = ()
    lane_error: str = ""

    def version(self, name: str) -> str | None:
        return self.versions.get(name)


@dataclass(frozen=True)
class Check:
    """The result of one check. remedy: what to do about it, or ""."""

    name: str
    status: Status
    found: str
    remedy: str = ""


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.17.1.post2+cu130" -> (2, 17, 1)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
