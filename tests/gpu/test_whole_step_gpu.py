"""The step as one CUDA graph, and a step that never waits for the host, of the small NAM56R.

Every letter, an MTP depth and several micro batches a step, through `megacpp train --gpus`.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import digests
import pytest
import torch
from parallel_layouts import RECIPE

from megacpp_mcore import receipts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
CLI = [sys.executable, "-m", "megacpp_mcore.cli"]
EAGER = ["launch.cuda_graph_impl=none", "schedule.train_iters=20"]
GRAPH = [*EAGER, "launch.cuda_graph_impl=full_iteration"]
QUARTER = """
extends = "nam56r-quarter"
description = "the sizes of NAM56R's layers, in few steps of few rows"
unset = ["checkpoint.save", "checkpoint.load", "checkpoint.save_interval"]
[model]
pattern = "EMEMREM"
depth = 7
[mtp]
pattern = "E"
[schedule]
global_batch_size = 8
lr_warmup_iters = 2
eval_iters = 0
[data]
split = "100,0,0"
null_tokenizer_eod_id = 256
num_workers = 1
[launch]
nproc_per_node = 1
"""
FP8 = [
    "precision.fp8=hybrid",
    "precision.fp8_recipe=tensorwise",
    "backends.moe_experts=fused_moe",
    "backends.mla_up=triton",
]
EVALUATED_EARLY = [
    "data.split=90,10,0",
    "schedule.eval_interval=2",
    "schedule.eval_iters=5",
]
EVALUATION = [
    "data.split=90,10,0", "schedule.eval_interval=10", "schedule.eval_iters=5",
]  # fmt: skip


def words(folder: Path, corpus: Path, *sets: str, text: str = RECIPE) -> list[str]:
    """The file of a recipe, the small one by default, and `--set` for each of `sets`."""
    recipe = folder / "recipe.toml"
    recipe.write_text(text)
    own = [f'data.data_path=["{corpus}"]', f"data.data_cache_path={folder}/data"]
    return [str(recipe), *(word for text in [*own, *sets] for word in ("--set", text))]


def run(folder: Path, corpus: Path, name: str, sets: list[str], *more: str, gpus: int = 1) -> dict:
    """The receipt of one run. more: options of `megacpp train`."""
    out = folder / name
    arguments = words(folder, corpus, *sets, f"launch.nproc_per_node={gpus}")
    command = [*CLI, "train", *arguments, "--gpus", str(gpus), "--out", str(out), *more]
    subprocess.run(command, check=True)
    return receipts.read(out / "receipt.json")


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=TWO_GPUS)])
def test_a_captured_step_computes_what_the_eager_one_does(corpus, tmp_path, gpus):
    eager = run(tmp_path, corpus, "eager", EAGER + EVALUATION, gpus=gpus)
    graph = run(tmp_path, corpus, "graph", GRAPH + EVALUATION, gpus=gpus)
    assert graph["series"]["loss"] == eager["series"]["loss"]
    assert graph["series"]["grad_norm"] == eager["series"]["grad_norm"]
    assert graph["evaluations"] == eager["evaluations"] and graph["evaluations"]["loss"]


@pytest.mark.parametrize("first_last", ["false", "true"])
def test_a_captured_step_with_fp8_linears_computes_what_the_eager_one_does(
    corpus, tmp_path, first_last
):
    """Evaluated before, between and after the captures: what one forward pass keeps of a weight in
    FP8 must not be another's."""
    own = [*FP8, f"precision.first_last_layers_bf16={first_last}", *EVALUATED_EARLY]
    eager = run(tmp_path, corpus, "eager", EAGER + own)
    graph = run(tmp_path, corpus, "graph", GRAPH + own)
    for receipt in (eager, graph):
        assert receipt["recipe"]["content"]["precision"]["fp8"] == "hybrid"
        served = {surface: set() for surface in ("linear", "mla_up", "moe_experts")}
        for entry in receipt["backends"]:
            served.get(entry["surface"], set()).add((entry["observed"], entry["reason"]))
        assert {name for name, _ in served["linear"]} == {"te"}  # every projection
        for surface, name in (("moe_experts", "fused_moe"), ("mla_up", "triton")):
            ((observed, reason),) = served[surface]
            assert observed == name
            assert "fp8 hybrid: it multiplies in the model's dtype" in reason
    assert graph["recipe"]["content"]["launch"]["cuda_graph_impl"] == "full_iteration"
    assert graph["result"]["cuda_graph_bytes"] > 0
    assert graph["series"]["loss"] == eager["series"]["loss"]
    assert graph["series"]["grad_norm"] == eager["series"]["grad_norm"]
    assert graph["evaluations"] == eager["evaluations"] and graph["evaluations"]["loss"]
    plain = run(tmp_path, corpus, "bf16", EAGER + EVALUATED_EARLY)["series"]["loss"]
    assert plain != eager["series"]["loss"]  # or nothing was in FP8
    assert eager["series"]["loss"][-1] < eager["series"]["loss"][0]


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


def launch_rank(
    name: str, folder: Path, arguments: list[str], *before: str, ranks: int = 1
) -> None:
    """Processes of tests/gpu/NAME, with the words of `megacpp recipe args` and a folder out."""
    listed = subprocess.run(
        [*CLI, "recipe", "args", *arguments, "--with-recipe", "--format", "lines"],
        check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    rank = Path(__file__).with_name(name)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc-per-node={ranks}"]
    out = ["--megacpp-out", str(folder / "out")]
    subprocess.run([*launcher, str(rank), *before, *listed, *out], check=True)


PACKED = [*EAGER, "data.dataloader_inter_document_masking=true"]
TP2 = [*EAGER, "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
PP2 = [*EAGER, "parallel.pipeline_model_parallel_size=2", "model.pattern=AEM|EARME"]
STEPS = [
    pytest.param(sets, gpus, gpus, marks=TWO_GPUS if gpus == 2 else (), id=f"{name}-{gpus}")
    for name, sets in {
        "eager": EAGER,
        "graph": GRAPH,
        "packed": PACKED,
        "fp8": [*EAGER, *FP8],
    }.items()
    for gpus in (1, 2)
]
SPLIT_MODELS = [
    pytest.param(sets, 2, 1, marks=TWO_GPUS, id=name)
    for name, sets in {"tp-2": TP2, "pp-2": PP2}.items()
]


@pytest.mark.parametrize(("sets", "gpus", "dp"), [*STEPS, *SPLIT_MODELS])
def test_no_step_waits_for_the_host(corpus, tmp_path, sets, gpus, dp):
    own = ["schedule.train_iters=8", "schedule.log_interval=100", f"launch.nproc_per_node={gpus}"]
    launch_rank("no_sync_rank.py", tmp_path, words(tmp_path, corpus, *sets, *own), ranks=gpus)
    receipt = receipts.read(tmp_path / "out" / "receipt.json")
    assert receipt["result"]["steps"] == 8 and receipt["topology"]["dp"] == dp
    for rank in range(gpus):
        waits = json.loads((tmp_path / "out" / f"waits-{rank}.json").read_text())
        assert waits["step"] == {} and waits["read"], waits
    if sets is not PACKED:  # whose kernels take more or less with the documents
        # Garbage collection is off: what a step does not free by itself adds up.
        peaks = receipt["series"]["peak_memory_bytes"]
        assert peaks[-1] == peaks[4]


@pytest.mark.parametrize("text", [RECIPE, QUARTER], ids=["small", "sizes-of-nam56r"])
def test_two_captured_runs_have_the_same_bits(corpus, tmp_path, text):
    """Of every gradient and weight, after every one of 20 steps. At the sizes of NAM56R's layers
    without A: cuDNN's attention adds the parts of dq there in any order."""
    found = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        arguments, file = (
            words(tmp_path / name, corpus, *GRAPH, text=text),
            tmp_path / f"{name}.json",
        )
        launch_rank("digest_rank.py", tmp_path / name, arguments, str(file))
        found.append(digests.read(file))
    assert len(found[0]) == 20
    assert digests.first_difference(*found) is None
