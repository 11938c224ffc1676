"""The wheel as a user has it: built, installed elsewhere, its command run outside the checkout."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import plain_install
import pytest

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Plain:
    """An environment with the wheel and what it requires: its Python and its site-packages."""

    python: Path
    site: Path

    def run(self, cwd: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
        dropped = ("MEGACPP_", "PYTHON")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        return subprocess.run(
            [str(self.python), *words], cwd=cwd, env=inherited | environment,
            capture_output=True, text=True,
        )  # fmt: skip

    def megacpp(self, cwd: Path, *arguments: str) -> str:
        done = self.run(cwd, "-m", "megacpp_mcore.cli", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    ignored = shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(CHECKOUT, source, ignore=ignored)
    subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "wheel",
         str(source), "--no-deps", "--no-build-isolation", "-w", str(work)],
        check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = work.glob("megacpp_mcore-*-py3-none-any.whl")
    return Plain(*plain_install.install(wheel, work / "environment"))


def test_the_wheel_holds_every_package_and_its_data(plain):
    ours = plain.site.glob("megacpp_mcore*")
    files = {p for folder in ours for p in folder.rglob("*") if p.is_file()}
    found = {str(p.relative_to(plain.site)) for p in files}
    modules = {str(p.relative_to(CHECKOUT)) for p in (CHECKOUT / "megacpp_mcore").rglob("*.py")}
    assert modules <= found
    for folder, pattern in (("specs", "*.py"), ("recipes", "*.toml"), ("patches", "*.patch")):
        shipped = {p.name for p in (CHECKOUT / folder).glob(pattern)}
        assert {f"megacpp_mcore/{folder}/{name}" for name in shipped} <= found
    assert "megacpp_mcore/receipts/receipt.schema.json" in found
    assert {f"megacpp_mcore/planner/{n}.json" for n in ("h200", "assumptions")} <= found
    assert not any((plain.site / n).exists() for n in ("specs", "recipes", "patches", "tests"))
    metadata = next(plain.site.glob("megacpp_mcore-*.dist-info/METADATA")).read_text()
    assert "License-Expression: Apache-2.0" in metadata


def test_the_wheel_runs_outside_the_checkout(plain, tmp_path):
    where = plain.run(tmp_path, "-c", "import megacpp_mcore; print(megacpp_mcore.__file__)")
    assert where.stdout.startswith(str(plain.site))
    absent = plain.run(tmp_path, "-c", "import pytest")  # of the extra [dev]: nothing of it is here
    assert "No module named 'pytest'" in absent.stderr
    plan = json.loads(plain.megacpp(tmp_path, "translate", "AEMEAEMEAEMR", "--depth", "52",
                                    "--json"))  # fmt: skip
    assert plan["counts"]["source"] == {"A": 13, "E": 22, "M": 13, "R": 4, "D": 0}
    argv = plain.megacpp(tmp_path, "recipe", "args", "nam56r", "--format", "lines").split()
    assert argv[argv.index("--spec") + 1] == "megacpp_mcore.specs.nam56r"
    assert "mla-rope-head-mask" in plain.megacpp(tmp_path, "patch", "list")


def test_a_receipt_tells_the_code_of_the_wheel_and_of_another(plain, tmp_path):
    def code(site: Path) -> dict:
        script = (
            "import json; from megacpp_mcore.receipts import lane; print(json.dumps(lane.code()))"
        )
        done = plain.run(tmp_path, "-c", script, PYTHONPATH=str(site))
        return json.loads(done.stdout)

    wheel, here = code(plain.site), code(CHECKOUT)
    assert wheel["commit"] is None and wheel["sha256"] == here["sha256"]
    other = tmp_path / "other"
    shutil.copytree(plain.site / "megacpp_mcore", other / "megacpp_mcore")
    (other / "megacpp_mcore" / "recipes" / "another.toml").write_text("")
    assert code(other)["sha256"] == wheel["sha256"]
    kernel = other / "megacpp_mcore" / "kernels" / "m2rnn" / "csrc" / "common.cuh"
    kernel.write_text(kernel.read_text() + "\n")
    assert code(other)["sha256"] != wheel["sha256"]


def test_a_plain_install_trains_saves_and_resumes(plain, small_settings, tmp_path):
    """In an empty environment: what a save imports is a dependency, not an extra."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.h").write_text("int main() { return 0; }\n" * 400)
    (text / "b.h").write_text("struct point { double x, y; };\n" * 400)
    (tmp_path / "small.toml").write_text(small_settings)
    build = ["data", "build", "text", "--out", "corpus"]
    train = ["train", "small.toml", "--out", "run", "--set", 'data.data_path=["corpus"]',
             "--set", "data.split=50,50,0"]  # fmt: skip
    commands = [build, [*train, "--steps", "2"], [*train, "--steps", "3", "--resume"]]
    # One process for all: two more would import torch and Megatron again.
    script = f"""
from megacpp_mcore.cli import main
for words in {commands}:
    assert main(words) == 0, words
    print("done", words[0], flush=True)
"""
    done = plain.run(tmp_path, "-c", script)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split("done train")[:2]
    assert "training loss" in first and "training loss" in second
    receipt = json.loads(Path(tmp_path, "run", "receipt.json").read_text())
    assert receipt["series"]["step"] == [1, 2, 3]
    assert "resumed from the checkpoint of step 2" in receipt["notes"]
    assert Path(tmp_path, "run", "report.html").exists()
