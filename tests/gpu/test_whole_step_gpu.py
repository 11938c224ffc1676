"""The step as one CUDA graph, and a step that never waits for the host, of the small NAM56R.

Every letter, an MTP depth and several micro batches a step, through `megacpp train --gpus`.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parallel_layouts import RECIPE

from megacpp_mcore import receipts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

CLI = [sys.executable, "-m", "megacpp_mcore.cli"]
EAGER = ["launch.cuda_graph_impl=none", "schedule.train_iters=20"]
GRAPH = [*EAGER, "launch.cuda_graph_impl=full_iteration"]
EVALUATION = [
    "data.split=90,10,0", "schedule.eval_interval=10", "schedule.eval_iters=5",
]  # fmt: skip


def words(folder: Path, corpus: Path, *sets: str) -> list[str]:
    """The small recipe's file, and `--set` for each of `sets`."""
    recipe = folder / "small.toml"
    recipe.write_text(RECIPE)
    own = [f'data.data_path=["{corpus}"]', f"data.data_cache_path={folder}/data"]
    return [str(recipe), *(word for text in [*own, *sets] for word in ("--set", text))]


def run(folder: Path, corpus: Path, name: str, sets: list[str], *more: str, gpus: int = 1) -> dict:
    """The receipt of one run. more: options of `megacpp train`."""
    out = folder / name
    arguments = words(folder, corpus, *sets, f"launch.nproc_per_node={gpus}")
    command = [*CLI, "train", *arguments, "--gpus", str(gpus), "--out", str(out), *more]
    subprocess.run(command, check=True)
    return receipts.read(out / "receipt.json")


@pytest.mark.parametrize(
    "gpus",
    [1, pytest.param(2, marks=pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="needs two GPUs"))],
)  # fmt: skip
def test_a_captured_step_computes_what_the_eager_one_does(corpus, tmp_path, gpus):
    eager = run(tmp_path, corpus, "eager", EAGER + EVALUATION, gpus=gpus)
    graph = run(tmp_path, corpus, "graph", GRAPH + EVALUATION, gpus=gpus)
    assert graph["series"]["loss"] == eager["series"]["loss"]
    assert graph["series"]["grad_norm"] == eager["series"]["grad_norm"]
    assert graph["evaluations"] == eager["evaluations"] and graph["evaluations"]["loss"]


def test_a_captured_run_goes_on_from_its_checkpoint(corpus, tmp_path):
    saved = tmp_path / "saved"
    saving = [
        f"checkpoint.save={saved}", f"checkpoint.load={saved}", "checkpoint.save_interval=10",
    ]  # fmt: skip
    whole = run(tmp_path, corpus, "run", GRAPH + saving)["series"]
    shutil.rmtree(saved / "iter_0000020")  # as if it had been killed on the way to it
    (saved / "latest_checkpointed_iteration.txt").write_text("10")
    resumed = run(tmp_path, corpus, "run", GRAPH + saving, "--resume")["series"]
    assert resumed["step"] == whole["step"] == list(range(1, 21))
    assert resumed["loss"] == whole["loss"]


@pytest.mark.parametrize("sets", [EAGER, GRAPH], ids=["eager", "graph"])
def test_no_step_waits_for_the_host(corpus, tmp_path, sets):
    arguments = words(tmp_path, corpus, *sets, "schedule.train_iters=8")
    listed = subprocess.run(
        [*CLI, "recipe", "args", *arguments, "--with-recipe", "--format", "lines"],
        check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    rank = Path(__file__).with_name("no_sync_rank.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    out = ["--megacpp-out", str(tmp_path / "out")]
    subprocess.run([*launcher, str(rank), *listed, *out], check=True)
    receipt = receipts.read(tmp_path / "out" / "receipt.json")
    assert receipt["result"]["steps"] == 8
    # Garbage collection is off: what a step does not free by itself adds up.
    peaks = receipt["series"]["peak_memory_bytes"]
    assert peaks[-1] == peaks[4]
