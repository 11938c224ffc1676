"""The CPU lane through its function and, where a process matters, through the command."""

import functools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import warm

from megacpp_mcore import receipts
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.recipe.check import MegatronRefusal
from megacpp_mcore.training.cpu import checkpoint
from megacpp_mcore.training.cpu.step import TrainingError
from megacpp_mcore.training.cpu.support import CpuLaneError
from megacpp_mcore.training.cpu.train import train
from megacpp_mcore.training.data.files import DataError
from megacpp_mcore.training.run_folder import RunFolderError

pytestmark = pytest.mark.slow


def losses(run: Path) -> list[float]:
    return receipts.read(run / "receipt.json")["series"]["loss"]


def words(recipe: Path, out: Path, *more: str) -> list[str]:
    return ["-m", "megacpp_mcore.cli", "train", str(recipe), "--out", str(out), *more]


@pytest.fixture(autouse=True)
def environment_of_one_run(monkeypatch):
    """`train` sets launch variables for its process; a test's end takes them back."""
    forget_runs(monkeypatch)


def forget_runs(monkeypatch):
    for name in ("MEGACPP_RECIPE", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def runs(small_text, tmp_path_factory):
    """runs(steps): the folder of a run of the small recipe, made once and not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "small.toml").write_text(small_text)

    @functools.cache
    def run(steps: int | None) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            forget_runs(patch)
            train(load_recipe(str(folder / "small.toml")), folder / f"{steps}", steps=steps)
        return folder / f"{steps}"

    return run


@pytest.fixture
def unbroken(runs) -> Path:
    return runs(None)


@pytest.fixture
def one_step(runs, tmp_path) -> Path:
    """A run that was stopped after its first step, the test's own copy."""
    return shutil.copytree(runs(1), tmp_path / "run", symlinks=True)


def test_a_run_learns_and_leaves_a_whole_receipt(small, tmp_path):
    outcome = train(small, tmp_path / "run")
    receipt = receipts.read(tmp_path / "run" / "receipt.json")
    assert outcome.exit_status == 0
    assert receipt["result"]["status"] == "complete"
    assert receipt["series"]["step"] == list(range(1, 9))
    assert receipt["series"]["loss"][-1] < receipt["series"]["loss"][0]
    assert receipt["evaluations"]["step"] == [4, 8]
    # The very first loss is that of an untrained model: uniform over the vocabulary, within 5 %.
    assert receipt["series"]["loss"][0] == pytest.approx(math.log(257), rel=0.05)
    assert {row["surface"] for row in receipt["backends"]} >= {
        "linear", "norm", "moe_experts", "core_attention", "mamba3_scan", "m2rnn"
    }  # fmt: skip
    seconds = receipt["goodput"]["seconds"]
    assert sum(seconds.values()) == pytest.approx(receipt["goodput"]["wall_s"], rel=0.01)
    assert 0 < receipt["result"]["bigram_entropy"] < receipt["result"]["unigram_entropy"]
    assert (tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").read_text() == "8\n"


def test_a_stopped_run_resumes_to_the_losses_of_an_unbroken_one(small, unbroken, tmp_path):
    out = tmp_path / "run"
    train(small, out, steps=5)  # saves at 3 and at 5
    assert len(losses(out)) == 5
    train(small, out, resume=True)
    assert losses(out) == losses(unbroken)


def test_a_resumed_run_goes_on_with_the_generators_state(small, tmp_path, monkeypatch):
    saved, load = [], checkpoint.load

    def save(*arguments, save=checkpoint.save):
        torch.rand(3)  # as a model with dropout draws
        saved.append(torch.get_rng_state())
        save(*arguments)

    def load_and_look(*arguments):
        torch.manual_seed(99)
        found = load(*arguments)
        assert torch.equal(torch.get_rng_state(), saved[-1])
        saved.clear()
        return found

    monkeypatch.setattr(checkpoint, "save", save)
    train(small, tmp_path / "run", steps=2)
    monkeypatch.setattr(checkpoint, "load", load_and_look)
    monkeypatch.setattr(checkpoint, "save", lambda *arguments: None)
    train(small, tmp_path / "run", steps=3, resume=True)
    assert not saved


def test_resume_before_any_checkpoint_begins_anew(small, unbroken, tmp_path):
    train(small, tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(unbroken)


def test_a_run_killed_at_random_moments_ends_with_the_same_losses(small_recipe, unbroken, tmp_path):
    out = tmp_path / "killed"
    command = [warm.python(), *words(small_recipe, out, "--resume")]
    for _ in range(2):
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        # Past the imports, somewhere in training or saving.
        deadline = time.monotonic() + 120
        while not (out / "cache").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(random.uniform(0.0, 4.0))
        process.kill()
        process.communicate()  # which ends when the program has
    subprocess.run(command, check=True, capture_output=True)
    assert checkpoint.latest(out / "checkpoints").name == "iter_0000008"
    assert losses(out) == losses(unbroken)


@pytest.mark.parametrize("step", [3, 8])
def test_a_run_that_dies_as_it_has_saved_lost_no_step(step, small, unbroken, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def save_and_die(folder, trainer, progress):
        save(folder, trainer, progress)
        if progress.iteration == step:
            raise Killed

    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", save_and_die)
    with pytest.raises(Killed):
        train(small, tmp_path / "run")
    monkeypatch.setattr(checkpoint, "save", save)
    train(small, tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(unbroken)


def test_sigint_finishes_the_step_saves_and_exits_130(small_recipe, tmp_path):
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, *words(
            small_recipe, out, "--set", "schedule.train_iters=100000",
            "--set", "schedule.lr_decay_iters=1000", "--set", "schedule.log_interval=1")],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    for line in process.stderr:
        if line.startswith("step 2/"):
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group
            break
    rest = process.stderr.read()
    assert process.wait(timeout=120) == 130
    receipt = receipts.read(out / "receipt.json")
    last = receipt["series"]["step"][-1]
    assert receipt["result"]["status"] == "interrupted"
    assert checkpoint.latest(out / "checkpoints").name == f"iter_{last:07d}"
    assert f"SIGINT: stopped after step {last}, which is saved" in rest


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(small_recipe, tmp_path):
    out = tmp_path / "run"
    recipe = load_recipe(str(small_recipe), ["optimizer.lr=1e30", "checkpoint.save_interval=1"])
    with pytest.raises(TrainingError, match=r"step \d+: the (loss|gradient norm) is (nan|inf)"):
        train(recipe, out)
    receipt = receipts.read(out / "receipt.json")
    assert receipt["result"]["status"] == "failed"
    good = checkpoint.latest(out / "checkpoints")
    assert int(good.name.removeprefix("iter_")) == receipt["series"]["step"][-1]
    assert all(math.isfinite(loss) for loss in losses(out))


def test_a_checkpoint_of_another_recipe_is_refused_by_its_keys(one_step, small_recipe):
    other = load_recipe(str(small_recipe), ["optimizer.lr=1e-3"])
    with pytest.raises(checkpoint.CheckpointError, match=r"optimizer\.lr was 0\.003 and is 0\.001"):
        train(other, one_step, resume=True)


def test_a_checkpoint_trained_on_other_data_is_refused(small, one_step):
    progress = checkpoint.latest(one_step / "checkpoints") / "progress.json"
    content = json.loads(progress.read_text())
    progress.write_text(json.dumps(content | {"data_digest": "0" * 64}))
    with pytest.raises(checkpoint.CheckpointError, match="on other data"):
        train(small, one_step, resume=True)


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_a_damaged_checkpoint_is_refused(small, one_step, damage):
    shard = next(checkpoint.latest(one_step / "checkpoints").glob("*.distcp"))
    if damage == "truncate":
        with open(shard, "r+b") as file:
            file.truncate(shard.stat().st_size // 2)
    else:
        shard.unlink()
    with pytest.raises(checkpoint.CheckpointError, match="cannot be loaded"):
        train(small, one_step, resume=True)


def test_a_half_written_checkpoint_is_never_loaded(one_step):
    checkpoints = one_step / "checkpoints"
    (checkpoints / ".tmp-iter_0000002").mkdir()
    (checkpoints / "iter_0000003").mkdir()  # no metadata: not one of ours
    assert checkpoint.latest(checkpoints).name == "iter_0000001"


def test_a_checkpoint_that_does_not_fit_is_refused_before_writing(small, one_step, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(checkpoint.CheckpointWriteError, match="MiB are needed, 0 MiB are free"):
        train(small, one_step, resume=True)
    assert checkpoint.latest(one_step / "checkpoints").name == "iter_0000001"
    assert receipts.read(one_step / "receipt.json")["result"]["status"] == "failed"


def test_a_write_that_fails_half_way_leaves_no_checkpoint_and_says_so(small_recipe, tmp_path):
    out = tmp_path / "run"
    limit = 800_000  # bytes a file may have: index and receipt fit, a shard of 1.2 MB does not
    script = (
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "import sys; from megacpp_mcore.cli import main; sys.exit(main(sys.argv[3:]))"
    )
    done = subprocess.run(
        [warm.python(), "-c", script, *words(small_recipe, out, "--steps", "1")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "could not be written" in done.stderr
    assert "the last good one is none" in done.stderr
    assert list((out / "checkpoints").iterdir()) == []


def test_a_folder_that_holds_a_run_is_not_written_over(small, one_step):
    with pytest.raises(RunFolderError, match=r"--resume.*--overwrite"):
        train(small, one_step, steps=1)
    train(small, one_step, steps=2, overwrite=True)
    assert len(losses(one_step)) == 2


def test_two_processes_cannot_train_in_one_folder(small, tmp_path):
    from megacpp_mcore.training.run_folder import RunFolder

    first = RunFolder(tmp_path / "run")
    first.claim(resume=False, overwrite=False)
    with pytest.raises(RunFolderError, match="another process"):
        train(small, tmp_path / "run")
    first.release()


def test_missing_data_is_refused_with_how_to_build_it(small_recipe, tmp_path):
    recipe = load_recipe(str(small_recipe), [f'data.data_path=["{tmp_path}/nowhere"]'])
    with pytest.raises(DataError, match="megacpp data build"):
        train(recipe, tmp_path / "run")


@pytest.mark.parametrize("overrides", [
    "launch.device=cuda moe.moe_grouped_gemm=true", "precision.bf16=true",
    "optimizer.optimizer=muon", "checkpoint.save=elsewhere",
    "data.reset_attention_mask=true", "schedule.exit_duration_in_mins=5",
])  # fmt: skip
def test_a_key_that_the_lane_does_not_serve_is_refused_not_ignored(
    small_recipe, overrides, tmp_path
):
    key = overrides.split("=")[0]
    with pytest.raises(MegacppError, match=key.replace(".", r"\.")) as refused:
        train(load_recipe(str(small_recipe), overrides.split()), tmp_path / "run")
    assert isinstance(refused.value, CpuLaneError) or "recipe" in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_what_megatron_refuses_ends_the_run_with_its_words(small_recipe, tmp_path):
    recipe = load_recipe(str(small_recipe), ["schedule.lr_warmup_fraction=0.1"])
    refused = "Megatron refuses the recipe: .*only specify one of lr-warmup-fraction"
    with pytest.raises(MegatronRefusal, match=refused):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "receipt.json").exists()


def test_steps_beyond_the_schedule_are_refused_not_cut(small, tmp_path):
    with pytest.raises(CpuLaneError, match=r"--steps 9 goes beyond the schedule.*is 8"):
        train(small, tmp_path / "run", steps=9)
    assert not (tmp_path / "run").exists()


def test_a_recipe_left_in_the_environment_does_not_replace_the_one_asked_for(
    small, unbroken, tmp_path, monkeypatch
):
    monkeypatch.setenv("MEGACPP_RECIPE", f"{small.source} --set mamba3.rope_fraction=1.0")
    train(small, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(unbroken)
    assert receipts.read(tmp_path / "run" / "receipt.json")["recipe"]["sha256"] == small.sha256
