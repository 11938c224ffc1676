"""What CUDA's driver says of a machine's GPUs, from a driver made of Python."""

import ctypes
import subprocess
import sys

import pytest

from megacpp_mcore.host import gpus
from megacpp_mcore.host.gpus import DriverError, Gpu


class Driver:
    """libcuda.so.1 with these GPUs. fails: function -> its status."""

    def __init__(self, *found: Gpu, **fails: int) -> None:
        self._found, self._fails, self._ready = found, fails, False

    def _status(self, function: str) -> int:
        assert self._ready or function in ("cuInit", "cuGetErrorString"), "not initialised"
        return self._fails.get(function, 0)

    def cuInit(self, flags):
        assert flags == 0, "the driver takes no other"
        self._ready = True
        return self._status("cuInit")

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self._found)
        return self._status("cuDeviceGetCount")

    def cuDeviceGet(self, device, number):
        device._obj.value = number + 10
        return self._status("cuDeviceGet")

    def cuDeviceGetName(self, name, size, device):
        name.value = self._found[device.value - 10].name.encode()[: size - 1]
        return self._status("cuDeviceGetName")

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = self._found[device.value - 10].capability[{75: 0, 76: 1}[attribute]]
        return self._status("cuDeviceGetAttribute")

    def cuGetErrorString(self, status, text):
        text._obj.value = b"unknown to man" if status == 999 else None
        return 0 if status == 999 else 1


@pytest.fixture
def driver(monkeypatch):
    def use(*found, **fails):
        monkeypatch.setattr(
            ctypes, "CDLL", lambda name: {"libcuda.so.1": Driver(*found, **fails)}[name]
        )

    return use


def test_gpus_have_a_name_and_a_capability_in_the_drivers_order(driver):
    found = Gpu("NVIDIA H200", (9, 0)), Gpu("NVIDIA L40S", (8, 9))
    driver(*found)
    assert gpus.visible() == list(found)


def test_there_are_none_without_a_driver_or_a_device(driver, monkeypatch):
    driver(Gpu("hidden", (9, 0)), cuInit=100)
    assert gpus.visible() == []
    driver()
    assert gpus.visible() == []

    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert gpus.visible() == []


@pytest.mark.parametrize(
    "function",
    ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute"],
)
@pytest.mark.parametrize("status, said", [(999, "unknown to man"), (803, "no words for it")])
def test_a_driver_that_does_not_work_is_an_error_with_its_words(driver, function, status, said):
    driver(Gpu("NVIDIA H200", (9, 0)), **{function: status})
    with pytest.raises(DriverError) as refused:
        gpus.visible()
    assert str(refused.value) == f"CUDA's driver answers {function} with error {status}: {said}"


@pytest.mark.slow
def test_a_launcher_imports_no_torch_until_the_parts_have_started():
    script = """
import sys
from megacpp_mcore.host import gpus
gpus.visible = lambda: [gpus.Gpu("NVIDIA H200", (9, 0))]
from megacpp_mcore.training.gpu import launcher, precompile
launcher.check_packages = lambda recipe, yardstick: None
def start(name, *others):
    print(name, "torch" in sys.modules)
    raise KeyboardInterrupt
precompile._start = start
try:
    launcher.launch_ranks("nam56r", (), 1, "out")
except KeyboardInterrupt:
    pass
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "A False\n", done
