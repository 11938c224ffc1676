"""Every check of the doctor against stacks that are not on this machine."""

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from left_behind import Marked, wait_until

from megacpp_mcore import cli, stack
from megacpp_mcore.patching import manifest
from megacpp_mcore.stack import (
    FAIL,
    NOT_APPLICABLE,
    OK,
    PINS,
    WARN,
    Facts,
    Gpu,
    Library,
    doctor,
    imports,
)
from megacpp_mcore.stack import facts as stack_facts
from megacpp_mcore.stack.checks import MAMBA_PATCH, TE_DRIVER_PATCH

ROOT = Path(__file__).resolve().parents[2]
CORE = {
    "torch": "2.11.0", "triton": "3.6.0", "megatron-core": "0.19.2", "numpy": "2.2.6",
    "psutil": "7.2.2",
}  # fmt: skip
EXTRA = {
    "transformer-engine": "2.17.1",
    "transformer-engine-cu13": "2.17.1",
    "transformer-engine-torch": "2.17.1",
    "mamba-ssm": "2.3.2.post1",
    "causal-conv1d": "1.7.0",
    "flash-attn-4": "4.0.0b36",
    "quack-kernels": "0.6.4",
    "nvidia-cutlass-dsl": "4.6.2",
    "nvidia-cuda-nvcc": "13.4.92",
    "liger-kernel": "0.8.5",
    "nvidia-cublas": "13.1.0.3",
    "nvidia-cudnn-cu13": "9.19.0.56",
    "nvidia-nccl-cu13": "2.28.9",
}
TORCHS = Library("/site/nvidia/cudnn/lib/libcudnn.so.9", "9.19.0.56", of_torch=True)


def lane(package, installed="1.0", problem="", interrupted="", leftovers=(), **states):
    patches = [{"id": id.replace("_", "-"), "state": s, "files": []} for id, s in states.items()]
    complete = not (problem or interrupted or leftovers)
    return {
        "package": package, "pinned": "1.0", "installed": installed, "site": "/site",
        "problem": problem, "interrupted": interrupted, "patches": patches,
        "leftovers": list(leftovers),
        "complete": complete and all(s == "applied" for s in states.values()),
    }  # fmt: skip


CPU = Facts(
    python=(3, 12, 1),
    versions=CORE,
    programs={"cc": "/usr/bin/cc", "c++": "/usr/bin/c++"},
    lane=(lane("megatron-core", te_import_without_driver="applied"),),
)
H200 = replace(
    CPU,
    versions=CORE | EXTRA,
    gpu=Gpu(devices=("NVIDIA H200",), cudnn=91900, nccl="2.28.9"),
    cudnn=(TORCHS,),
    cudnn_of_torch="/site/nvidia/cudnn",
    modules=frozenset({"selective_scan_cuda"}),
    programs=CPU.programs | {"nvcc": "/usr/local/cuda/bin/nvcc"},
    ptxas=(13, 4),
)


def without(facts, *names):
    return replace(facts, versions={n: v for n, v in facts.versions.items() if n not in names})


def having(facts, **versions):
    named = {name.replace("_", "-"): version for name, version in versions.items()}
    return replace(facts, versions=facts.versions | named)


def check(facts, name):
    (found,) = [c for c in doctor.examine(facts) if c.name == name]
    assert found.found and bool(found.remedy) == (found.status in (WARN, FAIL))
    return found


def by_status(facts, status):
    return {c.name for c in doctor.examine(facts) if c.status == status}


class TestSoundStacks:
    def test_a_cpu_machine_has_nothing_to_fix(self):
        assert not by_status(CPU, FAIL) | by_status(CPU, WARN)
        assert by_status(CPU, NOT_APPLICABLE) >= {"transformer-engine", "mamba-ssm", "gpu", "nvcc"}

    def test_the_pinned_gpu_stack_warns_of_what_it_cannot_do(self):
        assert not by_status(H200, FAIL)
        assert by_status(H200, WARN) == {"te-attention-cudnn", "nccl-ncclep"}

    def test_names_are_unique(self):
        names = [c.name for c in doctor.examine(H200)]
        assert len(set(names)) == len(names)


class TestPins:
    def test_they_are_those_that_the_project_installs(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]["cuda"]
        exact = dict(r.split("==") for r in [*project["dependencies"], *extras] if "==" in r)
        exact = {name.split("[")[0]: version for name, version in exact.items()}
        pinned = {pin.name: pin.version for pin in PINS}
        assert exact.items() <= pinned.items()
        assert {pin.name for pin in PINS if pin.cuda} == {r.split("=")[0].split("[")[0]
                                                          for r in extras}  # fmt: skip
        lines = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
        constrained = dict(line.split("==") for line in lines if "==" in line)
        assert pinned.items() <= constrained.items()
        assert f'">={stack.PYTHON[0]}.{stack.PYTHON[1]},' in (ROOT / "pyproject.toml").read_text()

    @pytest.mark.parametrize(("name", "status"), [("torch", FAIL), ("megatron-core", FAIL),
                                                  ("numpy", FAIL), ("triton", WARN)])  # fmt: skip
    def test_an_absent_package(self, name, status):
        found = check(without(CPU, name), name)
        assert (found.status, found.remedy) == (status, f"pip install {name}=={CORE[name]}")

    @pytest.mark.parametrize(("name", "status"), [("torch", FAIL), ("megatron-core", FAIL),
                                                  ("numpy", WARN), ("triton", WARN)])  # fmt: skip
    def test_another_version(self, name, status):
        found = check(having(CPU, **{name: "0.1"}), name)
        assert found.status == status and found.found.startswith(f"0.1; pinned {CORE[name]}")

    def test_a_build_label_is_no_other_version(self):
        assert check(having(CPU, torch="2.11.0+cu130"), "torch").status == OK
        assert check(having(CPU, torch="2.11.0.post1"), "torch").status == FAIL

    @pytest.mark.parametrize(
        ("name", "status"),
        [("transformer-engine", FAIL), ("mamba-ssm", WARN), ("causal-conv1d", WARN),
         ("flash-attn-4", WARN), ("liger-kernel", WARN)],
    )  # fmt: skip
    def test_the_cuda_extra_is_asked_for_where_there_is_a_gpu(self, name, status):
        assert check(without(H200, name), name).status == status
        assert check(CPU, name).status == NOT_APPLICABLE

    @pytest.mark.parametrize("name", [pin.name for pin in PINS if pin.cuda])
    def test_what_is_for_gpus_is_installed_by_one_command(self, name):
        assert check(without(H200, name), name).remedy == "megacpp cuda install"

    @pytest.mark.parametrize("python", [(3, 11, 9), (3, 13, 0)])
    def test_python(self, python):
        found = check(replace(CPU, python=python), "python")
        assert found.status == FAIL and "0.16.1" in found.found


def exported(line, **before):
    """CUDNN_PATH and LD_LIBRARY_PATH after `line` in a shell that refuses unset variables."""
    script = f'set -u; {line}; printf "%s\\n" "$CUDNN_PATH" "$LD_LIBRARY_PATH"'
    bash = ["/bin/bash", "-c", script]
    return subprocess.run(bash, env=before, capture_output=True, text=True).stdout.split()


class TestTransformerEngine:
    def test_without_a_driver(self):
        te = having(CPU, transformer_engine="2.17.1")
        assert check(te, "te-without-driver").status == OK  # CPU has the patch
        found = check(replace(te, lane=()), "te-without-driver")
        assert found.status == FAIL and "libcuda.so.1" in found.found
        not_applied = (lane("megatron-core", te_import_without_driver="not applied"),)
        assert check(replace(te, lane=not_applied), "te-without-driver").status == FAIL
        assert check(H200, "te-without-driver").status == OK

    @pytest.mark.parametrize(
        "facts",
        [
            without(H200, "transformer-engine-torch"),
            without(H200, "transformer-engine-cu13"),
            having(H200, transformer_engine_torch="2.16.0"),
            having(H200, transformer_engine="2.18.0"),
        ],
    )
    def test_parts_of_different_versions(self, facts):
        assert check(facts, "te-parts").status == FAIL

    @pytest.mark.parametrize(
        ("te", "cublas", "status"),
        [
            ("2.13.0", "13.1.0.3", OK),
            ("2.14.0", "13.1.0.3", FAIL),
            ("2.16.1", "13.1.0.3", FAIL),
            ("2.16.1", "13.2.0.9", OK),
            ("2.17.0", "13.1.0.3", OK),
        ],
    )
    def test_cublas(self, te, cublas, status):
        facts = having(H200, transformer_engine=te, nvidia_cublas=cublas)
        assert check(facts, "te-cublas").status == status

    def test_cublas_of_the_system_is_not_taken_for_a_newer_one(self):
        facts = without(having(H200, transformer_engine="2.15.0"), "nvidia-cublas")
        assert check(facts, "te-cublas").status == FAIL

    @pytest.mark.parametrize(
        ("cudnn", "forced", "status"),
        [
            (91900, "", WARN),
            (91900, "core_attention=te", FAIL),
            (91900, "core_attention=reference", WARN),
            (None, "", WARN),
            (92200, "core_attention=te", OK),
            (92300, "", OK),
        ],
    )
    def test_cudnn_of_fused_attention(self, cudnn, forced, status):
        facts = replace(
            H200,
            gpu=replace(H200.gpu, cudnn=cudnn),
            environment={"MEGACPP_BACKENDS": forced} if forced else {},
        )
        assert check(facts, "te-attention-cudnn").status == status

    @pytest.mark.parametrize(
        ("version", "status"),
        [("9.14.0", FAIL), ("9.19.0", OK), ("9.22.1", WARN), (None, WARN)],
    )
    def test_a_system_cudnn_before_torchs(self, version, status):
        system = Library("/usr/lib/x86_64-linux-gnu/libcudnn.so", version)
        found = check(replace(H200, cudnn=(system, TORCHS)), "cudnn-order")
        assert found.status == status
        if status != OK:
            assert exported(found.remedy) == exported(found.remedy, LD_LIBRARY_PATH="")
            assert exported(found.remedy) == ["/site/nvidia/cudnn", "/site/nvidia/cudnn/lib"]
            assert exported(found.remedy, LD_LIBRARY_PATH="/a:/b")[1].endswith("/lib:/a:/b")
        assert check(replace(H200, cudnn=(TORCHS, system)), "cudnn-order").status == OK

    def test_a_cudnn_that_torch_refuses(self):
        """As seen where the system's 9.14 was found first, and Transformer Engine imported."""
        said = (
            "RuntimeError: cuDNN version incompatibility: PyTorch was compiled against (9, 19, 0)"
        )
        found = check(replace(H200, gpu=Gpu(error=said)), "gpu")
        assert found.status == FAIL and exported(found.remedy)[0] == "/site/nvidia/cudnn"
        found = check(replace(H200, gpu=Gpu(error="no usable GPU")), "gpu")
        assert "install torch" in found.remedy

    def test_no_cudnn_at_all(self):
        assert check(replace(H200, cudnn=()), "cudnn-order").status == FAIL

    def test_nothing_is_asked_of_one_that_is_not_installed(self):
        bare = without(H200, *(name for name in EXTRA if name.startswith("transformer")))
        for name in ("te-parts", "te-cublas", "te-attention-cudnn", "cudnn-order"):
            assert check(bare, name).status == NOT_APPLICABLE


class TestOtherTraps:
    def test_a_driver_without_a_usable_gpu(self):
        broken = replace(H200, gpu=Gpu(error="RuntimeError: cuDNN version incompatibility"))
        found = check(broken, "gpu")
        assert found.status == FAIL and "cuDNN version incompatibility" in found.found

    @pytest.mark.parametrize(
        ("nccl", "status"), [("2.28.9", WARN), ("2.30.3", WARN), ("2.30.4", OK), ("2.31.1", OK)]
    )
    def test_nccl(self, nccl, status):
        facts = replace(H200, gpu=replace(H200.gpu, nccl=nccl))
        assert check(facts, "nccl-ncclep").status == status
        assert check(CPU, "nccl-ncclep").status == NOT_APPLICABLE

    @pytest.mark.parametrize(
        ("numpy", "interpret", "status"),
        [("2.4.9", "1", OK), ("2.5.0", "", WARN), ("2.5.0", "1", FAIL), ("2.10.0", "0", WARN)],
    )
    def test_numpy_against_the_interpreter(self, numpy, interpret, status):
        facts = replace(having(CPU, numpy=numpy), environment={"TRITON_INTERPRET": interpret})
        assert check(facts, "numpy-triton-interpreter").status == status

    @pytest.mark.parametrize(
        ("release", "status"),
        [(None, FAIL), ((12, 8), FAIL), ((12, 9), WARN), ((13, 0), WARN), ((13, 3), OK)],
    )
    def test_ptxas_of_triton(self, release, status):
        assert check(replace(H200, ptxas=release), "triton-ptxas").status == status
        assert check(replace(CPU, ptxas=release), "triton-ptxas").status == NOT_APPLICABLE

    def test_mamba_ssm_without_its_extension(self):
        facts = replace(H200, modules=frozenset())
        assert check(facts, "mamba-ssm-extension").status == WARN
        patched = replace(facts, lane=(lane("mamba-ssm", selective_scan_import="applied"),))
        assert check(patched, "mamba-ssm-extension").status == OK
        assert check(H200, "mamba-ssm-extension").status == OK

    def test_the_patches_it_names_are_in_the_lane(self):
        known = {patch.id: patch.package for patch in manifest.load().patches}
        assert known[TE_DRIVER_PATCH] == "megatron-core"
        assert known[MAMBA_PATCH] == "mamba-ssm"

    @pytest.mark.parametrize(
        ("version", "nvshmem", "status", "says"),
        [
            ("1.2.1+29d31c0", True, OK, "1.2.1"),
            ("1.2.1", None, OK, "1.2.1"),
            ("1.2.1+29d31c0", False, OK, "without NVSHMEM"),
            ("1.0.0", None, FAIL, "PyPI's 1.0.0"),
            ("1.1.0+abc", True, FAIL, "not tag v1.2.1"),
            ("2.1.0", True, FAIL, "EventOverlap"),
        ],
    )
    def test_deep_ep(self, version, nvshmem, status, says):
        facts = replace(having(H200, deep_ep=version), deep_ep_nvshmem=nvshmem)
        found = check(facts, "deep-ep")
        assert found.status == status and says in found.found
        if status == FAIL:
            assert "build tag v1.2.1" in found.remedy and "never from PyPI" in found.remedy

    @pytest.mark.parametrize(
        ("facts", "programs", "status"),
        [(H200, [], FAIL), (H200, ["c++"], FAIL), (H200, ["cc"], WARN), (CPU, [], WARN)],
    )
    def test_compiler(self, facts, programs, status):
        facts = replace(facts, programs={name: f"/usr/bin/{name}" for name in programs})
        assert check(facts, "compiler").status == status

    def test_nvcc_is_asked_for_by_kernels_and_packages(self):
        facts = replace(H200, programs=CPU.programs)
        found = check(facts, "nvcc")
        assert found.status == WARN and "m2rnn" in found.found and "m2rnn=ref" in found.remedy
        assert "mamba-ssm" not in found.found
        assert "mamba-ssm" in check(without(facts, "mamba-ssm"), "nvcc").found

    def test_an_environment_that_cannot_be_read(self):
        facts = replace(CPU, environment={"MEGACPP_BACKENDS": "norm=fast"})
        found = check(facts, "forced-backends")
        assert found.status == FAIL and "unknown backend 'fast'" in found.found
        facts = replace(CPU, environment={"MEGACPP_BACKENDS": "norm=reference"})
        assert check(facts, "forced-backends").status == OK


class TestPatchLane:
    @pytest.mark.parametrize(
        ("row", "status", "says"),
        [
            (lane("p", a="applied", b="applied"), OK, "applied: a, b"),
            (lane("p", a="applied", b="not applied"), WARN, "not applied: b"),
            (lane("p", a="drifted"), FAIL, "drifted: a"),
            (lane("p", a="partially applied"), FAIL, "partially applied: a"),
            (lane("p", interrupted="apply of pid 7 is interrupted"), FAIL, "pid 7"),
            (lane("p", problem="p 2.0 is installed"), WARN, "p 2.0 is installed"),
            (lane("p", a="applied", leftovers=["x.py"]), FAIL, "x.py"),
            (lane("p", installed=None), NOT_APPLICABLE, "not installed"),
        ],
    )
    def test_states(self, row, status, says):
        found = check(replace(CPU, lane=(row,)), "patch-lane p")
        assert found.status == status and says in found.found

    def test_a_lane_that_cannot_be_read(self):
        found = check(replace(CPU, lane=(), lane_error="manifest.toml: no"), "patch-lane")
        assert (found.status, found.found) == (FAIL, "manifest.toml: no")


@pytest.fixture
def no_imports(monkeypatch):
    """Without the seconds that the probe's imports take."""
    monkeypatch.setattr(imports, "probe", lambda: ({}, None))


class TestImports:
    """What is installed and broken, or takes for ever, in the process that the doctor starts."""

    @pytest.fixture
    def shadowed(self, tmp_path, monkeypatch):
        """shadowed(module, text): what the fresh process finds in a module's place."""

        def put(module: str, text: str) -> None:
            path = tmp_path / f"{module}.py"
            path.write_text(text)
            before = os.environ.get("PYTHONPATH", "")
            monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{before}")

        return put

    @pytest.mark.parametrize(
        ("module", "text", "found"),
        [
            ("psutil", "raise ImportError('libpsutil.so')", "ImportError: libpsutil.so"),
            ("pyarrow", "raise OSError('libarrow.so.26: cannot open')", "OSError: libarrow.so.26"),
            ("jsonschema", "import nothing_of_that_name", "ModuleNotFoundError: No module named"),
            ("tomlkit", "raise SystemExit(3)", "SystemExit: 3"),
            ("tqdm", "import os; os._exit(7)", "ended the process with status 7"),
            ("numpy", "import os; os.kill(os.getpid(), 11)", "ended the process with status -11"),
            ("jsonschema", "import time; time.sleep(60)", "did not end within 2 s"),
            ("tqdm", "print('{}', flush=True); raise OSError('after it printed')", "after it pr"),
            ("psutil", "", "nothing is in "),
            ("jsonschema", "__file__, __path__ = None, ['/site/jsonschema']", "only a folder with"),
        ],
    )
    def test_a_broken_module_is_named_and_the_others_are_judged(
        self, shadowed, module, text, found
    ):
        shadowed(module, text)
        quick = ("psutil", "tomlkit", "tqdm", "jsonschema", "numpy", "pyarrow.parquet")
        probes = [probe for probe in stack.PROBES if probe.module in quick]
        limit = 2.0 if "sleep" in text else 30.0
        results, _ = imports.probe(probes, limit)
        assert set(results) == set(quick)
        broken = {name: error for name, error in results.items() if name.startswith(module)}
        (error,) = broken.values()
        assert found in error
        if module != "numpy":  # which others import
            assert not any(error for name, error in results.items() if name not in broken)
        checks = doctor.examine(replace(CPU, imports=results))
        (failed,) = [c for c in checks if c.name == f"import {next(iter(broken))}"]
        assert failed.status == FAIL and "install --force-reinstall" in failed.remedy

    def test_a_process_that_hangs_in_an_import_ends_with_the_doctor(self, shadowed, tmp_path):
        begun = tmp_path / "begun"
        shadowed("jsonschema", f"import time; open({str(begun)!r}, 'w'); time.sleep(1000)")
        marked = Marked()
        program = (
            "from megacpp_mcore.stack import PROBES, imports\n"
            "imports.probe([probe for probe in PROBES if probe.module == 'jsonschema'])\n"
        )
        child = subprocess.Popen([sys.executable, "-c", program],
                                 env=os.environ | marked.environment)  # fmt: skip
        wait_until(begun.exists)
        child.kill()
        child.wait()
        assert not marked.left()

    @pytest.mark.slow
    def test_torch_and_megatrons_helper_are_judged(self, shadowed):
        shadowed("torch", "raise OSError('libcudart.so.13: cannot open shared object file')")
        asked = ("psutil", "torch", "megatron.core.datasets.helpers_cpp")
        results, _ = imports.probe([p for p in stack.PROBES if p.module in asked])
        assert results["torch"].startswith("OSError: libcudart.so.13")
        assert results["megatron.core.datasets.helpers_cpp"] and not results["psutil"]

    @pytest.mark.slow
    def test_an_unloadable_transformer_engine(self, shadowed, tmp_path, monkeypatch):
        """As on a machine with a driver and the package."""
        shadowed("unused", "")  # which puts the folder on the path
        (tmp_path / "transformer_engine").mkdir()
        (tmp_path / "transformer_engine" / "__init__.py").write_text(
            "raise OSError('undefined symbol: cublasLtGroupedMatrixLayoutInit_internal')"
        )
        folder = tmp_path / "transformer_engine-2.17.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Name: transformer-engine\nVersion: 2.17.1\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(imports, "has_driver", lambda: True)
        of_te = [probe for probe in stack.PROBES if probe.cuda]
        results, _ = imports.probe(of_te)
        error = results["transformer_engine.pytorch"]
        assert "cublasLtGroupedMatrixLayoutInit_internal" in error

    def test_the_doctor_itself_needs_no_package(self, tmp_path):
        script = (
            "import sys\n"
            "names = ('torch', 'numpy', 'psutil', 'pyarrow', 'jsonschema', 'tomlkit', 'tqdm',\n"
            "         'unidiff', 'packaging', 'megatron', 'triton', 'yaml')\n"
            "sys.modules.update(dict.fromkeys(names))\n"
            "from megacpp_mcore.stack import imports\n"
            "imports.probe = lambda: ({'torch': 'ImportError: broken'}, None)\n"
            "from megacpp_mcore.cli import main\n"
            "sys.exit(main(['doctor']))\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr == ""
        assert "fail  import torch" in done.stdout


@pytest.mark.usefixtures("no_imports")
class TestFacts:
    def test_cudnn_in_the_order_that_transformer_engine_looks(self, tmp_path):
        def put(name):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            return str(path)

        stub = put("home/lib/stubs/libcudnn.so.9.30.0")
        old = put("home/lib/libcudnn.so.9.14.0")
        put("home/lib/libcudnn_ops.so.9.14.0")
        (tmp_path / "home/lib/libcudnn.so.9").symlink_to(old)
        loader = put("ld/libcudnn.so")
        own = put("site/nvidia/cudnn/lib/libcudnn.so.9")
        environment = {
            "CUDNN_PATH": str(tmp_path / "home"),
            "LD_LIBRARY_PATH": f"{tmp_path / 'none'}::{tmp_path / 'ld'}",
        }
        of_torch = tmp_path / "site/nvidia/cudnn"
        found = list(stack_facts.cudnn_in_order(environment, of_torch))
        here = [library for library in found if library.path.startswith(str(tmp_path))]
        assert [library.path for library in here] == [old, loader, own]
        assert stub not in [library.path for library in found]
        assert (here[0].version, here[1].version, here[2].of_torch) == ("9.14.0", None, True)

        link = tmp_path / "link"
        link.symlink_to(of_torch)
        first = next(stack_facts.cudnn_in_order({"CUDNN_HOME": str(link)}, of_torch))
        assert first.of_torch

    def test_a_gpu_that_torch_cannot_use(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert "finds no usable GPU" in imports.gpu().error

    def test_a_cuda_stack_that_raises(self, monkeypatch):
        def incompatible():
            raise RuntimeError("cuDNN version incompatibility")

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        monkeypatch.setattr(torch.backends.cudnn, "version", incompatible)
        assert imports.gpu().error == "RuntimeError: cuDNN version incompatibility"

    def test_deep_ep_built_without_nvshmem(self, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "deep_ep_cpp.py").write_text("# NVSHMEM is disabled during compilation")
        assert stack_facts.gather().deep_ep_nvshmem is False
        (tmp_path / "deep_ep_cpp.py").write_text("# nvshmem_init")
        assert stack_facts.gather().deep_ep_nvshmem is True

    def test_compilers_named_by_the_environment(self, monkeypatch):
        monkeypatch.setenv("CC", f"{sys.executable} -O2")
        monkeypatch.setenv("CXX", "/no/such/compiler")
        programs = stack_facts.gather().programs
        assert programs["cc"] == sys.executable and "c++" not in programs

    def test_this_machine(self):
        facts = stack_facts.gather()
        assert facts.python == sys.version_info[:3]
        assert facts.version("torch").split("+")[0] == torch.__version__.split("+")[0]
        assert facts.version("no-such-package") is None
        assert {row["package"] for row in facts.lane} == set(manifest.load().packages)


class TestCommand:
    @pytest.mark.parametrize(
        ("facts", "status"), [(CPU, 0), (H200, 0), (replace(CPU, python=(3, 11, 0)), 1)]
    )
    def test_exit_status_and_json(self, facts, status, capsys, monkeypatch):
        monkeypatch.setattr(stack_facts, "gather", lambda: facts)
        assert cli.main(["doctor", "--json"]) == status
        rows = json.loads(capsys.readouterr().out)
        assert all(row.keys() == {"name", "status", "found", "remedy"} for row in rows)
        assert {row["status"] for row in rows} <= {OK, WARN, FAIL, NOT_APPLICABLE}

    def test_text_has_the_remedy_of_what_is_wrong(self, capsys, monkeypatch):
        monkeypatch.setattr(stack_facts, "gather", lambda: without(CPU, "numpy"))
        assert cli.main(["doctor"]) == 1
        out = capsys.readouterr().out
        assert "fail  numpy" in out and "do: pip install numpy==2.2.6" in out
        assert out.splitlines()[-1].endswith("not applicable") and "1 fail" in out
