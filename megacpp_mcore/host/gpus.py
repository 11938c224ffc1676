"""The GPUs that this process may use, asked of CUDA's driver: torch takes seconds to import."""

import ctypes
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.errors import MegacppError

_SUCCESS, _NO_DEVICE = 0, 100
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_NAME_BYTES = 256


class DriverError(MegacppError):
    """CUDA's driver is there, but does not work."""


@dataclass(frozen=True)
class Gpu:
    """capability: compute capability, (9, 0) for Hopper."""

    name: str
    capability: tuple[int, int]


def visible() -> list[Gpu]:
    """The GPUs in CUDA's order, of those that CUDA_VISIBLE_DEVICES leaves; none without a driver.

    Initialises CUDA in this process, without a context on any GPU: it must not fork afterwards
    without exec. Raises DriverError with the driver's own words.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    status = cuda.cuInit(0)
    if status == _NO_DEVICE:
        return []
    _check(cuda, "cuInit", status)
    count = ctypes.c_int()
    _check(cuda, "cuDeviceGetCount", cuda.cuDeviceGetCount(ctypes.byref(count)))
    return [_gpu(cuda, number) for number in range(count.value)]


def _gpu(cuda: Any, number: int) -> Gpu:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
    _check(cuda, "cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), number))
    _check(cuda, "cuDeviceGetName", cuda.cuDeviceGetName(name, _NAME_BYTES, device))
    capability = []
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int()
        status = cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        _check(cuda, "cuDeviceGetAttribute", status)
        capability.append(value.value)
    return Gpu(name.value.decode(), tuple(capability))


def _check(cuda: Any, function: str, status: int) -> None:
    if status == _SUCCESS:
        return
    text = ctypes.c_char_p()
    known = cuda.cuGetErrorString(status, ctypes.byref(text)) == _SUCCESS and text.value
    said = text.value.decode() if known else "no words for it"
    raise DriverError(f"CUDA's driver answers {function} with error {status}: {said}")
