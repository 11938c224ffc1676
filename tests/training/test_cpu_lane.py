"""The CPU lane through its function and, where a process matters, through the command."""

import errno
import functools
import json
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm
from left_behind import Marked, wait_until

from megacpp_mcore import cli, files, receipts
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.recipe.check import MegatronRefusal
from megacpp_mcore.training.checkpoints import checksums
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


def test_a_receipt_has_its_own_decisions_and_the_applied_patches(small_recipe, tmp_path):
    """Of this run: not those of one before it in the process."""
    from megacpp_mcore import dispatch
    from megacpp_mcore.receipts.lane import patches

    dispatch.record(dispatch.Decision("norm", "auto", "another", "of an earlier run", "a:b"))
    strict = load_recipe(str(small_recipe), ["launch.strict=true", "backends.m2rnn=reference"])
    train(strict, tmp_path / "run", steps=1)
    receipt = receipts.read(tmp_path / "run" / "receipt.json")
    assert not [row for row in receipt["backends"] if row["observed"] == "another"]
    assert receipt["patches"] == patches()
    assert receipt["patches"]["megatron-core"]["version"] == "0.19.2"


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

    def load_and_look(*arguments, **more):
        torch.manual_seed(99)
        found = load(*arguments, **more)
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
        time.sleep(random.uniform(0.0, 2.0))
        process.kill()
        process.communicate()  # which ends when the program has
    subprocess.run(command, check=True, capture_output=True)
    assert checkpoint.latest(out / "checkpoints").name == "iter_0000008"
    assert losses(out) == losses(unbroken)


@pytest.mark.parametrize("step", [3, 8])
def test_a_run_that_dies_as_it_has_saved_lost_no_step(step, small, unbroken, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def save_and_die(folder, trainer, progress, keep):
        save(folder, trainer, progress, keep)
        if progress.iteration == step:
            raise Killed

    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", save_and_die)
    with pytest.raises(Killed):
        train(small, tmp_path / "run")
    monkeypatch.setattr(checkpoint, "save", save)
    train(small, tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(unbroken)


def test_a_long_run_keeps_no_memory_and_no_descriptor(small_recipe, tmp_path, monkeypatch):
    """`MEGACPP_SOAK=2000` makes it as long as the issue asks for."""
    import psutil

    from megacpp_mcore.training.cpu.step import Trainer

    steps, found, step = int(os.environ.get("MEGACPP_SOAK", 60)), [], Trainer.step

    def watched(self, micro_batches):
        process = psutil.Process()
        found.append((process.memory_info().rss, process.num_fds(), process.num_threads()))
        return step(self, micro_batches)

    monkeypatch.setattr(Trainer, "step", watched)
    long = [f"schedule.train_iters={steps}", f"schedule.lr_decay_iters={steps}",
            "checkpoint.save_interval=10", "checkpoint.keep_latest=2",
            "schedule.eval_interval=20"]  # fmt: skip
    train(load_recipe(str(small_recipe), long), tmp_path / "run")
    warm_up = len(found) // 3
    memory, descriptors, threads = zip(*found[warm_up:], strict=True)
    third = len(memory) // 3
    # allocators keep some: a leak of a kilobyte a step and parameter tensor would be more
    grown = sum(memory[-third:]) / third - sum(memory[:third]) / third
    assert grown < 2**20 * max(16, steps / 100), f"{grown / 2**20:.1f} MiB more"
    assert max(descriptors) == min(descriptors) and max(threads) <= min(threads) + 2


STOPPED_BY_ITSELF = """
import os, signal, sys, threading, time
from megacpp_mcore.cli import main

def stop():
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=stop, daemon=True).start()
sys.exit(main(sys.argv[2:]))
"""


def assert_stopped_and_saved(way: str, status: int, out: Path, said: str) -> None:
    assert status == 128 + getattr(signal, way)
    receipt = receipts.read(out / "receipt.json")
    last = receipt["series"]["step"][-1]
    assert receipt["result"]["status"] == "interrupted"
    assert checkpoint.latest(out / "checkpoints").name == f"iter_{last:07d}"
    assert f"{way}: stopped after step {last}, which is saved" in said


def test_sigterm_stops_a_run_which_saves(small_recipe, tmp_path):
    out = tmp_path / "run"
    saved = out / "checkpoints" / "latest_checkpointed_iteration.txt"
    arguments = words(small_recipe, out, "--set", "schedule.train_iters=200")
    assert arguments[:2] == ["-m", "megacpp_mcore.cli"]
    done = subprocess.run(
        [warm.python(), "-c", STOPPED_BY_ITSELF, str(saved), *arguments[2:]],
        capture_output=True, text=True,
    )  # fmt: skip
    assert_stopped_and_saved("SIGTERM", done.returncode, out, done.stderr)


@pytest.mark.parametrize("way", ["SIGINT", "SIGKILL"])
def test_a_run_that_is_stopped_saves_where_it_can_and_leaves_nothing_behind(
    way, small_recipe, tmp_path
):
    out, number, marked = tmp_path / "run", getattr(signal, way), Marked()
    # a pipe would not end while a process that is left holds it
    said, err = tmp_path / "out", tmp_path / "err"
    process = subprocess.Popen(
        [sys.executable, *words(
            small_recipe, out, "--set", "schedule.train_iters=100000", "--set",
            "schedule.lr_decay_iters=1000", "--set", "schedule.log_interval=1")],
        stdout=said.open("w"), stderr=err.open("w"), start_new_session=True,
        env=os.environ | marked.environment,
    )  # fmt: skip
    wait_until(lambda: "\nstep 4/" in err.read_text())  # it has saved once
    marked.note_shared_memory()
    assert process.pid in marked.pids()
    if way == "SIGINT":
        os.killpg(process.pid, number)  # as a terminal does: the whole group
    else:
        process.send_signal(number)
    status = process.wait(timeout=120)
    assert marked.left() == []
    if way == "SIGKILL":
        assert status == -signal.SIGKILL
        assert checkpoint.latest(out / "checkpoints").name == "iter_0000003"
        return
    assert_stopped_and_saved(way, status, out, err.read_text())
    assert "; use --resume" in err.read_text().splitlines()[-1] and said.read_text() == ""


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


LONGER = ["schedule.train_iters=12", "schedule.log_interval=1", "checkpoint.save_interval=5"]


def test_a_finished_run_is_extended(runs, small_recipe, tmp_path):
    """By a longer schedule, whose rates it then has; as one that is interrupted on the way."""
    longer, ends = load_recipe(str(small_recipe), LONGER), []
    for name, stop in (("at once", None), ("in two", 10)):
        out = shutil.copytree(runs(None), tmp_path / name, symlinks=True)
        if stop:
            train(longer, out, steps=stop, resume=True)
        train(longer, out, resume=True)
        receipt = receipts.read(out / "receipt.json")
        assert receipt["result"]["status"] == "complete" and receipt["result"]["steps"] == 12
        assert "from step 9 on schedule.train_iters is 12, before it was 8" in receipt["notes"]
        ends.append((receipt["series"]["loss"], receipt["series"]["lr"]))
    assert ends[0] == ends[1] and ends[0][0][:8] == losses(runs(None))
    rates = ends[0][1]
    assert rates[8] > 2 * rates[7]  # the cosine of 12 steps goes on where that of 8 was at its end
    assert rates[11] == pytest.approx(min(rates[8:]))


def test_an_extended_run_still_needs_its_data(one_step, small_recipe):
    progress = checkpoint.latest(one_step / "checkpoints") / "progress.json"
    content = json.loads(progress.read_text())
    progress.write_text(json.dumps(content | {"data_digest": "0" * 64}))
    checksums.add(progress.parent, progress.name)
    with pytest.raises(checkpoint.CheckpointError, match="on other data"):
        train(load_recipe(str(small_recipe), LONGER), one_step, resume=True)


def test_a_finished_run_has_nothing_left_to_train(runs, small_recipe, capfd):
    """It says so, without Megatron, and changes nothing; so does one that --steps has ended."""
    for steps, last in (((), 8), (("--steps", "5"), 5)):
        out = runs(None if last == 8 else 5)
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        argv = ["train", str(small_recipe), "--out", str(out), "--resume", *steps]
        assert cli.main(argv) == 0
        said = capfd.readouterr().out
        assert (
            f"complete at step {last}: nothing is left to train. To extend it, resume with --s"
            in said
        )
        assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    argv = ["train", str(small_recipe), "--out", str(runs(None)), "--resume", "--steps", "5"]
    assert cli.main(argv) == 0  # the whole schedule is done: only a longer one goes on
    assert "resume with --set schedule.train_iters=N" in capfd.readouterr().out


def test_a_checkpoint_trained_on_other_data_is_refused(small, one_step):
    progress = checkpoint.latest(one_step / "checkpoints") / "progress.json"
    content = json.loads(progress.read_text())
    progress.write_text(json.dumps(content | {"data_digest": "0" * 64}))
    checksums.add(progress.parent, progress.name)
    with pytest.raises(checkpoint.CheckpointError, match="on other data"):
        train(small, one_step, resume=True)


@pytest.fixture
def two_checkpoints(runs, tmp_path) -> Path:
    """A run that was stopped after five steps, with the checkpoints of 3 and 5."""
    return shutil.copytree(runs(5), tmp_path / "run", symlinks=True)


def flip(path: Path) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_named_and_an_older_one_goes_on(
    small_recipe, two_checkpoints, unbroken
):
    out = two_checkpoints
    shard = next((out / "checkpoints" / "iter_0000005").glob("*.distcp"))
    flip(shard)
    small = load_recipe(str(small_recipe))
    offer = r"is damaged.*older .*iter_0000003 is whole: resume from it with --resume-from 3"
    with pytest.raises(checkpoint.CheckpointError, match=f"{shard} {offer}"):
        train(small, out, resume=True)
    with pytest.raises(RunFolderError, match=r"--resume-from 4: .* of iterations 3, 5"):
        train(small, out, resume_from=4)
    train(small, out, steps=6, resume_from=3)  # and saves at 6, not at 5
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == [
        "iter_0000003", "iter_0000006", "latest_checkpointed_iteration.txt",
        "superseded-iter_0000005",
    ]  # fmt: skip
    train(small, out, resume=True)
    assert losses(out) == losses(unbroken)


def test_a_checkpoint_is_verified_unless_the_recipe_says_not(small_recipe, two_checkpoints):
    listed = two_checkpoints / "checkpoints" / "iter_0000005" / checksums.NAME
    table = json.loads(listed.read_text())
    assert set(table) == {p.name for p in listed.parent.iterdir()} - {checksums.NAME}
    table["metadata.json"]["crc32"] = "00000000"
    listed.write_text(json.dumps(table))
    with pytest.raises(checkpoint.CheckpointError, match=r"metadata\.json is damaged"):
        train(load_recipe(str(small_recipe)), two_checkpoints, resume=True)
    unverified = load_recipe(str(small_recipe), ["checkpoint.verify_checksums=false"])
    with pytest.raises(checkpoint.CheckpointError, match="another recipe"):  # it went on to that
        train(unverified, two_checkpoints, resume=True)


def test_a_length_that_no_memory_holds_is_not_believed_of_a_checkpoint(small, one_step):
    saved = checkpoint.latest(one_step / "checkpoints")
    content = json.loads((saved / "progress.json").read_text())
    content["recipe"]["schedule"]["train_iters"] = 10**12
    (saved / "progress.json").write_text(json.dumps(content))
    checksums.add(saved, "progress.json")
    with pytest.raises(MegacppError, match=r"schedule\.train_iters = 1000000000000: at least"):
        train(small, one_step, resume=True)


@pytest.mark.parametrize("why", ["damaged", "another recipe"])
def test_a_refused_resume_from_changes_nothing(small_recipe, two_checkpoints, why):
    checkpoints = two_checkpoints / "checkpoints"
    changed = []
    if why == "damaged":
        flip(next((checkpoints / "iter_0000003").glob("*.distcp")))
    else:
        changed = ["optimizer.lr=0.5"]
    before = sorted(os.listdir(checkpoints))
    with pytest.raises(checkpoint.CheckpointError, match=why):
        train(load_recipe(str(small_recipe), changed), two_checkpoints, resume_from=3)
    assert sorted(os.listdir(checkpoints)) == before


@pytest.mark.parametrize(
    ("iteration", "said"),
    [("-1", "is at least 0"), ("0", "has complete checkpoints of iterations")],
)
def test_imported_weights_are_resumed_from_by_their_number(
    small_recipe, two_checkpoints, capfd, iteration, said
):
    """`megacpp import` makes the checkpoint of iteration 0, which may be the older good one."""
    argv = ["train", str(small_recipe), "--out", str(two_checkpoints), "--resume-from", iteration]
    assert cli.main(argv) == 2
    assert said in capfd.readouterr().err


def test_the_newest_checkpoints_are_kept(small_recipe, tmp_path):
    keep = ["checkpoint.keep_latest=2", "checkpoint.save_interval=1"]
    train(load_recipe(str(small_recipe), keep), tmp_path / "run", steps=4)
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "iter_0000003", "iter_0000004", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip


def test_a_checkpoint_under_another_iterations_name_is_refused(small, one_step):
    checkpoints = one_step / "checkpoints"
    (checkpoints / "iter_0000001").rename(checkpoints / "iter_0000006")
    with pytest.raises(checkpoint.CheckpointError, match=r"iter_0000006 is of iteration 1, by its"):
        train(small, one_step, resume=True)


@pytest.mark.parametrize("content", [
    {"iteration": "1"}, {"iteration": 1.0}, {"iteration": True}, {"consumed_samples": None},
    {"recipe": []}, {"data_digest": 7}, {"more": 1}, {"consumed_samples": 9}, {"recipe": {}},
    *({"recipe": {"schedule": {"train_iters": length, "global_batch_size": 4}}}
      for length in (None, 0, -5, 2.5, True, "8", 1e400, [8])),
], ids=str)  # fmt: skip
def test_a_checkpoint_whose_progress_is_not_one_is_refused(one_step, content):
    saved = checkpoint.latest(one_step / "checkpoints")
    progress = saved / "progress.json"
    progress.write_text(json.dumps(json.loads(progress.read_text()) | content))
    with pytest.raises(checkpoint.CheckpointError, match=r"progress\.json cannot be read"):
        checkpoint.load(saved, None, None, None, verify=False)


def test_a_checkpoint_that_a_kill_left_without_its_name_goes_on(small, one_step, capfd):
    checkpoints = one_step / "checkpoints"
    (checkpoints / "iter_0000001").rename(checkpoints / ".tmp-iter_0000001")
    with pytest.raises(RunFolderError, match="already holds a run"):
        train(small, one_step)
    (checkpoints / "iter_0000001").rename(checkpoints / ".tmp-iter_0000001")
    capfd.readouterr()
    train(small, one_step, steps=2, resume=True)
    assert "iter_0000001 was complete, but a kill left it as .tmp-" in capfd.readouterr().err
    assert "resumed from the checkpoint of step 1" in receipts.read(one_step / "receipt.json")[
        "notes"]  # fmt: skip


def test_a_save_sums_every_byte_once_and_torch_sums_none(tmp_path, monkeypatch):
    """So checksums cost no more than in Megatron's save: ours are instead of torch's own, which
    nobody reads. test_checkpoints.py has that they are counted beside the write."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    from megacpp_mcore.training.checkpoints import writer
    from megacpp_mcore.training.cpu.megatron_setup import quiet, single_process

    summed = []

    def crc32(data, before=0):
        summed.append(len(data))
        return zlib.crc32(data, before)

    monkeypatch.setattr(writer, "zlib", SimpleNamespace(crc32=crc32))
    torch.serialization.set_crc32_options(True)
    writer.install()
    writer.keep_no_process(asynchronous=False)
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.randn(1 << 20))}
    saved = tmp_path / "saved"
    saved.mkdir()
    with quiet(), single_process(1):
        dist_checkpointing.save(state, str(saved))
    assert checksums.verify(saved)
    assert sum(summed) == sum(path.stat().st_size for path in saved.glob("*.distcp")) > 1 << 22
    assert not torch.serialization.get_crc32_options()


def test_a_checkpoint_with_code_in_its_index_is_refused_before_it_runs(small, one_step, tmp_path):
    class Planted:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "code ran"),)

    index = checkpoint.latest(one_step / "checkpoints") / ".metadata"
    index.write_bytes(pickle.dumps(Planted()))
    checksums.add(index.parent, index.name)
    with pytest.raises(checkpoint.CheckpointError, match=r"names posix\.mkdir, which no index"):
        train(small, one_step, resume=True)
    assert not (tmp_path / "code ran").exists()


def test_a_half_written_checkpoint_is_never_loaded(one_step):
    checkpoints = one_step / "checkpoints"
    (checkpoints / ".tmp-iter_0000002").mkdir()
    (checkpoints / "iter_0000003").mkdir()  # no metadata: not one of ours
    assert checkpoint.latest(checkpoints).name == "iter_0000001"


def test_a_half_deleted_checkpoint_is_not_passed_over_for_a_start_at_step_1(small, one_step):
    shard = next(checkpoint.latest(one_step / "checkpoints").glob("*.distcp"))
    shard.unlink()
    with pytest.raises(RunFolderError, match=r"iter_0000001 is not complete.*move it away"):
        train(small, one_step, resume=True)


def test_an_older_checkpoint_than_a_half_deleted_one_goes_on(
    small, two_checkpoints, unbroken, capfd
):
    next((two_checkpoints / "checkpoints" / "iter_0000005").glob("*.distcp")).unlink()
    train(small, two_checkpoints, resume=True)
    assert "iter_0000005 is not complete: resuming from the older" in capfd.readouterr().err
    assert losses(two_checkpoints) == losses(unbroken)


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


def test_nothing_is_deleted_before_the_new_run_can_start(small_recipe, one_step, tmp_path):
    before = sorted(one_step.rglob("*"))
    absent = load_recipe(str(small_recipe), [f'data.data_path=["{tmp_path}/nowhere"]'])
    with pytest.raises(DataError, match="megacpp data build"):
        train(absent, one_step, overwrite=True)
    assert set(before) <= set(one_step.rglob("*"))
    assert losses(one_step)


def test_nothing_is_deleted_that_no_run_wrote(small, one_step):
    checkpoints = one_step / "checkpoints"
    (checkpoints / "notes.txt").write_text("mine")
    (checkpoints / "iter_best").mkdir()
    (one_step / "mine.txt").write_text("mine")
    train(small, one_step, steps=2, overwrite=True)
    assert (checkpoints / "notes.txt").read_text() == (one_step / "mine.txt").read_text() == "mine"
    assert (checkpoints / "iter_best").is_dir()
    assert not (checkpoints / "iter_0000001").exists() and len(losses(one_step)) == 2


@pytest.mark.parametrize("foreign", ["another program's", "a file of somebody's"])
def test_a_checkpoint_that_no_run_of_this_lane_wrote_is_not_deleted(small, one_step, foreign):
    folder = one_step / "checkpoints" / "iter_0000001"
    if foreign == "another program's":
        (folder / "progress.json").unlink()
    else:
        (folder / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="iter_0000001 is a checkpoint that no run on the CPU"):
        train(small, one_step, overwrite=True)
    assert folder.is_dir() and losses(one_step)


@pytest.mark.parametrize("name", ["iter_0000001", ".tmp-iter_0000001", ".old-iter_0000009"])
def test_a_new_run_starts_beside_no_checkpoint_of_another_program(small, tmp_path, name):
    """Megatron's own formats have other files: a save of the same step would take its place."""
    foreign = tmp_path / "run" / "checkpoints" / name / "mp_rank_00" / "model_optim_rng.pt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine")
    with pytest.raises(RunFolderError, match=f"{name} is a checkpoint that no run on"):
        train(small, tmp_path / "run", steps=1)
    assert foreign.read_text() == "mine"


def test_two_processes_cannot_train_in_one_folder(small, tmp_path):
    from megacpp_mcore.training.run_folder import RunFolder

    first = RunFolder(tmp_path / "run")
    first.claim(resume=False, overwrite=False)
    with pytest.raises(RunFolderError, match="another process"):
        train(small, tmp_path / "run")
    first.release()


@pytest.mark.parametrize("kind", ["FIFO", "link", "folder"])
@pytest.mark.parametrize("name", [".lock", "checkpoints", "heartbeat"])
def test_what_stands_for_a_part_of_the_folder_is_refused_at_once(tmp_path, name, kind):
    from megacpp_mcore.training.run_folder import RunFolder

    (tmp_path / "mine").write_text("mine")
    path = tmp_path / "run" / name
    path.parent.mkdir()
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "mine")
    elif name == ".lock":
        path.mkdir()
    else:
        pytest.skip("which it is")
    with pytest.raises(RunFolderError, match=rf"{name}"):
        RunFolder(tmp_path / "run").claim()
    assert (tmp_path / "mine").read_text() == "mine"


def test_what_kills_have_left_of_small_files_goes(tmp_path):
    from megacpp_mcore.training.run_folder import RunFolder

    (tmp_path / "checkpoints").mkdir()
    tracker = "checkpoints/.latest_checkpointed_iteration.txt.0f.tmp"
    for name in (".receipt.json.0f.tmp", ".report.html.0f.tmp", tracker, ".mine.tmp"):
        (tmp_path / name).write_text("half")
    folder = RunFolder(tmp_path)
    folder.claim()
    folder.release()
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"checkpoints", ".lock", ".mine.tmp"}


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    """Lustre mounted without them answers so."""
    from megacpp_mcore.training.run_folder import RunFolder

    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with pytest.raises(RunFolderError, match=r"Function not implemented: .*/\.lock"):
        RunFolder(tmp_path / "run").claim()


def test_missing_data_is_refused_with_how_to_build_it(small_recipe, tmp_path):
    recipe = load_recipe(str(small_recipe), [f'data.data_path=["{tmp_path}/nowhere"]'])
    with pytest.raises(DataError, match="megacpp data build"):
        train(recipe, tmp_path / "run")


@pytest.mark.parametrize("overrides", [
    "launch.device=cuda moe.moe_grouped_gemm=true", "precision.bf16=true",
    "optimizer.optimizer=muon", "checkpoint.save=elsewhere",
    "data.reset_attention_mask=true", "schedule.exit_duration_in_mins=5",
    "moe.moe_per_layer_logging=true",
    "model.add_bias_linear=true moe.moe_shared_expert_intermediate_size=null",
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
