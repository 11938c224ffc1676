"""`megacpp cuda`: which wheels are built, kept, taken and refused. Compilers and the network are
played by a package of one file, whose setup.py talks as ninja does."""

import re
import signal
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import psutil
import pytest

from megacpp_mcore import cli
from megacpp_mcore.host import memory
from megacpp_mcore.stack import cuda_build, cuda_packages, imports
from megacpp_mcore.stack.cuda_build import Source
from megacpp_mcore.stack.cuda_packages import PACKAGES, CudaBuildError, CudaPackageError

ROOT = Path(__file__).resolve().parents[2]
SETUP = """
import os, sys, time
from setuptools import setup
cc_flag = []
cc_flag.append("-gencode")
cc_flag.append("arch=compute_75,code=sm_75")
if "bdist_wheel" in sys.argv:
    done = os.path.exists("first.o")
    open("first.o", "w").close()
    print("[1/1] c++ second" if done else "[1/2] c++ first", flush=True)
    if not done:
        time.sleep(float(os.environ["SLOW"]))
        if os.environ.get("BROKEN"):
            sys.exit("FAILED: [code=1] a.o\\nc++ -c a.cpp\\na.cpp:3:1: error: no such thing\\n"
                     "ninja: build stopped: subcommand failed.")
        print("[2/2] c++ second", flush=True)
    print("flags", cc_flag, os.environ["TORCH_CUDA_ARCH_LIST"], os.environ["MAX_JOBS"])
setup(name="causal_conv1d", version="1.7.0", py_modules=["causal_conv1d"])
"""
SOURCE = Source("causal-conv1d", {"SLOW": "0"}, lists_architectures=True)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The cache's folder of the source, with its archive; nvcc is there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = cuda_build._place(SOURCE, ["90"])
    tree = tmp_path / "made" / SOURCE.stem
    tree.mkdir(parents=True)
    (tree / "setup.py").write_text(SETUP)
    (tree / "causal_conv1d.py").write_text("VALUE = 3\n")
    place.mkdir(parents=True)
    with tarfile.open(place / f"{SOURCE.stem}.tar.gz", "w:gz") as archive:
        archive.add(tree, SOURCE.stem)
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "Cuda compilation, release 13.0, V13.0.88"\n'
        f'[ "$1" = --dryrun ] && echo "#$ TOP={tmp_path}/cuda/bin/.." >&2\nexit 0\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(cuda_build, "_build_tools", lambda: tmp_path / "tools")
    return place


def built(said, **variables):
    source = Source("causal-conv1d", {"SLOW": "0", **variables}, lists_architectures=True)
    return cuda_build.build(["90"], 3, said.append, [source])


@pytest.mark.slow
def test_a_wheel_is_built_once_for_the_architectures(place):
    said = []
    (wheel,) = built(said)
    assert wheel.parent == place and wheel.name.startswith("causal_conv1d-1.7.0-")
    assert "causal-conv1d: 2 of 2 files" in said and any("1 of 2 files, " in line for line in said)
    log = (place / f"{SOURCE.stem}.log").read_text()
    assert "flags [] 9.0 3" in log  # torch takes the list; setup.py names none
    assert not (place / SOURCE.stem).exists()
    again = []
    assert built(again) == [wheel] and again == [f"causal-conv1d 1.7.0: built before, {wheel}"]


@pytest.mark.slow
def test_a_compilers_error_is_told(place):
    with pytest.raises(CudaBuildError, match=r"(?s)a.cpp:3:1: error: no such thing.*goes on fr"):
        built([], BROKEN="1")
    assert (place / SOURCE.stem / "first.o").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_build_leaves_no_process_and_goes_on(place, how):
    program = (
        "from megacpp_mcore.stack import cuda_build; from pathlib import Path\n"
        f"cuda_build._build_tools = lambda: Path({str(place)!r})\n"
        "s = cuda_build.Source('causal-conv1d', {'SLOW': '600'}, lists_architectures=True)\n"
        "cuda_build.build(['90'], 1, lambda line: print(line, flush=True), [s])"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL, text=True)  # fmt: skip
    while "1 of 2" not in (line := child.stdout.readline()):
        assert line, child.wait()
    compilers = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(how)
    child.wait(60)
    left = psutil.wait_procs(compilers, timeout=30)[1]
    for process in left:
        process.kill()
    assert left == []  # not after their ten minutes
    said = []
    assert len(built(said)) == 1 and said[-2] == "causal-conv1d: 1 of 1 files"


def test_two_builds_do_not_meet(place):
    with cuda_build._only_one(place), pytest.raises(CudaPackageError, match="another process"):
        built([])


def test_another_setup_py_is_refused(place, tmp_path):
    tree = tmp_path / "made" / SOURCE.stem
    (tree / "setup.py").write_text("flags = []")
    with tarfile.open(place / f"{SOURCE.stem}.tar.gz", "w:gz") as archive:
        archive.add(tree, SOURCE.stem)
    with pytest.raises(CudaPackageError, match="no longer names architectures"):
        built([])


@pytest.mark.parametrize(
    ("asked", "found"),
    [("90", ("90",)), ("80 90", ("80", "90")), ("90,90;100a", ("90", "100a")), ("120", ("120",))],
)
def test_architectures(asked, found):
    assert cuda_build.architectures(asked) == found


@pytest.mark.parametrize("asked", ["9.0", "sm_90", "90 hopper"])
def test_architectures_that_are_none(asked):
    with pytest.raises(CudaPackageError, match=r"CUDA_ARCHS .* as in 90"):
        cuda_build.architectures(asked)


def test_jobs_are_limited_by_memory(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(64))
    for free, expected in ((1 << 30, 1), (9 << 30, 2), (1 << 40, 64)):
        monkeypatch.setattr(memory, "available", lambda free=free: free)
        assert cuda_build.jobs() == expected
    assert cuda_build.jobs("7") == 7
    with pytest.raises(CudaPackageError, match="MAX_JOBS '0'"):
        cuda_build.jobs("0")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Cuda compilation tools, release 12.4, V12", "of CUDA 12.4, torch .* CUDA_HOME"),
        ("no release", "of CUDA None"),
    ],
)
def test_another_toolkit_is_refused(place, tmp_path, said, expected):
    (tmp_path / "cuda" / "bin" / "nvcc").write_text(f"#!/bin/sh\necho '{said}'\n")
    with pytest.raises(CudaPackageError, match=expected):
        built([])


def test_the_pins_are_those_of_the_environment():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {
        cuda_packages.in_file_names(name): version
        for name, _, version in (line.partition("==") for line in lines if "==" in line)
    }
    for name, version in PACKAGES.items():
        assert pinned[cuda_packages.in_file_names(name)] == version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["cuda"]
    names = {re.sub(r"\[.*\]", "", line) for line in extra}
    assert names <= {f"{name}=={version}" for name, version in PACKAGES.items()}
    assert set(cuda_packages.COMPILED) == {source.name for source in cuda_build.SOURCES}


class TestInstall:
    @pytest.fixture(autouse=True)
    def calls(self, monkeypatch):
        calls = []
        monkeypatch.setattr(imports, "has_driver", lambda: True)
        monkeypatch.setattr(cuda_packages, "pip", lambda *words, **_: calls.append(words))
        return calls

    @pytest.fixture
    def folder(self, tmp_path):
        for name, version in PACKAGES.items():
            stem = cuda_packages.in_file_names(name)
            (tmp_path / f"{stem}-{version}-py3-none-any.whl").touch()
        return tmp_path

    def test_a_folder_is_enough(self, calls, folder, monkeypatch):
        monkeypatch.setattr("megacpp_mcore.stack.facts.gather", lambda: None)
        monkeypatch.setattr("megacpp_mcore.stack.doctor.examine", lambda *_: [])
        assert cli.main(["cuda", "install", "--wheels", str(folder)]) == 0
        ((verb, *words),) = calls
        assert verb == "install" and "--no-index" in words and "--no-deps" in words
        assert words[0] == f"--find-links={folder}"
        assert all("==" in word for word in words if not word.startswith("--"))

    def test_what_a_folder_lacks_is_named(self, calls, folder, capsys):
        for wheel in [*folder.glob("causal*"), *folder.glob("transformer_engine-*")]:
            wheel.rename(
                wheel.with_name(wheel.name.replace("1.7.0", "1.6.0").replace("2.17.1", "2"))
            )
        assert cli.main(["cuda", "install", "--wheels", str(folder)]) == 2
        said = capsys.readouterr().err
        assert "transformer-engine==2.17.1, causal-conv1d==1.7.0" in said and "torch==" not in said
        assert calls == []

    def test_without_a_driver_nothing_is_installed(self, calls, folder, monkeypatch, capsys):
        monkeypatch.setattr(imports, "has_driver", lambda: False)
        assert cli.main(["cuda", "install", "--wheels", str(folder)]) == 2
        assert "libcuda.so.1" in capsys.readouterr().err and calls == []


def test_a_terminal_counts_on_one_line(monkeypatch, capsys):
    for room, expected in ((True, "\ra: 1 of 2 files, 3 s left\x1b[K\ra: 2 of 2 files\x1b[K\n"),
                           (False, "a: 1 of 2 files, 3 s left\na: 2 of 2 files\n")):  # fmt: skip
        monkeypatch.setattr(cuda_build, "has_room", lambda stream, room=room: room)
        for line in ("a: 1 of 2 files, 3 s left", "a: 2 of 2 files"):
            cuda_build.progress(line)
        assert capsys.readouterr().err == expected
