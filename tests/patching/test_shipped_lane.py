"""The shipped lane on copies of the real packages: every patch proved, a model on top of all."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import warm
from warm_server import BARE

from megacpp_mcore.patching import manifest, operations, verify

LANE = manifest.load()
BY_THEMSELVES = ["te-import-without-driver"]  # its defect is in the import of Megatron
# `make env` installs mamba-ssm's sources there: its package cannot be imported without CUDA.
PATCH_TARGETS = Path(sys.prefix) / "patch-targets"


def copy(package: str, source: Path, site: Path) -> None:
    for entry in metadata.Distribution.at(source).files:
        if "__pycache__" not in entry.parts and not str(entry).startswith(".."):
            target = site / entry
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source.parent / entry, target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site folder with the pristine wheels' files of every package of the lane."""
    folder = tmp_path_factory.mktemp("site")
    for package in LANE.packages:
        infos = [
            info
            for where in (Path(sysconfig.get_path("purelib")), PATCH_TARGETS)
            for info in where.glob(f"{package.replace('-', '_')}-*.dist-info")
        ]
        assert infos, f"{package} is not there: make the environment with `make env`"
        copy(package, infos[0], folder)
    return folder


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    """A Python with torch in it, and Megatron from its PYTHONPATH but where BARE is set."""
    changes = {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}  # as `hide_gpu` sets them
    server = warm.Server("torch_preload", "reproducers_preload", **changes)
    yield server.command
    server.close()


@pytest.fixture(scope="module")
def proofs(site: Path, python: str) -> dict[str, verify.Proof]:
    """Of every patch; each reproducer runs in a process forked from one that has imported its tree,
    but for those of BY_THEMSELVES."""
    rest = [patch.id for patch in LANE.patches if patch.id not in BY_THEMSELVES]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "executable", python)
        found = list(verify.verify(LANE, site, only=rest))
        patched.setenv(BARE, "1")
        found += verify.verify(LANE, site, only=BY_THEMSELVES)
    return {proof.patch: proof for proof in found}


@pytest.mark.slow
@pytest.mark.parametrize("patch", [patch.id for patch in LANE.patches])
def test_the_defect_shows_without_the_lane_and_not_with_it(patch, proofs):
    proof = proofs[patch]
    assert proof.verdict == verify.PROVED, f"{proof.reason}\n{proof.pristine}\n{proof.patched}"


def test_a_reproducer_that_meets_other_internals_is_inapplicable():
    """An exception is no defect: it says what it met and where."""
    text = "from _common import run\ndef main():\n    import json\n    json.no_such()\nrun(main)"
    folder = LANE.lane / manifest.REPRODUCERS
    done = subprocess.run([sys.executable, "-c", text], cwd=folder, capture_output=True, text=True)
    assert done.returncode == verify.INAPPLICABLE
    said = "AttributeError in <string>, main: module 'json' has no attribute 'no_such'"
    assert done.stdout.splitlines() == [said]


@pytest.mark.slow
def test_with_the_lane_applied_the_plugin_drops_its_bridge_and_trains(
    site, python, small_recipe, tmp_path
):
    patched = tmp_path / "site"
    shutil.copytree(site, patched)
    shutil.rmtree(patched / "mamba_ssm")  # its import wants CUDA; on a CPU it is not installed
    for info in patched.glob("mamba_ssm-*"):
        shutil.rmtree(info)
    operations.apply(LANE, patched)
    script = (
        "from megacpp_mcore import patching; from megacpp_mcore.stack import bridges\n"
        "bridges.before_megatron()\n"
        "assert 'final-norm-from-spec' in patching.applied('megatron-core')\n"
        "from megacpp_mcore.specs.nam56r import nam56r_stack_spec as spec\n"
        "assert spec.params == {}, spec.params\n"
        "assert spec.submodules.final_norm.__name__ == 'DispatchedNorm'\n"
        "import sys; from megacpp_mcore.cli import main\n"
        f"sys.exit(main(['train', {str(small_recipe)!r}, '--steps', '2', '--out', "
        f"{str(tmp_path / 'run')!r}]))\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEGACPP_")}
    done = subprocess.run(
        [python, "-c", script], env=environment | {"PYTHONPATH": str(patched), BARE: "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "training loss" in done.stdout
