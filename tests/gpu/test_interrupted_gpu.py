"""Runs on GPUs that are killed, stopped, terminated or damaged, and what is left of them:
processes, checkpoints, the sentence that says what happened. Of the layouts' small NAM56R.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from small_runs import ranks_of, result, series, small_run

from megacpp_mcore.training.checkpoints import checksums, folder

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
# Letters that compile nothing with nvcc, where the others have no part in what is tested
LIGHT = ("model.pattern=AE", "model.depth=2", "backends.moe_experts=grouped_mm")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two_gpus
def test_a_killed_rank_ends_the_run_within_a_minute(corpus, tmp_path):
    out = tmp_path / "run"
    sets = (*LIGHT, "schedule.train_iters=100000")
    words = small_run(tmp_path / "small.toml", corpus, out, *sets, gpus=2)
    with open(tmp_path / "err", "w") as err:
        run = subprocess.Popen(words, stderr=err)
        deadline = time.monotonic() + 300
        while not (out / "receipt.json").exists() and time.monotonic() < deadline:
            time.sleep(0.5)  # the receipt is there after the first step
        ranks = ranks_of(run)
        assert len(ranks) == 2
        time.sleep(1)
        started = time.monotonic()
        os.kill(ranks[1].pid, signal.SIGKILL)
        assert run.wait(timeout=90) == 128 + signal.SIGKILL
    assert time.monotonic() - started < 60
    assert not any(rank.is_running() for rank in ranks)
    said = (tmp_path / "err").read_text()
    assert said.count("was killed by SIGKILL") == 1
    assert result(out)["status"] == "failed" and "SIGKILL" in result(out)["reason"]


def test_a_killed_run_goes_on_to_the_losses_of_an_unbroken_one(corpus, tmp_path):
    """Killed in a step, four or less after a checkpoint; then `--resume`, to the same bits."""
    recipe, runs = tmp_path / "small.toml", {}
    for name in ("unbroken", "killed"):
        out = tmp_path / name
        words = [*small_run(recipe, corpus, out), "--set", "schedule.train_iters=15"]
        err = (tmp_path / f"{name}.err").open("w")
        runs[name] = subprocess.Popen(words, stderr=err), words
    run, words = runs["killed"]
    tracker, deadline = out / "saved/latest_checkpointed_iteration.txt", time.monotonic() + 300
    while not (tracker.exists() and tracker.read_text() == "5"):
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.4)  # into a later step
    (rank,) = ranks_of(run)
    rank.kill()
    assert run.wait(timeout=90) == 128 + signal.SIGKILL
    assert "resume from it with --resume" in (tmp_path / "killed.err").read_text()
    assert max(series(out, "step")) < 15 and result(out)["status"] == "failed"
    subprocess.run([*words, "--resume"], check=True)
    assert runs["unbroken"][0].wait(timeout=300) == 0
    for name in ("loss", "grad_norm"):
        assert series(out, name) == series(tmp_path / "unbroken", name)
    assert list(series(out, "loss")) == [*range(1, 16)]


ASYNCHRONOUS = ("checkpoint.async_save=true", "checkpoint.use_persistent_ckpt_worker=true",
                "checkpoint.keep_latest=2")  # fmt: skip


def wait_for_save(run: subprocess.Popen, out: Path, iteration: int) -> None:
    """Until the checkpoint of `iteration` has been begun."""
    deadline = time.monotonic() + 300
    while not folder.path_of(out / "saved", iteration).exists():
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def test_asynchronous_saves_have_checksums_and_lose_one_interval_at_most(corpus, tmp_path):
    """Killed when a second save has begun; the first one is complete by then."""
    out = tmp_path / "run"
    sets = (*LIGHT, *ASYNCHRONOUS, "schedule.train_iters=22")
    words = small_run(tmp_path / "small.toml", corpus, out, *sets)
    run = subprocess.Popen(words)
    wait_for_save(run, out, 10)
    (rank,) = ranks_of(run)
    workers = rank.children(recursive=True)
    rank.kill()
    run.wait(timeout=90)
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert workers and not alive
    assert folder.complete(out / "saved")[-1] in (5, 10)
    subprocess.run([*words, "--resume"], check=True)
    assert folder.complete(out / "saved") == [20, 22]
    assert all(checksums.verify(folder.path_of(out / "saved", n)) for n in (20, 22))
    assert list(series(out, "loss")) == [*range(1, 23)]


@two_gpus
def test_sigterm_saves_and_a_damaged_save_is_refused(corpus, tmp_path):
    """SIGTERM to the launcher of a captured run with asynchronous saves; then a bit of a shard is
    turned."""
    recipe, out = tmp_path / "small.toml", tmp_path / "run"
    sets = (*LIGHT, *ASYNCHRONOUS, "launch.cuda_graph_impl=full_iteration",
            "schedule.train_iters=5000")  # fmt: skip
    words = small_run(recipe, corpus, out, *sets, gpus=2)
    run = subprocess.Popen(words)
    wait_for_save(run, out, 10)
    children = psutil.Process(run.pid).children(recursive=True)
    run.terminate()
    assert run.wait(timeout=90) == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    steps, newest = result(out)["steps"], folder.complete(out / "saved")[-1]
    assert result(out)["status"] == "interrupted" and newest == steps >= 10
    assert list(series(out, "loss")) == [*range(1, newest + 1)]
    assert checksums.verify(folder.path_of(out / "saved", newest))

    shards = folder.path_of(out / "saved", newest).glob("*.distcp")
    shard = max(shards, key=lambda path: path.stat().st_size)
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    refused = subprocess.run([*words, "--resume"], stderr=subprocess.PIPE, text=True)
    assert refused.returncode == 2 and f"{shard} is damaged" in refused.stderr, refused.stderr
    assert "--resume-from" in refused.stderr  # the older one, which is whole


@two_gpus
def test_ranks_with_different_backends_are_refused_before_the_first_step(corpus, tmp_path):
    """As on a host with a broken package: rank 1 alone has another backend of one surface."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    os.environ['MEGACPP_BACKENDS'] = 'linear_cross_entropy=reference'\n"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    words = small_run(tmp_path / "small.toml", corpus, tmp_path / "run", *LIGHT, gpus=2)
    refused = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE, text=True, timeout=300
    )
    assert refused.returncode == 2, refused.stderr
    said = "ranks chose different backends for surface 'linear_cross_entropy': rank 0 on "
    assert said in refused.stderr and "; rank 1 on " in refused.stderr
    assert not (tmp_path / "run" / "receipt.json").exists()


@two_gpus
def test_a_rank_that_stops_is_named_and_ends_the_run(corpus, tmp_path):
    """Rank 0 waits for it in a collective over NCCL. The first micro batch of a cold start has to
    end within the time limit, too: beside other tests it took more than 25 s."""
    out, limit = tmp_path / "run", 60
    sets = (*LIGHT, f"launch.heartbeat_timeout_s={limit}", "schedule.train_iters=100000")
    words = small_run(tmp_path / "small.toml", corpus, out, *sets, gpus=2)
    with open(tmp_path / "err", "w") as err:
        run = subprocess.Popen(words, stderr=err)
    wait_for_save(run, out, 5)
    children = psutil.Process(run.pid).children(recursive=True)
    started = time.monotonic()
    (stopped,) = (rank for rank in ranks_of(run) if rank.environ()["RANK"] == "1")
    stopped.suspend()
    assert run.wait(timeout=limit + 90) == 75
    assert time.monotonic() - started < limit + 60  # the launcher gives the stopped rank 30 s
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    said = (tmp_path / "err").read_text()
    assert "megacpp: rank 1 on " in said and " has made no progress for " in said
    assert "megacpp: stacks of rank 0:" in said
    assert result(out)["status"] == "failed" and "rank 1 on " in result(out)["reason"]
