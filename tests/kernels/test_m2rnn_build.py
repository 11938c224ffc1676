"""Building M2RNN's kernels: nvcc missing, failing, raced for, and what dispatch then says."""

import ctypes
import errno
import shutil
import stat
import subprocess

import pytest
import warm

from megacpp_mcore import dispatch
from megacpp_mcore.kernels import nvcc as compiler_of
from megacpp_mcore.kernels.m2rnn import launch
from megacpp_mcore.kernels.m2rnn.launch import LIBRARY
from megacpp_mcore.kernels.nvcc import KernelBuildError
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.surfaces import support
from megacpp_mcore.surfaces.workload import Workload
from megacpp_mcore.training import kernels


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("CUDA_HOME", "CUDA_PATH", dispatch.ENVIRONMENT_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    caches = (compiler_of.untested_gpu, compiler_of.Library.load)
    for cached in caches:
        cached.cache_clear()
    dispatch.forget()
    yield
    for cached in caches:
        cached.cache_clear()
    dispatch.forget()


def problem(device="cuda", dtype="bfloat16", **changes):
    sizes = {"heads": 44, "k_head_dim": 64, "v_head_dim": 16, "chunk_size": 32} | changes
    return Workload.of(device, dtype, **sizes)


@pytest.fixture
def hopper(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def nvcc(folder, script):
    """A program named nvcc that runs `script`; returns the CUDA_HOME it lies in."""
    path = folder / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(folder)


def without_nvcc(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, *args, **kwargs: None)


def test_dispatch_takes_the_kernels_for_what_they_serve(hopper, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", nvcc(tmp_path / "toolkit", "exit 0"))
    for asked, served in (
        (problem(), "cuda"),
        (problem(dtype="float16"), "cuda"),
        (problem(dtype="float32"), "cuda"),
        (problem(k_head_dim=128), "cuda"),
        (problem(k_head_dim=40), "reference"),
        (problem(v_head_dim=8), "reference"),
        (problem(chunk_size=64), "reference"),
        (problem(dtype="float32", chunk_size=64), "cuda"),
        (problem(dtype="float32", chunk_size=128), "reference"),
        (problem(dtype="float64"), "reference"),
        (problem(device="cpu"), "reference"),
    ):
        assert dispatch.choose("m2rnn", asked).observed == served, asked
    with pytest.raises(dispatch.DispatchError, match="K is 40; it takes multiples of 32"):
        dispatch.choose("m2rnn", problem(k_head_dim=40), {"m2rnn": "cuda"})


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)], ids=str)
def test_an_untested_gpu_is_said_to_be_one(hopper, monkeypatch, tmp_path, capability):
    import torch

    monkeypatch.setenv("CUDA_HOME", nvcc(tmp_path / "toolkit", "exit 0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    decision = dispatch.choose("m2rnn", problem())
    assert decision.observed == "reference"
    assert f"compute capability {capability[0]}.{capability[1]}" in decision.reason


def test_without_nvcc_a_slower_backend_has_to_be_named(hopper, monkeypatch):
    without_nvcc(monkeypatch)
    allow = r"nvcc, which compiles m2rnn.cu, is not found .* naming it, m2rnn=reference"
    with pytest.raises(dispatch.DispatchError, match=f"cannot be compiled: {allow}"):
        dispatch.choose("m2rnn", problem())
    assert dispatch.choose("m2rnn", problem(), {"m2rnn": "reference"}).observed == "reference"
    with pytest.raises(dispatch.DispatchError, match="cannot serve: nvcc"):
        dispatch.choose("m2rnn", problem(), {"m2rnn": "cuda"})
    with pytest.raises(KernelBuildError, match=allow):
        LIBRARY.load("sm_90")


@pytest.mark.parametrize("named", ["", "m2rnn=reference", "m2rnn=reference,moe_experts=grouped_mm"])
def test_a_run_compiles_what_it_needs_before_its_model(hopper, monkeypatch, tmp_path, named):
    """Without nvcc it is refused, but for what is named; with it both libraries are there."""
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, named)
    recipe = load_recipe("nam56r")
    monkeypatch.setattr(support, "import_reason", lambda module: None)  # as where Triton is
    monkeypatch.setenv("CUDA_HOME", nvcc(tmp_path / "toolkit", "echo 13.0"))
    wanted = {"m2rnn.cu": "m2rnn=reference", "grouped.cu": "moe_experts=grouped_mm"}
    wanted = {source for source, name in wanted.items() if name not in named}
    assert {library.source.name for library in kernels.needed(recipe)} == wanted
    compiled = []
    monkeypatch.setattr(compiler_of.Library, "load", lambda library: compiled.append(library))
    kernels.compile_all(recipe)
    assert {library.source.name for library in compiled} == wanted
    dispatch.forget()
    without_nvcc(monkeypatch)
    if not wanted:
        kernels.compile_all(recipe)
        return
    with pytest.raises(dispatch.DispatchError, match="cannot be compiled: nvcc, which compiles"):
        kernels.compile_all(recipe)


def test_what_nvcc_says_is_passed_on(monkeypatch, tmp_path):
    script = 'case "$1" in --version) echo 13.0;; *) echo "no such target" >&2; exit 3;; esac'
    monkeypatch.setenv("CUDA_HOME", nvcc(tmp_path / "toolkit", script))
    with pytest.raises(KernelBuildError, match=r"sm_99 failed .* status 3: no such target"):
        LIBRARY.load("sm_99")
    assert not list((tmp_path / "cache").rglob("*.so*"))


def test_a_cache_that_cannot_be_written_or_loaded_is_named(monkeypatch, tmp_path):
    script = 'case "$1" in --version) echo 13.0; exit;; esac; while [ "$1" != -o ]; do shift; done'
    monkeypatch.setenv("CUDA_HOME", nvcc(tmp_path / "toolkit", f"{script}; echo no library > $2"))
    with pytest.raises(KernelBuildError, match=r"m2rnn-sm_90-.*XDG_CACHE_HOME"):
        LIBRARY.load("sm_90")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(KernelBuildError, match=r"Not a directory.*XDG_CACHE_HOME"):
        LIBRARY.load("sm_90")


def test_a_file_system_without_locks_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", nvcc(tmp_path / "toolkit", "echo 13.0"))

    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(compiler_of.fcntl, "flock", flock)
    with pytest.raises(KernelBuildError, match=r"has no locks .* in XDG_CACHE_HOME"):
        LIBRARY.load("sm_90")
    monkeypatch.setattr(
        compiler_of.fcntl, "flock", lambda file, how: (_ for _ in ()).throw(OSError(5, "broken"))
    )
    with pytest.raises(KernelBuildError, match=r"cannot keep or load .* broken"):
        LIBRARY.load("sm_90")


def test_a_missing_host_compiler_is_named(monkeypatch, tmp_path):
    script = 'case "$1" in --version) echo 13.0;; *) echo "fatal: no properties" >&2; exit 1;; esac'
    monkeypatch.setenv("CUDA_HOME", nvcc(tmp_path / "toolkit", script))
    which = shutil.which
    there = [True]

    def found(name, *args, **kwargs):
        return which(name, *args, **kwargs) if there[0] or name.endswith("nvcc") else None

    monkeypatch.setattr(shutil, "which", found)
    with pytest.raises(KernelBuildError, match=r"fatal: no properties$"):
        LIBRARY.load("sm_90")
    there[0] = False
    with pytest.raises(KernelBuildError, match=r"no properties\. nvcc needs a host compiler"):
        LIBRARY.load("sm_90")


@pytest.mark.slow
def test_built_once_whoever_asks(monkeypatch, tmp_path):
    """Four processes at once: one compiles every unit and links them, all load the same library."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to stand in for nvcc")
    script = f"""case "$1" in --version) echo 13.0; exit;; esac
case "$*" in
*" -c -o "*) for unit; do :; done; basename $unit >> {tmp_path}/log
  while [ "$1" != -o ]; do shift; done; exec touch "$2";;
esac
while [ "$1" != -o ]; do shift; done
to=$2; shift 2; ls "$@" | xargs -n 1 basename >> {tmp_path}/log || exit 1
sleep 0.3; echo 'int answer(void) {{ return 42; }}' > {tmp_path}/$$.c
exec {compiler} -shared -fPIC -o $to {tmp_path}/$$.c"""
    monkeypatch.setenv("CUDA_HOME", nvcc(tmp_path / "toolkit", script))
    program = (
        "from megacpp_mcore.kernels.m2rnn.launch import LIBRARY;"
        "print(LIBRARY.load('sm_90').answer())"
    )
    processes = [
        subprocess.Popen([warm.python(), "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert [process.communicate()[0].strip() for process in processes] == ["42"] * 4
    units = {unit.name for unit in LIBRARY.source.parent.glob("*.cu")}
    assert {"m2rnn.cu", "bf16_fwd.cu", "bf16_bwd.cu", "fp32.cu"} < units
    wanted = [*units, *(unit.replace(".cu", ".o") for unit in units)]
    assert sorted((tmp_path / "log").read_text().split()) == sorted(wanted)
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sorted(path.suffix for path in left) == [".lock", ".so"]


@pytest.mark.parametrize("unit", ["bf16_bwd.cu", "m2rnn.cu"])
def test_a_unit_that_nvcc_refuses_is_named(monkeypatch, tmp_path, unit):
    script = f"""case "$1" in --version) echo 13.0; exit;; esac
case "$*" in *{unit}) echo "error: no such type" >&2; exit 1;; esac
while [ "$1" != -o ]; do shift; done; touch $2"""
    monkeypatch.setenv("CUDA_HOME", nvcc(tmp_path / "toolkit", script))
    with pytest.raises(KernelBuildError, match=f"failed on {unit} with status 1: error: no such"):
        LIBRARY.load("sm_90")
    assert not list((tmp_path / "cache").rglob("*.so*"))


def test_another_nvcc_or_source_is_another_library(tmp_path):
    first = nvcc(tmp_path / "first", "echo 13.0")
    second = nvcc(tmp_path / "second", "echo 13.1")
    sources = tmp_path / "csrc"
    shutil.copytree(LIBRARY.source.parent, sources)
    names = {compiler_of.fingerprint(f"{home}/bin/nvcc", sources) for home in (first, second)}
    (sources / "common.cuh").write_text("// changed\n")
    names.add(compiler_of.fingerprint(f"{first}/bin/nvcc", sources))
    assert len(names) == 3


@pytest.mark.slow
def test_the_sources_compile(tmp_path):
    compiler = compiler_of.find_nvcc()
    if compiler is None:
        pytest.skip("no nvcc here")
    kernels = LIBRARY.load("sm_90")
    kernels.m2rnn_params_size.restype = ctypes.c_int64
    assert kernels.m2rnn_params_size() == ctypes.sizeof(launch.Params)
