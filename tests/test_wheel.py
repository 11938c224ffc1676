"""The wheel as a user has it: built, installed elsewhere, its command run outside the checkout."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the built wheel was installed into."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    ignored = shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(CHECKOUT, source, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", str(source), "--no-deps", "--no-build-isolation", "-w", str(work)],
        check=True, capture_output=True,
    )  # fmt: skip
    wheels = list(work.glob("megacpp_mcore-*-py3-none-any.whl"))
    assert len(wheels) == 1
    site = work / "site"
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheels[0])],
        check=True, capture_output=True,
    )  # fmt: skip
    return site


def megacpp(site: Path, cwd: Path, *arguments: str) -> str:
    return python(site, cwd, "-m", "megacpp_mcore.cli", *arguments)


def python(site: Path, cwd: Path, *arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEGACPP_")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd, env=environment | {"PYTHONPATH": str(site)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_every_package_and_its_data(installed):
    found = {str(p.relative_to(installed)) for p in installed.rglob("*") if p.is_file()}
    modules = {str(p.relative_to(CHECKOUT)) for p in (CHECKOUT / "megacpp_mcore").rglob("*.py")}
    assert modules <= found
    for folder, pattern in (("specs", "*.py"), ("recipes", "*.toml"), ("patches", "*.patch")):
        shipped = {p.name for p in (CHECKOUT / folder).glob(pattern)}
        assert {f"megacpp_mcore/{folder}/{name}" for name in shipped} <= found
    assert "megacpp_mcore/receipts/receipt.schema.json" in found
    assert {f"megacpp_mcore/planner/{n}.json" for n in ("h200", "assumptions")} <= found
    assert not any(name.split("/")[0] in ("specs", "recipes", "patches", "tests") for name in found)
    metadata = next(installed.glob("megacpp_mcore-*.dist-info/METADATA")).read_text()
    assert "License-Expression: Apache-2.0" in metadata


def test_the_wheel_runs_outside_the_checkout(installed, tmp_path):
    where = subprocess.run(
        [sys.executable, "-c", "import megacpp_mcore; print(megacpp_mcore.__file__)"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(installed)}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert where.stdout.startswith(str(installed))
    plan = json.loads(megacpp(installed, tmp_path, "translate", "AEMEAEMEAEMR", "--depth", "52",
                              "--json"))  # fmt: skip
    assert plan["counts"]["source"] == {"A": 13, "E": 22, "M": 13, "R": 4, "D": 0}
    argv = megacpp(installed, tmp_path, "recipe", "args", "nam56r", "--format", "lines").split()
    assert argv[argv.index("--spec") + 1] == "megacpp_mcore.specs.nam56r"
    assert "mla-rope-head-mask" in megacpp(installed, tmp_path, "patch", "list")


def test_a_receipt_tells_the_code_of_the_wheel_and_of_another(installed, tmp_path):
    def code(site: Path) -> dict:
        script = (
            "import json; from megacpp_mcore.receipts import lane; print(json.dumps(lane.code()))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True,
            env=os.environ | {"PYTHONPATH": str(site)}, check=True,
        )  # fmt: skip
        return json.loads(done.stdout)

    wheel, here = code(installed), code(CHECKOUT)
    assert wheel["commit"] is None and wheel["sha256"] == here["sha256"]
    other = tmp_path / "other"
    shutil.copytree(installed / "megacpp_mcore", other / "megacpp_mcore")
    (other / "megacpp_mcore" / "recipes" / "another.toml").write_text("")
    assert code(other)["sha256"] == wheel["sha256"]
    kernel = other / "megacpp_mcore" / "kernels" / "m2rnn" / "csrc" / "common.cuh"
    kernel.write_text(kernel.read_text() + "\n")
    assert code(other)["sha256"] != wheel["sha256"]


def test_a_recipe_trains_from_the_wheel(installed, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.h").write_text("int main() { return 0; }\n" * 400)
    (text / "b.h").write_text("struct point { double x, y; };\n" * 400)
    build = ["data", "build", "text", "--out", "corpus"]
    train = [
        "train", "nam56r-tiny", "--steps", "2", "--out", "run",
        "--set", 'data.data_path=["corpus"]', "--set", "data.split=50,50,0",
        "--set", "schedule.global_batch_size=2", "--set", "schedule.micro_batch_size=2",
    ]  # fmt: skip
    both = (
        f"from megacpp_mcore.cli import main; import sys; sys.exit(main({build}) or main({train}))"
    )
    assert "final training loss" in python(installed, tmp_path, "-c", both)
    assert {"receipt.json", "curves.png", "checkpoints"} <= {
        p.name for p in Path(tmp_path, "run").iterdir()
    }
