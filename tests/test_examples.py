"""Every file in examples/ is run, as far as a machine without a GPU goes."""

import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import receipt_samples as samples
import warm
from left_behind import wait_until

from megacpp_mcore import receipts
from megacpp_mcore.bench import load_for_bench
from megacpp_mcore.bench.layer import layer_overrides
from megacpp_mcore.cli import build_parser
from megacpp_mcore.commands import train
from megacpp_mcore.dispatch import forced_backends
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


# Slurm's commands for one task. Its srun answers SIGTERM as the real one does: it kills the tasks.
SLURM = {
    "srun": """#!/bin/bash
sleep 1000 & nap=$!
( trap 'kill $nap; echo 20 > "$TRACKER"; echo saved >> "$CALLS"; exit 0' TERM
  echo "$BASHPID" > "$CALLS.task"; echo started >> "$CALLS"
  while kill -0 $nap; do sleep 0.02; done 2> /dev/null; exit "$STATUS" ) & task=$!
trap 'kill -KILL $task; kill $nap; echo killed >> "$CALLS"; exit 137' TERM
[ -z "$STATUS" ] || kill $nap
wait $task
""",
    "scancel": '#!/bin/sh\necho "$@" >> "$CALLS"; kill -TERM "$(cat "$CALLS.task")"\n',
    "squeue": "#!/bin/sh\necho $STATE\n",
    "scontrol": '#!/bin/sh\n[ "$1" = requeue ] && echo "$@" >> "$CALLS" || echo first\n',
    "megacpp": '#!/bin/sh\n[ -z "$LATER" ] || sleep 0.3; echo --word\n',
}


@pytest.fixture
def slurm_job(tmp_path):
    """job(**environment): the script in it, its calls, and the file that names its checkpoint."""
    tools, calls, jobs = tmp_path / "bin", tmp_path / "calls", []
    tools.mkdir()
    for name, text in SLURM.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    tracker = tmp_path / "out" / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir(parents=True)
    tracker.write_text("10")

    def job(**environment):
        jobs.append(subprocess.Popen(
            ["bash", str(EXAMPLES / "slurm.sbatch"), "corpus", str(tmp_path / "out")], cwd=tmp_path,
            env=os.environ | {
                "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "CALLS": str(calls),
                "TRACKER": str(tracker), "STATE": "RUNNING", "SLURM_JOB_NUM_NODES": "2",
                "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7", **environment,
            },
        ))  # fmt: skip
        return jobs[-1], calls, tracker

    yield job
    for each in jobs:
        each.kill()


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_slurm_queues_the_job_again_when_its_time_is_over(slurm_job, state):
    """SIGTERM goes to the tasks, which save; srun, which would kill them, is not told. Nor is a job
    queued again that somebody cancels."""
    script, calls, tracker = slurm_job(STATE=state)
    wait_until(lambda: calls.exists() and "started" in calls.read_text(), 60)
    script.terminate()
    script.wait(timeout=30)
    again = ["requeue 7"] if state == "RUNNING" else []
    assert calls.read_text().splitlines() == ["started", "--signal=TERM 7", "saved", *again]
    assert tracker.read_text().strip() == "20"


def test_slurm_queues_a_job_again_that_is_told_to_stop_before_its_tasks_run(slurm_job):
    script, calls, _ = slurm_job(LATER="1")
    wait_until(lambda: "TERM" in caught_by(script.pid), 60)
    script.terminate()
    assert script.wait(timeout=30) == 143
    assert calls.read_text().splitlines() == ["requeue 7"]


def caught_by(pid: int) -> set[str]:
    """The names of the signals that a process handles."""
    [line] = [
        each for each in Path(f"/proc/{pid}/status").read_text().splitlines()
        if each.startswith("SigCgt")
    ]  # fmt: skip
    mask = int(line.split()[1], 16)
    return {number.name.removeprefix("SIG") for number in signal.Signals if mask >> number - 1 & 1}


@pytest.mark.parametrize(("status", "saves", "again"), [
    (75, True, True), (137, True, True), (75, False, False), (1, True, False), (0, True, False),
])  # fmt: skip
def test_slurm_queues_a_job_again_that_hung_or_was_killed_and_had_saved(
    slurm_job, tmp_path, status, saves, again
):
    if saves:
        srun = tmp_path / "bin" / "srun"
        srun.write_text(srun.read_text().replace("wait $task", 'echo 20 > "$TRACKER"; wait $task'))
    script, calls, _ = slurm_job(STATUS=str(status))
    assert script.wait(timeout=30) == status
    assert calls.read_text().splitlines() == ["started"] + ["requeue 7"] * again


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
    assert built == counted  # which are printed apart


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


@pytest.mark.parametrize(
    ("gpus", "card"), [("1", "h200"), ("2", "h200"), ("4", "h200"), ("4", "h100")]
)
def test_rerun_receipts_measures_what_is_committed_with_recipes_that_load(gpus, card, tmp_path):
    done = subprocess.run(
        ["bash", str(EXAMPLES / "rerun_receipts.sh"), gpus, "prefix", "999"], cwd=tmp_path,
        capture_output=True, text=True, env=os.environ | {"DRY": "1", "CARD": card}, check=True,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        words = shlex.split(line.partition(" s ")[2])
        at = words.index("megacpp", 3 if words[0] == "bash" else 0)
        arguments = build_parser([words[at + 1]]).parse_args(words[at + 1 :])
        forced_backends(
            " ".join(w for w in words if w.startswith("MEGACPP_BACKENDS=")).partition("=")[2]
        )
        overrides = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        if words[at + 1] == "train":
            train._check_options(arguments, resumes=False)
            load_recipe(words[at + 2], [*overrides, f"launch.nproc_per_node={gpus}"])
        else:
            names = {
                s for s, _, _ in (w.partition("=") for w in words if "=" in w and "." not in w)
            }
            assert words[at + 2] in (*REGISTRY, "layer", "model") and names <= {*REGISTRY}
            assert "upstream" not in words or (words[at + 2] == "layer" and words[at + 3] in "EMR")
            recipe = words[words.index("--recipe") + 1] if "--recipe" in words else "nam56r"
            own = layer_overrides(words[at + 3]) if words[at + 2] == "layer" else []
            load_for_bench(recipe, [*own, *overrides])


FAKE_RUN = """#!/usr/bin/env {python}
import os, shutil, sys
from megacpp_mcore import cli
words = sys.argv[1:]
if words[0] == "report":
    sys.exit(cli.main(words))
is_run = words[0] == "train"
to = words[words.index("--out" if is_run else "--receipt") + 1] + "/receipt.json" * is_run
if "layer-moe-64k-128" in to:
    sys.exit("torch.OutOfMemoryError: CUDA out of memory")
if "mla" in to:
    sys.exit("torch.OutOfMemoryError: where nobody expects it")
os.makedirs(os.path.dirname(to), exist_ok=True)
shutil.copy({sample!r}, to)
if "m2rnn" in to:
    sys.exit("megacpp: layer: upstream: d x is 2 from m2rnn_core=reference, allowed 1")
"""
FAKE_PYTHON = r"""#!/bin/sh
case "$*" in
*is_traceable*|*megacpp_mcore.pages\ *) exit 0 ;;
*get_device_name*) echo h200; exit 0 ;;
*import\ xma*) exit 0 ;;
esac
exec {python} "$@"
"""


@pytest.mark.slow
def test_rerun_receipts_compares_curves_and_knows_which_failures_are_expected(tmp_path):
    """With receipts of another run in the place of each measurement."""
    tools, here = tmp_path / "bin", tmp_path / "examples"
    for folder in (tools, here / "receipts/h200"):
        folder.mkdir(parents=True)
    shutil.copy(EXAMPLES / "rerun_receipts.sh", here)
    samples.train(tmp_path / "sample.json", 30)
    words = {"python": sys.executable, "sample": str(tmp_path / "sample.json")}
    texts = {"megacpp": FAKE_RUN.format(**words), "python": FAKE_PYTHON.format(**words)}
    for name, text in texts.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    names = ["layer-moe-64k-128-512", "layer-moe-4k-16-512", "layer-mla", "layer-m2rnn-core",
             "layer-m2rnn-core-xma", "run-nam56r-quarter-200-graph",
             "run-nam56r-quarter-200-eager", "run-nam56r-quarter-lr2-softplus"]  # fmt: skip
    done = subprocess.run(
        ["bash", str(here / "rerun_receipts.sh"), "1", "prefix", "999", *names], cwd=tmp_path,
        capture_output=True, text=True,
        env=os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "DRY": "",
                          "PYTHONPATH": str(EXAMPLES.parent)},
    )  # fmt: skip
    assert done.returncode == 1
    assert "left out, no memory: layer-moe-64k-128-512" in done.stderr
    assert re.findall(r"failed: (\S+) \(", done.stderr) == ["layer-mla", "layer-m2rnn-core"]
    found = {path.stem for path in (here / "receipts/h200").iterdir()}
    assert found == {*names} - {"layer-moe-64k-128-512", "layer-mla", "layer-m2rnn-core"}
    kept = [*(tmp_path / "runs/rerun").glob("*.txt")]
    first, second = "run-nam56r-quarter-200-eager", "run-nam56r-quarter-200-graph"
    assert [path.name for path in kept] == [f"{first}.{second}.txt"]
    said = kept[0].read_text()
    assert "verdict" in said and said in done.stdout
    assert said.index(f"[{first}](") < said.index(f"[{second}](")


def test_rerun_receipts_forces_backends_for_two_runs_alone(tmp_path):
    done = subprocess.run(
        ["bash", str(EXAMPLES / "rerun_receipts.sh"), "1", "prefix", "999"], cwd=tmp_path,
        capture_output=True, text=True, env=os.environ | {"DRY": "1"}, check=True,
    )  # fmt: skip
    forced = [line for line in done.stdout.splitlines() if "MEGACPP_BACKENDS" in line]
    assert len(forced) == 2 and all("graph-plain-mr" in line for line in forced)
    cells = [line for line in done.stdout.splitlines() if "layer-moe-" in line]
    assert len({line.partition("--receipt")[2] for line in cells}) == len(cells) == 27


def test_rerun_receipts_of_an_unknown_card_go_nowhere(tmp_path):
    """An H100's went into the folder of H200s, by its name, where python could not import torch."""
    script = shutil.copy(EXAMPLES / "rerun_receipts.sh", tmp_path)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$2" in *torch*) exit 3;; esac\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", script, "1", "prefix", "0"], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 3, done
    assert not (tmp_path / "receipts").exists()


def test_rerun_receipts_runs_alternate_with_the_yardstick(tmp_path):
    done = subprocess.run(
        ["bash", str(EXAMPLES / "rerun_receipts.sh"), "2", "prefix", "999"], cwd=tmp_path,
        capture_output=True, text=True, env=os.environ | {"DRY": "1"}, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    whole, fp8, experts, reduced = lines[:4], lines[4], lines[5:7], lines[7:]
    assert ["--yardstick" in line for line in whole] == [False, True, False, True]
    assert "precision.fp8=hybrid" in fp8 and "--yardstick" not in fp8
    assert all("parallel.expert_model_parallel_size=2" in line for line in experts)
    assert ["moe_dispatch=allgather" in line for line in experts] == [False, True]
    found = [re.search(r"grad_reduce_in_bf16=(\w+)", line)[1] for line in reduced]
    assert found == ["false", "true"]


def test_rerun_receipts_of_a_smaller_card_takes_fewer_rows_at_a_time(tmp_path):
    """And the recipe's global batch. The yardstick, which keeps more, recomputes or has one row."""
    done = subprocess.run(
        ["bash", str(EXAMPLES / "rerun_receipts.sh"), "4", "prefix", "999"], cwd=tmp_path,
        capture_output=True, text=True, env=os.environ | {"DRY": "1", "CARD": "h100"}, check=True,
    )  # fmt: skip
    whole = [line for line in done.stdout.splitlines() if "run-nam56r-4xh100" in line]
    rows = []
    for line in whole:
        words = shlex.split(line.partition(" s ")[2])
        recipe = trained(words[words.index("megacpp") + 1 :])
        assert recipe.schedule.global_batch_size == load_recipe("nam56r").schedule.global_batch_size
        assert ("--yardstick" in words) or not recipe.recompute.megatron_modules
        rows.append((recipe.schedule.micro_batch_size, len(recipe.recompute.megatron_modules)))
    assert rows == [(2, 0), (2, 2), (2, 0), (2, 2), (2, 0), (2, 0), (2, 0), (1, 0)]
