"""Why DeepEP cannot be used here: its package, its version, its build, the links between the GPUs.

`docs/deepep.md` has the build that works. Nothing is imported before a backend asks.
"""

import ctypes
import functools
import importlib
import inspect
from types import ModuleType
from typing import Any

from megacpp_mcore.surfaces.support import Broken, import_reason

_PACKAGE = "deep_ep"
_BUILD = "build tag v1.2.1 as docs/deepep.md says"
# What is called -> arguments that it must take, as v1.2.1 has them.
_METHODS = {
    "__init__": ("group", "num_nvl_bytes", "num_rdma_bytes", "explicitly_destroy"),
    "destroy": (),
    "get_dispatch_config": ("num_ranks",),
    "get_combine_config": ("num_ranks",),
    "get_dispatch_layout": ("topk_idx", "num_experts", "previous_event", "async_finish"),
    "dispatch": ("x", "handle", "topk_idx", "topk_weights", "config", "num_worst_tokens"),
    "combine": ("x", "handle", "topk_weights", "config", "bias"),
}  # fmt: skip
# Words of the loader's message -> what they mean. The first that is found is told.
_MEANINGS = {
    "__cudaRegisterLinkedBinary": "compiled with -rdc=true and not device-linked: without NVSHMEM "
    "-rdc=true must be removed",
    "nvshmem": "built with NVSHMEM, whose library is missing here or of another version",
    "undefined symbol": "built for another torch",
    "libcudart": "built for another CUDA",
}
_NVLINK, _CONNECTED = 2, 0  # of NVML: NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK


def package_reason() -> str | None:
    """Why the Buffer of DeepEP v1.2.1 is not here, or None. Broken where something else is."""
    if reason := _import_reason():
        return reason
    return _interface_reason(importlib.import_module(_PACKAGE))


def hybrid_reason() -> str | None:
    """Why the HybridEPBuffer of DeepEP's branch hybrid-ep is not here, or None."""
    if reason := _import_reason():
        return reason
    if hasattr(importlib.import_module(_PACKAGE), "HybridEPBuffer"):
        return None
    return "deep_ep has no HybridEPBuffer: it is in DeepEP's branch hybrid-ep only (docs/deepep.md)"


def _import_reason() -> str | None:
    reason = import_reason(_PACKAGE)
    if reason is None:
        return None
    meaning = next((told for word, told in _MEANINGS.items() if word in reason), None)
    told = f"{reason} ({meaning})" if meaning else reason
    return type(reason)(f"{told}; {_BUILD}")


def _interface_reason(package: ModuleType) -> str | None:
    """What the package lacks of v1.2.1's interface: V2 (DeepEP's main) is another one."""
    utils = _utils()
    places = {"Buffer": package, "EventHandle": utils, "EventOverlap": utils}
    missing = [name for name, place in places.items() if not hasattr(place, name)]
    if not missing:
        missing = list(_missing_arguments(package.Buffer))
    if not missing:
        return None
    version = getattr(package, "__version__", "of another version")
    return Broken(f"deep_ep {version} lacks {', '.join(missing)}: not v1.2.1; {_BUILD}")


def _utils() -> Any:
    return None if import_reason(f"{_PACKAGE}.utils") else importlib.import_module("deep_ep.utils")


def _missing_arguments(buffer: type):
    for name, arguments in _METHODS.items():
        method = getattr(buffer, name, None)
        if method is None:
            yield f"Buffer.{name}"
            continue
        known = inspect.signature(method).parameters
        yield from (f"Buffer.{name}({a}=)" for a in arguments if a not in known)


@functools.cache
def device_reason(ranks: int) -> str | None:
    """Why the first `ranks` GPUs of this host cannot hold a Buffer, or None.

    With one GPU visible to each process the others cannot be asked; DeepEP then finds out.
    """
    import torch

    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"compute capability {major}.{minor}: its kernels are built for 9.0"
    visible = torch.cuda.device_count()
    if visible == 1:
        return None
    if visible < ranks:
        return f"{visible} GPUs are visible, the exchange is between {ranks} of one host"
    apart = [
        f"{i} and {j}"
        for i in range(ranks)
        for j in range(i)
        if not torch.cuda.can_device_access_peer(i, j) or _without_nvlink(i, j)
    ]
    return f"no NVLink between GPUs {', '.join(apart)}" if apart else None


def _without_nvlink(one: int, other: int) -> bool:
    """Whether NVML says so of two of torch's devices; not where NVML cannot be asked."""
    import torch

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    nvml.nvmlInit_v2()
    handles = []
    for device in (one, other):
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
            return False
        handles.append(handle)
    status = ctypes.c_int(-1)
    failed = nvml.nvmlDeviceGetP2PStatus(*handles, _NVLINK, ctypes.byref(status))
    return not failed and status.value != _CONNECTED
