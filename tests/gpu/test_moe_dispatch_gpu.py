"""The exchange of tokens between two GPUs, by the real DeepEP where it is installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parallel_layouts import RECIPE

from megacpp_mcore import receipts
from megacpp_mcore.surfaces import deep_ep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(300),
]
DISPATCHERS = [
    "allgather",
    pytest.param("deepep", marks=pytest.mark.skipif(
        bool(deep_ep.package_reason()), reason=str(deep_ep.package_reason()))),
]  # fmt: skip
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.parametrize(
    "command", ["check allgather", "check deepep", "capture allgather"], ids=lambda c: c
)
def test_a_layer_and_a_model_compute_what_all_to_all_does(command, tmp_path):
    if command.endswith("deepep") and (reason := deep_ep.package_reason()):
        pytest.skip(reason)
    program = Path(__file__).with_name("dispatch_over_ranks.py")
    out = tmp_path / "found.json"
    subprocess.run([*TORCHRUN, str(program), *command.split(), str(out)], check=True)
    found = json.loads(out.read_text())
    assert found["wrong"] == [] and found["compared"]


def trained(folder: Path, corpus: Path, dispatcher: str, *sets: str) -> dict:
    """The receipt of six steps of the small NAM56R over two ranks."""
    folder.mkdir(exist_ok=True)
    small = folder / "small.toml"
    small.write_text(RECIPE)
    sets = (
        "parallel.expert_model_parallel_size=2", "launch.nproc_per_node=2",
        f"backends.moe_dispatch={dispatcher}", "schedule.train_iters=6",
        f'data.data_path=["{corpus}"]', f"data.data_cache_path={folder}/data", *sets,
    )  # fmt: skip
    words = [word for text in sets for word in ("--set", text)]
    out = folder / dispatcher
    command = [sys.executable, "-m", "megacpp_mcore.cli", "train", str(small), *words]
    subprocess.run([*command, "--gpus", "2", "--out", str(out)], check=True, timeout=150)
    receipt = receipts.read(out / "receipt.json")
    (said,) = [b for b in receipt["backends"] if b["surface"] == "moe_dispatch"]
    assert (said["requested"], said["observed"]) == (dispatcher, dispatcher)
    return receipt


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_a_run_of_two_ranks_learns_alike_and_ends(corpus, tmp_path, dispatcher):
    ours, theirs = (trained(tmp_path, corpus, name) for name in (dispatcher, "alltoall"))
    # bf16: six steps of a model whose first losses are ln 257; a lost token changes the first.
    pairs = zip(ours["series"]["loss"], theirs["series"]["loss"], strict=True)
    assert all(one == pytest.approx(other, rel=2e-3) for one, other in pairs)
