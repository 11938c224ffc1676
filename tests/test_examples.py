"""Every file in examples/ is run, as far as a machine without a GPU goes."""

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from left_behind import wait_until

from megacpp_mcore import receipts
from megacpp_mcore.bench import load_for_bench
from megacpp_mcore.bench.layer import layer_overrides
from megacpp_mcore.hybrid.flops import count
from megacpp_mcore.recipe import Recipe, load_recipe
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.surfaces.registry import REGISTRY

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".sh", ".sbatch"))

# `megacpp train` and Slurm's commands write down their words instead of starting anything.
TRAIN = """#!/bin/sh
if [ "$1" = train ] || [ "$1" = doctor ] || [ "$1" = report ]; then
  printf '%s\\n' "$@" -- >> "$CALLS"
  exit 0
fi
exec {python} -m megacpp_mcore.cli "$@"
"""
NOTE = """#!/bin/sh
printf '%s\\n' {name} "$@" -- >> "$CALLS"
"""


@pytest.fixture
def run(tmp_path: Path, corpus: Path):
    """run(script, *words): the commands that the script would have started, as lists of words."""
    tools, calls = tmp_path / "bin", tmp_path / "calls"
    tools.mkdir()
    files = {"megacpp": TRAIN.format(python=sys.executable), "srun": NOTE.format(name="srun"),
             "scontrol": "#!/bin/sh\necho first\nsleep 0.3\necho second\n"}  # fmt: skip
    for name, text in files.items():
        path = tools / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def call(script: str, *words: str, **environment: str) -> list[list[str]]:
        path = f"{tools}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", str(EXAMPLES / script), *words], capture_output=True, text=True,
            env=os.environ | {"PATH": path, "CALLS": str(calls)} | environment, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        ended = calls.read_text().split("\n--\n")
        return [one.split("\n") for one in ended if one]

    return call


def trained(words: list[str]) -> Recipe:
    """The recipe that `megacpp train ...` would load."""
    overrides = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    gpus = words[words.index("--gpus") + 1]
    return load_recipe(words[1], [*overrides, f"launch.nproc_per_node={gpus}"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_say_how_they_are_called(script):
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    assert re.search(rf"examples/{script.name} [A-Z]", script.read_text())


def test_one_node(run, corpus):
    [_, words] = run("one_node.sh", "4", str(corpus), "out")
    recipe = trained(words)
    assert "--resume" in words and words[words.index("--out") + 1] == "out"
    assert recipe.parallel.expert_model_parallel_size == 1 and recipe.data_parallel_size == 4
    assert recipe.checkpoint.load == recipe.checkpoint.save == "out/checkpoints"
    assert lower(recipe).argv


def test_slurm(run, corpus, tmp_path):
    [words] = run("slurm.sbatch", str(corpus), "/shared/out", SLURM_JOB_NUM_NODES="2",
                  SLURM_JOB_NODELIST="n[1-2]", SLURM_JOB_ID="7")  # fmt: skip
    task = words.index("env")
    assert words[:task] == [
        "srun", "--kill-on-bad-exit=1", "--nodes", "2", "--ntasks-per-node", "8",
    ]  # fmt: skip
    # What the second task of the second machine runs, in this shell
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\nenv; printf '%s\\n' -- \"$@\"\n")
    python.chmod(0o755)
    slurm = {"SLURM_PROCID": "9", "SLURM_LOCALID": "1"}
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        words[task:], env=os.environ | slurm | {"PATH": path}, capture_output=True, text=True
    )
    environment, _, arguments = done.stdout.partition("--\n")
    named = dict(line.split("=", 1) for line in environment.splitlines() if "=" in line)
    assert {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8",
            "MASTER_ADDR": "first", "MASTER_PORT": "29500"}.items() <= named.items()  # fmt: skip
    module, name, out, folder, *own = arguments.splitlines()
    assert (module, name) == ("-m", "megacpp_mcore.pretrain")
    assert (out, folder) == ("--megacpp-out", "/shared/out")
    recipe = load_recipe(
        own[own.index("--megacpp-recipe") + 1],
        [own[at + 1] for at, word in enumerate(own) if word == "--megacpp-set"],
    )
    assert recipe.world_size == 16 and recipe.schedule.global_batch_size == 128
    assert own[-len(lower(recipe).argv) :] == lower(recipe).argv


def test_slurm_queues_the_job_again_when_its_time_is_over(tmp_path, corpus):
    """SIGTERM goes on to srun, whose ranks save; then the job is queued again."""
    tools, calls = tmp_path / "bin", tmp_path / "calls"
    tools.mkdir()
    srun = """#!/bin/sh
trap 'echo saved >> "$CALLS"; exit 1' TERM
echo started >> "$CALLS"
while :; do sleep 0.05; done
"""
    scontrol = """#!/bin/sh
[ "$1" = requeue ] && echo "$@" >> "$CALLS" || echo first
"""
    megacpp = f'#!/bin/sh\nexec {sys.executable} -m megacpp_mcore.cli "$@"\n'
    for name, text in (("srun", srun), ("scontrol", scontrol), ("megacpp", megacpp)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    script = subprocess.Popen(
        ["bash", str(EXAMPLES / "slurm.sbatch"), str(corpus), "/shared/out"], cwd=tmp_path,
        env=os.environ | {
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "CALLS": str(calls),
            "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7",
        },
    )  # fmt: skip
    wait_until(calls.exists, 60)
    script.terminate()
    assert script.wait(timeout=30) == 1
    assert calls.read_text().splitlines() == ["started", "saved", "requeue 7"]


@pytest.mark.slow
def test_bring_your_data(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(40):
        (source / f"{number}.cpp").write_text(f"int f{number}(int x) {{ return x; }}\n" * 40)
    environment = os.environ | {
        "PATH": f"{warm.folder_of_megacpp()}{os.pathsep}{os.environ['PATH']}"
    }
    subprocess.run(
        ["bash", str(EXAMPLES / "bring_your_data.sh"), str(source), "*.cpp", "out", "1"],
        cwd=tmp_path, env=environment, check=True, capture_output=True,
    )  # fmt: skip
    receipt = receipts.read(tmp_path / "out" / "train" / "receipt.json")
    assert receipt["result"]["status"] == "complete" and receipt["result"]["steps"] == 1


def test_full_size_is_the_same_run_twice(run, tmp_path):
    shutil.copy(EXAMPLES / "nam56r-1gpu.toml", tmp_path)
    ours, yardstick, compared = run("full_size.sh", "1", "data/cpp", "out")
    both = [word for word in yardstick if word != "--yardstick"]
    assert both[:-1] == ours[:-1]
    assert compared[:2] == ["report", "compare"]
    recipe = trained(ours)
    assert recipe.plan.depth == 52 and recipe.model.vocab_size == 65_536
    # What the recipe's comment says of its memory.
    assert count(recipe).parameters * 18 / 2**30 == pytest.approx(85.3, abs=0.05)


def test_full_size_on_four(run):
    recipe = trained(run("full_size.sh", "4", "data/cpp", "out", "30")[0])
    assert recipe.parallel.expert_model_parallel_size == 1
    assert recipe.schedule.global_batch_size == 16 and recipe.schedule.train_iters == 30


@pytest.mark.slow
def test_a_block_of_your_own_learns(tmp_path):
    done = subprocess.run(
        [warm.python(), str(EXAMPLES / "own_block.py"), "--steps", "12"],
        capture_output=True, text=True, cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k not in ("MEGACPP_RECIPE", "RANK")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] - 0.5
    assert "X is decoder.layers.3.self_attention" in done.stdout
    assert "X -> G  own_block.GatedMemory" in done.stdout
    # Two projections of 64 x 128 and 64 x 64, twice the operations; the memory 3, decay and norm.
    assert f"X: {2 * 3 * 64**2 + 3 * 64:,} operations a token" in done.stdout
    assert f"{3 * 64**2 + 2 * 64:,} parameters" in done.stdout
    found = re.search(r"([\d,]+) parameters built, ([\d,]+) counted", done.stdout).groups()
    built, counted = (int(number.replace(",", "")) for number in found)
    assert 0 <= built - counted < 16 * 64  # rows of padding behind M's in_proj


@pytest.mark.parametrize(
    ("gpus", "first"), [("1", "run-nam56r-1xh200-graph"), ("2", "run-nam56r-2xh200-dp2-graph")]
)
def test_rerun_receipts_fits_its_minutes_and_names_what_it_leaves_out(gpus, first, tmp_path):
    done = subprocess.run(
        ["bash", str(EXAMPLES / "rerun_receipts.sh"), gpus, "prefix", "5"], cwd=tmp_path,
        capture_output=True, text=True, env=os.environ | {"DRY": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(int(line.split()[0]) for line in lines) <= 5 * 60
    assert first in lines[0] and "left out, no time: " in done.stderr


@pytest.mark.parametrize("gpus", ["1", "2", "4"])
def test_rerun_receipts_measures_what_is_committed_with_recipes_that_load(gpus, tmp_path):
    done = subprocess.run(
        ["bash", str(EXAMPLES / "rerun_receipts.sh"), gpus, "prefix", "999"], cwd=tmp_path,
        capture_output=True, text=True, env=os.environ | {"DRY": "1"}, check=True,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        words = shlex.split(line.partition(" s ")[2])
        at = words.index("megacpp", words[0] == "bash" and 3)
        overrides = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        if words[at + 1] == "train":
            load_recipe(words[at + 2], [*overrides, f"launch.nproc_per_node={gpus}"])
        else:
            names = {
                s for s, _, _ in (w.partition("=") for w in words if "=" in w and "." not in w)
            }
            assert words[at + 2] in (*REGISTRY, "layer", "model") and names <= {*REGISTRY}
            recipe = words[words.index("--recipe") + 1] if "--recipe" in words else "nam56r"
            own = layer_overrides(words[at + 3]) if words[at + 2] == "layer" else []
            load_for_bench(recipe, [*own, *overrides])
