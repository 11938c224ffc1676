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


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_a_layer_and_a_model_compute_what_all_to_all_does(dispatcher, tmp_path):
    program = Path(__file__).with_name("dispatch_over_ranks.py")
    out = tmp_path / "found.json"
    subprocess.run([*TORCHRUN, str(program), "check", dispatcher, str(out)], check=True)
    found = json.loads(out.read_text())
    assert found["wrong"] == [] and found["compared"]


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_a_run_of_two_ranks_learns_alike_and_ends(corpus, tmp_path, dispatcher):
    small = tmp_path / "small.toml"
    small.write_text(RECIPE)
    losses = {}
    for name in ("alltoall", dispatcher):
        sets = [
            "parallel.expert_model_parallel_size=2", "launch.nproc_per_node=2",
            f"backends.moe_dispatch={name}", "schedule.train_iters=6",
            f'data.data_path=["{corpus}"]', f"data.data_cache_path={tmp_path}/data",
        ]  # fmt: skip
        words = [word for text in sets for word in ("--set", text)]
        command = [sys.executable, "-m", "megacpp_mcore.cli", "train", str(small), *words]
        out = tmp_path / name
        subprocess.run([*command, "--gpus", "2", "--out", str(out)], check=True, timeout=150)
        receipt = receipts.read(out / "receipt.json")
        (said,) = [b for b in receipt["backends"] if b["surface"] == "moe_dispatch"]
        assert (said["requested"], said["observed"]) == (name, name)
        losses[name] = receipt["series"]["loss"]
    # bf16: six steps of a model whose first losses are ln 257; a lost token changes the first.
    for ours, theirs in zip(losses[dispatcher], losses["alltoall"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3)
