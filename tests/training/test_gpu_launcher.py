"""What `megacpp train --gpus N` hands to its ranks, and what it says of their end."""

import json
import os
import subprocess
from types import SimpleNamespace

import pytest
import receipt_samples as samples

from megacpp_mcore import cli, receipts
from megacpp_mcore.dispatch import DispatchError
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.training import heartbeat
from megacpp_mcore.training.gpu import launcher, torchrun
from megacpp_mcore.training.gpu.torchrun import RanksOutcome


@pytest.fixture
def started(monkeypatch):
    """The words of the ranks, which are not started."""
    words = []

    def run_ranks(module, argv, gpus):
        words.extend(argv)
        return RanksOutcome(0)

    monkeypatch.setattr(launcher, "run_ranks", run_ranks)
    monkeypatch.setattr(launcher, "check_packages", lambda recipe, yardstick: None)
    monkeypatch.setattr(launcher, "_check", lambda recipe, gpus, resume: None)
    return words


@pytest.mark.parametrize("yardstick", [False, True])
def test_the_yardstick_has_m_in_the_place_of_r(started, yardstick):
    launcher.launch_ranks("nam56r", (), 1, "out", yardstick=yardstick)
    pattern = started[started.index("--hybrid-layer-pattern") + 1]
    ours = load_recipe("nam56r").plan.megatron_pattern
    assert "G" in ours and pattern == (ours.replace("G", "M") if yardstick else ours)
    assert ("--megacpp-yardstick" in started) is yardstick


def test_a_backend_that_nothing_reads_is_refused_before_a_rank_starts(started):
    """The yardstick, which has no R, reads none."""
    named = ["backends.m2rnn=reference"]
    launcher.launch_ranks("nam56r", named, 1, "out", yardstick=True)
    launcher.launch_ranks("nam56r", named, 1, "out")
    started.clear()
    with pytest.raises(
        DispatchError, match=r'backends\.m2rnn = "reference": no part of this model'
    ):
        launcher.launch_ranks("nam56r", [*named, "model.pattern=AEMEAEMEAEME"], 1, "out")
    assert not started


def test_the_ranks_are_told_which_step_to_profile(started):
    launcher.launch_ranks("nam56r", (), 1, "out")
    assert "--megacpp-profile" not in started
    launcher.launch_ranks("nam56r", (), 1, "out", profile=7)
    assert started[started.index("--megacpp-profile") + 1] == "7"


@pytest.mark.parametrize("step", ["0", "9"])
def test_a_step_that_the_run_has_not_cannot_be_profiled(started, capsys, step):
    words = ["train", "nam56r", "--gpus", "1", "--set", "schedule.train_iters=8"]
    words += ["--set", "schedule.lr_warmup_iters=1"]
    assert cli.main([*words, "--profile", step]) == 2
    assert f"step {step} cannot be profiled: the run's steps are 1 to 8" in capsys.readouterr().err
    assert not started


@pytest.fixture
def resuming(tmp_path, monkeypatch):
    """The words that resume a run of nam56r, of two GPUs, which has a checkpoint."""
    out, saved = tmp_path / "out", tmp_path / "saved"
    overrides = [f"checkpoint.load={saved}", f"checkpoint.save={saved}"]
    recipe = load_recipe("nam56r", [*overrides, "launch.nproc_per_node=2"])
    entry = receipts.recipe_entry("nam56r", recipe.to_dict())
    samples.train(out / "receipt.json", recipe=entry)
    monkeypatch.setattr(launcher, "newest", lambda folder: saved)
    sets = [word for override in overrides for word in ("--set", override)]
    return ["train", "nam56r", "--out", str(out), "--resume", *sets]


def test_a_run_is_resumed_in_another_layout(started, resuming):
    for layout in (
        "parallel.expert_model_parallel_size=4", "schedule.micro_batch_size=2",
        "schedule.train_iters=200_000", "launch.cuda_graph_impl=none", "checkpoint.keep_latest=2",
    ):  # fmt: skip
        assert cli.main([*resuming, "--gpus", "4", "--set", layout]) == 0, layout
    assert started


@pytest.mark.parametrize("change", [
    "schedule.global_batch_size=32", "optimizer.lr=1e-4", "mamba3.decay_floor=1e-4",
    "model.pattern=AEMEAEMEAEMM", "parallel.use_distributed_optimizer=false",
    "checkpoint.finetune=true", "checkpoint.override_opt_param_scheduler=true",
    "checkpoint.use_checkpoint_opt_param_scheduler=true",
])  # fmt: skip
def test_another_recipe_is_refused_before_any_rank_is_started(change, started, resuming, capsys):
    more = ["parallel.overlap_param_gather=false"] if "distributed" in change else []
    sets = [word for each in (change, *more) for word in ("--set", each)]
    assert cli.main([*resuming, "--gpus", "4", *sets]) == 2
    said = capsys.readouterr().err
    assert f"has another recipe: {change.partition('=')[0]} was " in said
    assert "give another --out" in said and not started


def test_a_run_without_a_checkpoint_may_have_any_recipe(started, resuming, monkeypatch):
    monkeypatch.setattr(launcher, "newest", lambda folder: None)
    assert cli.main([*resuming, "--gpus", "4", "--set", "optimizer.lr=1e-4"]) == 0 and started


@pytest.mark.parametrize("status", [0, 1])
def test_json_is_the_receipt_alone_and_the_rest_goes_to_stderr(
    started, monkeypatch, tmp_path, capfd, status
):
    out = tmp_path / "run"

    def ranks(module, argv, gpus):
        subprocess.run(["sh", "-c", "echo step 1/2"], check=True)
        samples.train(out / "receipt.json")
        return RanksOutcome(status, "rank 0 of 1 failed" if status else None)

    monkeypatch.setattr(launcher, "run_ranks", ranks)
    words = ["train", "nam56r", "--gpus", "1", "--out", str(out)]
    assert cli.main([*words, "--json"]) == status
    printed = capfd.readouterr()
    assert json.loads(printed.out) == json.loads((out / "receipt.json").read_text())
    assert "step 1/2" in printed.err
    assert cli.main(words) == status
    assert capfd.readouterr().out == "step 1/2\n"


def test_json_is_nothing_where_the_run_wrote_no_receipt(started, monkeypatch, tmp_path, capfd):
    """Ranks that refuse leave the receipt of the run before in the folder."""
    samples.train(tmp_path / "receipt.json")
    monkeypatch.setattr(launcher, "run_ranks", lambda *words: RanksOutcome(2, "rank 0 of 1 failed"))
    words = ["train", "nam56r", "--gpus", "1", "--out", str(tmp_path), "--json"]
    assert cli.main(words) == 2
    assert capfd.readouterr().out == ""


@pytest.fixture
def failed(tmp_path):
    """failed(exitcode, said): a rank's failure as torchrun's agent tells it, each later."""
    clock = iter(range(1, 100))

    def make(exitcode: int, said: str | None = None) -> SimpleNamespace:
        at = next(clock)
        file = tmp_path / f"{at}.json"
        if said is not None:
            file.touch()
            os.utime(file, (at, at))
        return SimpleNamespace(exitcode=exitcode, error_file=str(file), timestamp=at, message=said)

    return make


def test_the_rank_that_a_heartbeat_names_is_the_reason(failed):
    """The agent ends a stopped rank with SIGKILL, as it does not heed SIGTERM."""
    named = "HungError: rank 1 on a has made no progress for 31 s"
    stopped = {1: failed(-9), 0: failed(heartbeat.EXIT_STATUS, named)}
    assert torchrun._outcome(stopped, 2) == RanksOutcome(75, f"rank 0 of 2 failed: {named}")
    killed = {0: failed(1, "RuntimeError: Connection closed"), 1: failed(-9)}
    assert torchrun._outcome(killed, 2).reason.startswith("rank 1 of 2 was killed by SIGKILL")


def test_a_rank_that_ends_only_by_sigkill_after_another_failed_is_not_the_reason(failed):
    refused, late = failed(2, "ResumeError: a.distcp is damaged"), failed(-9)
    late.timestamp += torchrun.GRACE_S
    for ranks in ({0: refused, 1: late}, {0: late, 1: refused}):
        assert torchrun._outcome(ranks, 2) == RanksOutcome(
            2, f"rank {0 if ranks[0] is refused else 1} of 2 failed: {refused.message}"
        )


def test_a_refusal_keeps_its_status_when_the_agent_ends_the_rank_that_was_first(failed):
    differ = "DispatchError: ranks chose different backends"
    for codes in ((-15, 2), (2, -15), (-6, 2), (2, 2)):
        ranks = {rank: failed(code, differ) for rank, code in enumerate(codes)}
        assert torchrun._outcome(ranks, 2) == RanksOutcome(2, f"rank 0 of 2 failed: {differ}")
    assert torchrun._outcome({0: failed(-6, differ)}, 2).status == 1
