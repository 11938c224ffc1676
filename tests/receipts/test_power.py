"""The power meter, with an NVML of this test's own: a shared library that counts by itself."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

from megacpp_mcore.receipts import power

NVML = """
#include <string.h>
typedef unsigned long long u64;
static u64 reads;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **gpu) {
  *gpu = (void *)0x1234567890abcdefULL;
  return strcmp(uuid, "GPU-5c0ffee5-0000-0000-0000-000000000001") ? 6 : 0;
}
static int own(void *gpu) { return gpu == (void *)0x1234567890abcdefULL ? 0 : 1; }
int nvmlDeviceGetTotalEnergyConsumption(void *gpu, u64 *mj) {
  *mj = 5000000000000ULL + 1400000 * reads++;
  return own(gpu);
}
#ifndef WITHOUT_VIOLATIONS
int nvmlDeviceGetViolationStatus(void *gpu, int policy, u64 time[2]) {
  time[0] = 77, time[1] = 1500000000ULL * (reads - 1);
  return policy ? 1 : own(gpu);
}
#endif
int nvmlDeviceGetEnforcedPowerLimit(void *gpu, unsigned *mw) { *mw = 700000; return own(gpu); }
"""


@pytest.fixture
def nvml(tmp_path, monkeypatch):
    def build(*flags: str, uuid: str = "5c0ffee5-0000-0000-0000-000000000001") -> None:
        source, library = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so.1"
        source.write_text(NVML)
        subprocess.run(["cc", "-shared", "-fPIC", *flags, source, "-o", library], check=True)
        load = power.ctypes.CDLL
        monkeypatch.setattr(power.ctypes, "CDLL", lambda name: load(tmp_path / name))
        found = SimpleNamespace(uuid=uuid)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)

    return build


def test_a_step_of_two_seconds_and_1400_joules_took_700_watts(nvml):
    nvml()
    meter = power.PowerMeter()
    taken = meter.read().until(meter.read(), 2.0)
    assert taken == {"power_w": 700.0, "power_limited": 0.75}
    assert meter.limit_w() == 700.0


def test_what_the_driver_does_not_count_is_none(nvml):
    nvml("-DWITHOUT_VIOLATIONS")
    meter = power.PowerMeter()
    taken = meter.read().until(meter.read(), 2.0)
    assert taken == {"power_w": 700.0, "power_limited": None}


def test_another_gpu_is_not_counted_for_this_one(nvml):
    nvml(uuid="5c0ffee5-0000-0000-0000-000000000002")
    meter = power.PowerMeter()
    assert meter.read() == power.Reading(None, None) and meter.limit_w() is None


def test_without_nvml_nothing_is_said(monkeypatch):
    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(power.ctypes, "CDLL", absent)
    meter = power.PowerMeter()
    taken = meter.read().until(meter.read(), 2.0)
    assert taken == {"power_w": None, "power_limited": None} and meter.limit_w() is None
