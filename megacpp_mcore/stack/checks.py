"""Checks for the known traps of the pinned stack. Each trap was seen on a real machine."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.host import ptxas
from megacpp_mcore.stack import (
    CUDA_GET,
    FAIL,
    NOT_APPLICABLE,
    OK,
    PROBES,
    WARN,
    Check,
    Facts,
    release,
)

_TE = "transformer-engine"
_NO_GPU = "no GPU here"
_NO_TE = "Transformer Engine is not installed"
_PATCH = "megacpp patch apply"
TE_DRIVER_PATCH = "te-import-without-driver"
MAMBA_PATCH = "selective-scan-import"
_DEEP_EP_GET = (
    "never from PyPI: build tag v1.2.1 of DeepEP with TORCH_CUDA_ARCH_LIST=9.0, as docs/deepep.md "
    "says"
)


def imports(facts: Facts) -> Iterator[Check]:
    """Whether the packages can be imported: one check for those that can, one for each other."""
    get = {probe.module: probe.get for probe in PROBES}
    for module, error in facts.imports.items():
        if error:
            yield Check(f"import {module}", FAIL, error, get[module])
    if good := [module for module, error in facts.imports.items() if not error]:
        yield Check("imports", OK, ", ".join(good))


def gpu(facts: Facts) -> Check:
    """The driver is there, but torch cannot use it: a CPU build, a driver too old, a bad cuDNN."""
    if facts.gpu is None:
        return Check("gpu", NOT_APPLICABLE, "no NVIDIA driver: the CPU lane")
    if facts.gpu.error:
        remedy = "install torch from PyPI (its 2.11.0 is the CUDA 13.0 build) and a driver for "
        remedy = _torchs_cudnn(facts) if "cuDNN" in facts.gpu.error else f"{remedy}CUDA 13"
        return Check(
            "gpu", FAIL, f"the driver is installed, but torch cannot use it: {facts.gpu.error}",
            remedy,
        )  # fmt: skip
    return Check("gpu", OK, ", ".join(facts.gpu.devices))


def te_without_driver(facts: Facts) -> Check:
    """Megatron catches only ImportError around TE, and without libcuda TE raises OSError."""
    name = "te-without-driver"
    if facts.version(_TE) is None:
        return Check(name, NOT_APPLICABLE, _NO_TE)
    if facts.gpu is not None:
        return Check(name, OK, "the driver is installed")
    if _applied(facts, "megatron-core", TE_DRIVER_PATCH):
        return Check(name, OK, f"no driver, and patch {TE_DRIVER_PATCH} is applied")
    return Check(
        name, FAIL, "Transformer Engine without a driver: `import megatron.core` raises OSError "
        "libcuda.so.1", f"pip uninstall {_TE} (the [cuda] extra is for GPU machines), or {_PATCH}",
    )  # fmt: skip


def _no_te_on_a_gpu(facts: Facts) -> str:
    """Why checks of Transformer Engine on a GPU do not apply; "": they do."""
    if facts.gpu is None:
        return _NO_GPU
    return "" if facts.version(_TE) else _NO_TE


def te_parts(facts: Facts) -> Check:
    """TE is three distributions; its import asserts that their versions are equal."""
    name, version = "te-parts", facts.version(_TE)
    if why := _no_te_on_a_gpu(facts):
        return Check(name, NOT_APPLICABLE, why)
    parts = {part: facts.version(part) for part in (f"{_TE}-cu13", f"{_TE}-torch")}
    found = ", ".join(f"{part} {have or 'absent'}" for part, have in parts.items())
    if all(have == version for have in parts.values()):
        return Check(name, OK, found)
    return Check(
        name, FAIL, f"{_TE} {version} with {found}; the three must have the same version",
        CUDA_GET,
    )  # fmt: skip


def te_cublas(facts: Facts) -> Check:
    """TE 2.14 to 2.16 link a symbol that torch 2.11's cuBLAS 13.1 does not have."""
    name, version, cublas = "te-cublas", facts.version(_TE), facts.version("nvidia-cublas")
    if why := _no_te_on_a_gpu(facts):
        return Check(name, NOT_APPLICABLE, why)
    found = f"{_TE} {version}, cuBLAS {cublas or 'of the system'}"
    if (2, 14) <= release(version) < (2, 17) and release(cublas or "0") < (13, 2):
        return Check(
            name, FAIL, f"{found}: undefined symbol cublasLtGroupedMatrixLayoutInit_internal",
            f"{_TE} 2.17 or newer loads the library lazily: {CUDA_GET}",
        )  # fmt: skip
    return Check(name, OK, found)


def te_attention_cudnn(facts: Facts) -> Check:
    """TE's fused attention fails in the backward pass with a cuDNN older than 9.22."""
    from megacpp_mcore.surfaces.core_attention import TE_ATTENTION_CUDNN
    from megacpp_mcore.surfaces.support import TE

    name = "te-attention-cudnn"
    if facts.version(_TE) is None:
        return Check(name, NOT_APPLICABLE, _NO_TE)
    if facts.gpu is None or facts.gpu.error:
        return Check(name, NOT_APPLICABLE, _NO_GPU)
    cudnn = facts.gpu.cudnn
    if cudnn is not None and cudnn >= TE_ATTENTION_CUDNN:
        return Check(name, OK, f"cuDNN {cudnn} at run time")
    found = f"cuDNN {cudnn} at run time; TE's fused attention needs {TE_ATTENTION_CUDNN}"
    if _forced(facts).get("core_attention") == TE:
        return Check(
            name, FAIL, f"{found}, and MEGACPP_BACKENDS forces it",
            "remove core_attention=te from MEGACPP_BACKENDS, or put a newer cuDNN first on the "
            "library path",
        )  # fmt: skip
    return Check(
        name, WARN, f"{found}; core_attention uses torch instead",
        "nothing, unless a recipe names core_attention = 'te', which is refused here",
    )  # fmt: skip


def cudnn_order(facts: Facts) -> Check:
    """TE searches the system first; loading an older cuDNN from there breaks torch's."""
    name = "cudnn-order"
    if why := _no_te_on_a_gpu(facts):
        return Check(name, NOT_APPLICABLE, why)
    if not facts.cudnn:
        return Check(
            name, FAIL, "libcudnn not found: Transformer Engine cannot be imported",
            "pip install nvidia-cudnn-cu13==9.19.0.56, the version that torch 2.11.0 requires",
        )  # fmt: skip
    first, torchs = facts.cudnn[0], facts.version("nvidia-cudnn-cu13")
    if first.of_torch:
        return Check(name, OK, f"{first.path}, torch's own")
    found = f"Transformer Engine loads {first.path} ({first.version or 'of unknown version'}), "
    found += f"torch ships {torchs or 'none'}"
    if first.version and torchs and release(first.version)[:3] == release(torchs)[:3]:
        return Check(name, OK, f"{found}, the same version")
    older = first.version and torchs and release(first.version) < release(torchs)
    return Check(name, FAIL if older else WARN, found, _torchs_cudnn(facts))


def _torchs_cudnn(facts: Facts) -> str:
    """A line for a shell that puts torch's cuDNN first. An empty entry of LD_LIBRARY_PATH would be
    the current folder."""
    own = facts.cudnn_of_torch
    library_path = f"{own}/lib${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
    return f"export CUDNN_PATH={own} LD_LIBRARY_PATH={library_path}"


def nccl(facts: Facts) -> Check:
    """Megatron's `ncclep` dispatcher needs a newer NCCL than torch ships."""
    name = "nccl-ncclep"
    if facts.gpu is None or facts.gpu.error:
        return Check(name, NOT_APPLICABLE, _NO_GPU)
    found = facts.gpu.nccl or facts.version("nvidia-nccl-cu13")
    if found and release(found) >= (2, 30, 4):
        return Check(name, OK, f"NCCL {found}")
    return Check(
        name, WARN, f"NCCL {found or 'absent'}; moe_flex_dispatcher_backend 'ncclep' needs 2.30.4",
        "use 'deepep' or the all-to-all dispatcher, or load NCCL >= 2.30.4 with LD_PRELOAD",
    )  # fmt: skip


def numpy_triton(facts: Facts) -> Check:
    """Triton 3.6's interpreter, which runs the kernels on a CPU, breaks with numpy 2.5."""
    name = "numpy-triton-interpreter"
    numpy, triton = facts.version("numpy"), facts.version("triton")
    if numpy is None or triton is None:
        return Check(
            name, NOT_APPLICABLE, f"numpy {numpy or 'absent'}, triton {triton or 'absent'}"
        )
    found = f"numpy {numpy} with triton {triton}"
    if release(numpy) < (2, 5):
        return Check(name, OK, found)
    interpreting = facts.environment.get("TRITON_INTERPRET", "0") not in ("", "0")
    return Check(
        name, FAIL if interpreting else WARN, f"{found}: the interpreter breaks",
        "pip install numpy==2.2.6",
    )  # fmt: skip


def triton_ptxas(facts: Facts) -> Check:
    """Triton 3.6's own ptxas assembles some products of Hopper's tensor cores wrong."""
    name = "triton-ptxas"
    if facts.version("triton") is None:
        return Check(name, NOT_APPLICABLE, "triton is not installed")
    if facts.gpu is None:
        return Check(name, NOT_APPLICABLE, _NO_GPU)
    remedy = f"{CUDA_GET}, or set {ptxas.VARIABLE} to a newer one"
    if facts.ptxas is None:
        return Check(name, FAIL, "Triton has no ptxas that runs", remedy)
    found = ".".join(map(str, facts.ptxas))
    if facts.ptxas < ptxas.RIGHT:
        return Check(name, FAIL, f"ptxas {found} assembles wrong products for Hopper", remedy)
    if facts.ptxas < ptxas.FIXED:
        fixed = ".".join(map(str, ptxas.FIXED))
        return Check(
            name,
            WARN,
            f"ptxas {found}; wrong code for Hopper is known of it",
            f"{remedy}; {fixed} has the corrections",
        )
    return Check(name, OK, f"ptxas {found}")


def mamba_extension(facts: Facts) -> Check:
    """`import mamba_ssm` imports its CUDA extension, which only Mamba-1 needs."""
    name = "mamba-ssm-extension"
    if facts.version("mamba-ssm") is None:
        return Check(name, NOT_APPLICABLE, "mamba-ssm is not installed")
    if "selective_scan_cuda" in facts.modules:
        return Check(name, OK, "selective_scan_cuda is installed")
    if _applied(facts, "mamba-ssm", MAMBA_PATCH):
        return Check(name, OK, f"no selective_scan_cuda, and patch {MAMBA_PATCH} is applied")
    return Check(
        name, WARN, "no selective_scan_cuda: `import mamba_ssm` raises ModuleNotFoundError, in "
        "Megatron-LM's own script too; megacpp imports its operators alone, which need it not",
        f"{_PATCH} --only {MAMBA_PATCH}, for programs that import all of mamba_ssm",
    )  # fmt: skip


def deep_ep(facts: Facts) -> Check:
    """Our adapter and Megatron 0.19.2's work with DeepEP v1.2.1 only, Megatron's with NVSHMEM."""
    name, version = "deep-ep", facts.version("deep-ep")
    if version is None:
        return Check(name, NOT_APPLICABLE, "not installed; only DeepEP's dispatchers need it")
    if release(version) >= (2,):
        return Check(
            name, FAIL, f"{version}, its V2: Megatron imports EventOverlap from deep_ep.utils, "
            "which has none, and its NCCL check raises AssertionError past Megatron's ImportError",
            f"pip uninstall deep-ep; {_DEEP_EP_GET}",
        )  # fmt: skip
    if release(version) != (1, 2, 1):
        return Check(
            name, FAIL, f"{version}: not tag v1.2.1 (PyPI's 1.0.0 is an early source without its "
            "headers)", f"pip uninstall deep-ep; {_DEEP_EP_GET}",
        )  # fmt: skip
    if facts.deep_ep_nvshmem is False:
        return Check(
            name, OK, f"{version}, built without NVSHMEM: for backends.moe_dispatch within a host; "
            "Megatron's own blocks ask it for RDMA buffer sizes and stop on an assertion",
        )  # fmt: skip
    return Check(name, OK, version)


def compiler(facts: Facts) -> Check:
    """Triton builds each kernel's launcher with a C compiler; Inductor on a CPU needs C++."""
    have = [facts.programs[name] for name in ("cc", "c++") if name in facts.programs]
    if len(have) == 2:
        return Check("compiler", OK, ", ".join(have))
    found = ", ".join(have) or "neither a C nor a C++ compiler"
    remedy = "install gcc and g++ (Debian: apt-get install g++), or set CC and CXX"
    if "cc" not in facts.programs and facts.gpu is not None:
        return Check("compiler", FAIL, f"{found}: Triton cannot launch a kernel", remedy)
    return Check("compiler", WARN, f"{found}: torch.compile cannot build C++", remedy)


def nvcc(facts: Facts) -> Check:
    """Without nvcc the kernels of R and of the experts are not compiled, nor missing packages."""
    if facts.gpu is None:
        return Check("nvcc", NOT_APPLICABLE, _NO_GPU)
    if "nvcc" in facts.programs:
        return Check("nvcc", OK, facts.programs["nvcc"])
    builds = (f"{_TE}-torch", "mamba-ssm", "causal-conv1d")
    missing = [name for name in builds if facts.version(name) is None]
    kernels = "the kernels of m2rnn and moe_experts cannot be compiled"
    return Check(
        "nvcc", WARN, f"absent; {', nor '.join([kernels, *missing])}",
        "install the CUDA 13.0 toolkit, or name slower backends in the recipe's [backends] "
        "(m2rnn=reference, moe_experts=grouped_mm) and build packages elsewhere: megacpp cuda "
        "wheels",
    )  # fmt: skip


def forced_backends(facts: Facts) -> Check:
    """An invalid MEGACPP_BACKENDS makes the construction of the first layer fail."""
    text = facts.environment.get("MEGACPP_BACKENDS", "")
    if not text:
        return Check("forced-backends", NOT_APPLICABLE, "MEGACPP_BACKENDS is not set")
    try:
        _parse(text)
    except MegacppError as error:
        return Check("forced-backends", FAIL, str(error), "correct MEGACPP_BACKENDS, or unset it")
    return Check("forced-backends", OK, text)


def patch_lane(facts: Facts) -> Iterator[Check]:
    """Which patches of the patch lane are applied, one check per package."""
    if facts.lane_error:
        yield Check("patch-lane", FAIL, facts.lane_error, "megacpp patch status")
    for row in facts.lane:
        yield _package_lane(row)


def patches_of_recipe(facts: Facts, needs: Mapping[str, str] | None) -> Check:
    """Whether the patches that the recipe needs for correct results are applied."""
    name = "recipe-patches"
    if needs is None:
        return Check(name, NOT_APPLICABLE, "no recipe: name one with --recipe, or MEGACPP_RECIPE")
    applied = {
        entry["id"] for row in facts.lane for entry in row["patches"] if entry["state"] == "applied"
    }
    absent = [patch for patch in needs if patch not in applied]
    if not absent:
        return Check(name, OK, ", ".join(needs) or "the recipe needs none")
    found = "; ".join(f"{patch} is not applied: {needs[patch]}" for patch in absent)
    return Check(name, FAIL, found, " ".join([_PATCH, *(f"--only {patch}" for patch in absent)]))


TRAPS: tuple[Callable[[Facts], Check], ...] = (
    gpu, te_without_driver, te_parts, te_cublas, te_attention_cudnn, cudnn_order, nccl,
    numpy_triton, triton_ptxas, mamba_extension, deep_ep, compiler, nvcc, forced_backends,
)  # fmt: skip


def _package_lane(row: dict[str, Any]) -> Check:
    name = f"patch-lane {row['package']}"
    if row["interrupted"]:
        return Check(name, FAIL, row["interrupted"], _PATCH)
    if row["problem"]:
        return Check(name, WARN, row["problem"], "megacpp patch status")
    if row["installed"] is None:
        return Check(name, NOT_APPLICABLE, "not installed")
    states: dict[str, list[str]] = {}
    for patch in row["patches"]:
        states.setdefault(patch["state"], []).append(patch["id"])
    found = "; ".join(f"{state}: {', '.join(ids)}" for state, ids in states.items())
    if row["leftovers"]:
        found += f"; of another release of the lane: {', '.join(row['leftovers'])}"
    if row["complete"]:
        return Check(name, OK, found or "the lane has no patch for it")
    if set(states) <= {"applied", "not applied"} and not row["leftovers"]:
        return Check(name, WARN, found, _PATCH)
    return Check(
        name, FAIL, found, f"megacpp patch status, then reinstall {row['package']} and {_PATCH}"
    )


def _applied(facts: Facts, package: str, patch: str) -> bool:
    return any(
        row["package"] == package and entry["id"] == patch and entry["state"] == "applied"
        for row in facts.lane
        for entry in row["patches"]
    )


def _parse(text: str) -> dict[str, str]:
    from megacpp_mcore import dispatch

    return dispatch.forced_backends(text)


def _forced(facts: Facts) -> dict[str, str]:
    try:
        return _parse(facts.environment.get("MEGACPP_BACKENDS", ""))
    except MegacppError:
        return {}  # forced_backends reports it
