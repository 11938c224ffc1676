"""The pinned stack, and what is to be known of a machine to hold it against the pins.

    facts = stack_facts.gather()      what this machine has
    checks = doctor.examine(facts)    what of it is sound, one Check each

Facts are plain data, so that a stack which is not on this machine can be examined too.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

OK, WARN, FAIL, NOT_APPLICABLE = "ok", "warn", "fail", "not applicable"
Status = Literal["ok", "warn", "fail", "not applicable"]

PYTHON = (3, 12)


@dataclass(frozen=True)
class Pin:
    """A package of the pinned stack.

    cuda: part of the `[cuda]` extra, which a machine without a GPU does not have. missing, other:
    what it means on a machine where it is wanted that it is absent, or of another version. get: how
    to install it.
    """

    name: str
    version: str
    cuda: bool = False
    missing: Status = FAIL
    other: Status = WARN
    why: str = ""
    get: str = ""


_BUILD = "pip install --no-build-isolation"  # against the torch that is installed; needs nvcc

PINS = (
    Pin("torch", "2.11.0", other=FAIL, why="kernels and seams are written for this version"),
    Pin("triton", "3.6.0", missing=WARN, why="the version that torch 2.11 is built for"),
    Pin("megatron-core", "0.19.2", other=FAIL, why="specs and patches are for this version only"),
    Pin("numpy", "2.2.6", why="the version that the tests run with"),
    Pin(
        "transformer-engine",
        "2.17.1",
        cuda=True,
        why="GPU recipes ask for its router and permute fusion; it lends linears, norms, experts",
        get=f"{_BUILD} 'transformer-engine[pytorch]==2.17.1'",
    ),
    Pin(
        "mamba-ssm",
        "2.3.2.post1",
        cuda=True,
        missing=WARN,
        why="upstream's Mamba-3 kernels",
        get=f"MAMBA_FORCE_BUILD=TRUE {_BUILD} mamba-ssm==2.3.2.post1 (without the variable its "
        "setup tries to download a wheel, and dies offline)",
    ),
    Pin(
        "causal-conv1d",
        "1.7.0",
        cuda=True,
        missing=WARN,
        why="Megatron's own Mamba-2 mixer",
        get=f"{_BUILD} causal-conv1d==1.7.0",
    ),
    Pin("liger-kernel", "0.8.5", cuda=True, missing=WARN, why="fused loss and norm kernels"),
)
# Used where they are installed, in whatever version: a receipt names it.
NOT_PINNED = ("cut-cross-entropy", "deep-ep", "flash-attn", "flash-attn-3", "flash-attn-4")


@dataclass(frozen=True)
class Library:
    """A shared library on disk. version: None when nothing tells it. of_torch: it came with it."""

    path: str
    version: str | None
    of_torch: bool = False


@dataclass(frozen=True)
class Gpu:
    """What torch says of the GPUs. error: why it cannot use them, else "".

    cudnn: as torch.backends.cudnn.version() (91900 is 9.19.0). nccl: of the library in use.
    """

    devices: tuple[str, ...] = ()
    cudnn: int | None = None
    nccl: str | None = None
    error: str = ""


@dataclass(frozen=True)
class Facts:
    """What a machine has. Every check reads only this.

    versions: distribution -> version, absent ones not in it. gpu: None without NVIDIA's driver.
    cudnn: libcudnn in the order in which Transformer Engine looks for it. cudnn_of_torch: where the
    one that torch brings belongs. modules: those found, of the ones the checks ask about.
    programs: name -> path, absent ones not in it. deep_ep_nvshmem: whether it was built with it.
    lane: `patching` status rows; lane_error: why there are none.
    """

    python: tuple[int, int, int]
    versions: dict[str, str]
    gpu: Gpu | None = None
    cudnn: tuple[Library, ...] = ()
    cudnn_of_torch: str = ""
    modules: frozenset[str] = frozenset()
    programs: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    deep_ep_nvshmem: bool | None = None
    lane: tuple[dict[str, Any], ...] = ()
    lane_error: str = ""

    def version(self, name: str) -> str | None:
        return self.versions.get(name)


@dataclass(frozen=True)
class Check:
    """One check: what was found, and what to do about it ("" when nothing is to be done)."""

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
