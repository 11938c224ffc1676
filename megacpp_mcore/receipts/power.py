"""What one GPU consumes, read through NVML, which comes with NVIDIA's driver.

NAM56R's step runs at an H200's power limit, where its clock falls by a quarter: two step times are
alike only where the power was. The counters are cumulative, so that two readings say what the time
between them took, with no thread that samples. A run reads them when it reads a step's results: the
window is about as long as a step, and ends when the step does or, where the host is late, a little
later, in the next one.
"""

import ctypes
from dataclasses import dataclass

import torch

_SUCCESS, _POWER = 0, 0  # NVML_SUCCESS, NVML_PERF_POLICY_POWER


class _ViolationTime(ctypes.Structure):
    _fields_ = (("reference_us", ctypes.c_ulonglong), ("violation_ns", ctypes.c_ulonglong))


@dataclass(frozen=True)
class Reading:
    """Since the driver was loaded. joules: consumed by the whole card. limited_s: the time in which
    its power limit held the clock down. None: this card or driver does not count it."""

    joules: float | None
    limited_s: float | None

    def until(self, later: "Reading", seconds: float) -> dict[str, float | None]:
        """The power from this reading to a later one, `seconds` apart: power_w, the mean, and
        power_limited, the share of the time in which the limit held the clock down."""
        joules = _difference(self.joules, later.joules)
        limited_s = _difference(self.limited_s, later.limited_s)
        return {
            "power_w": None if joules is None else round(joules / seconds, 1),
            "power_limited": None if limited_s is None else min(1.0, round(limited_s / seconds, 4)),
        }


class PowerMeter:
    """The counters of one GPU. Where NVML is unavailable, every reading is None: a run needs none.

    device: the CUDA device's index; the current one by default.
    """

    def __init__(self, device: int | None = None) -> None:
        self._nvml, self._gpu = None, ctypes.c_void_p()
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if nvml.nvmlInit_v2() == _SUCCESS:
            found = nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._gpu))
            self._nvml = nvml if found == _SUCCESS else None

    def read(self) -> Reading:
        millijoules, time = ctypes.c_ulonglong(), _ViolationTime()
        if not self._has("nvmlDeviceGetTotalEnergyConsumption", ctypes.byref(millijoules)):
            return Reading(None, None)
        counted = self._has("nvmlDeviceGetViolationStatus", _POWER, ctypes.byref(time))
        return Reading(millijoules.value / 1e3, time.violation_ns / 1e9 if counted else None)

    def limit_w(self) -> float | None:
        """The card's power limit as it is enforced, in watts."""
        milliwatts = ctypes.c_uint()
        has = self._has("nvmlDeviceGetEnforcedPowerLimit", ctypes.byref(milliwatts))
        return milliwatts.value / 1e3 if has else None

    def _has(self, function: str, *arguments) -> bool:
        if self._nvml is None or not hasattr(self._nvml, function):
            return False
        return getattr(self._nvml, function)(self._gpu, *arguments) == _SUCCESS


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before
