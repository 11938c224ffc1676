"""Which ptxas assembles Triton's kernels, and that it does so right."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from megacpp_mcore.host import ptxas

TORCHS = Path(torch.__file__).parent / "bin" / "ptxas"
WRONG = Path(pytest.importorskip("triton").__file__).parent / "backends/nvidia/bin/ptxas"


@pytest.fixture
def variable(monkeypatch):
    monkeypatch.delenv(ptxas.VARIABLE, raising=False)

    def chosen() -> str | None:
        ptxas.choose()
        return os.environ.get(ptxas.VARIABLE)

    return chosen


@pytest.fixture
def package(monkeypatch, tmp_path):
    """An installed nvidia-cuda-nvcc."""
    program = tmp_path / "nvidia" / "cu13" / "bin" / "ptxas"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.4, V13.4.92'\n")
    program.chmod(0o755)
    known = tmp_path / "nvidia_cuda_nvcc-13.4.92.dist-info"
    known.mkdir()
    (known / "METADATA").write_text("Name: nvidia-cuda-nvcc\nVersion: 13.4.92\n")
    monkeypatch.syspath_prepend(tmp_path)
    return program


@pytest.fixture
def no_package(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)


def test_the_packages_is_taken_before_torchs(variable, package):
    assert variable() == str(package)
    assert ptxas.version() == (13, 4)


def test_torchs_choice_by_inductor_is_not_the_users(variable, package, monkeypatch):
    monkeypatch.setenv(ptxas.VARIABLE, str(TORCHS))
    assert variable() == str(package)


def test_a_users_choice_stays(variable, package, monkeypatch):
    monkeypatch.setenv(ptxas.VARIABLE, "/opt/ptxas")
    assert variable() == "/opt/ptxas"
    assert ptxas.version() is None  # and doctor says that nothing runs there


def test_without_the_package_torchs_is_taken(variable, no_package):
    assert variable() == str(TORCHS)
    assert ptxas.version() >= ptxas.RIGHT


def test_a_package_without_its_program_is_none(variable, package):
    package.chmod(0o644)
    assert variable() == str(TORCHS)


def test_without_any_triton_keeps_its_own_which_is_wrong(variable, no_package, monkeypatch):
    monkeypatch.setattr(ptxas, "_of_torch", lambda: None)
    assert variable() is None
    assert ptxas.version() < ptxas.RIGHT


def test_any_import_of_an_operator_chooses():
    environment = {n: v for n, v in os.environ.items() if n != ptxas.VARIABLE}
    code = f"import os, megacpp_mcore.kernels; print(os.environ['{ptxas.VARIABLE}'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()).name == "ptxas"


ASSEMBLED = """
import subprocess, sys
from pathlib import Path
folder, tests, *programs = sys.argv[1:]
sys.path.insert(0, tests)
import compile_for_hopper
from megacpp_mcore.kernels.mla_up.case import MLAUpCase
compile_for_hopper.compile_instead_of_launching("mla_up_q_weight_backward")
compile_for_hopper.operator_of(MLAUpCase.samples()["odd-unlike"], "triton")
((kernel,),) = compile_for_hopper.COMPILED.values()
ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
ptx.write_text(kernel.asm["ptx"])
for program in programs:
    subprocess.run([program, "-arch=sm_90a", "-o", cubin, ptx], check=True)
    print(len(compile_for_hopper.wrong_descriptors(cubin.read_bytes())))
"""


@pytest.mark.slow
def test_products_of_tensor_cores_have_the_descriptors_that_their_ptx_has(tmp_path, variable):
    """The kernel that ended with an illegal address on an H200: Triton's own ptxas assembles it
    wrong, the chosen one right."""
    programs = [str(WRONG), variable()]
    # Triton writes PTX of the version that the older one reads.
    environment = os.environ | {ptxas.VARIABLE: str(WRONG), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    kernels = str(Path(__file__).parents[1] / "kernels")
    done = subprocess.run(
        [sys.executable, "-c", ASSEMBLED, str(tmp_path), kernels, *programs], env=environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["1", "0"]
