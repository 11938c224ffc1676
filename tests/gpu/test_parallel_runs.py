"""The runs of test_parallel_losses.py as far as a machine without a GPU goes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import parallel_launches
import parallel_runs
import psutil
import pytest
import warm
from parallel_layouts import ONE, ROUNDING, RUNS, SAVED, SEED, STEPS, STOCK, Run
from parallel_runs import Packed
from parallel_verdicts import Outcome, differences, table, unlike_in_print

from megacpp_mcore import receipts
from megacpp_mcore.recipe import check, load_recipe

DP2 = next(run for run in RUNS if run.name == "dp2")


@pytest.fixture
def packed(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGACPP_MEGATRON_LM", str(tmp_path / "checkout"))
    found = Packed(tmp_path / "out", ["0", "1", "2", "3"])
    for run in (SEED, ONE, *RUNS):
        (found.out / run.name).mkdir()
    return found


@pytest.mark.slow
def test_megatron_takes_the_words_of_every_run(packed):
    runs = (SEED, ONE, *RUNS, *STOCK)
    recipes = [load_recipe(f"{packed.out}/recipe.toml", packed._overrides(run)) for run in runs]
    with warm.as_sys_executable():
        reports = dict(zip((run.name for run in runs), check.check(recipes), strict=True))
    assert {n: (r.refused, r.differences) for n, r in reports.items() if not r.ok} == {}
    for run in runs:
        words, _ = packed._command(run)
        assert ("megacpp_mcore.pretrain" in words) is (run.script is None), run.name


def test_two_gpus_are_two_hosts_of_four_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    two = Packed(tmp_path / "out", parallel_runs.visible_gpus())
    assert parallel_runs.ranks_of(two.gpus[:2]) == 4
    for run in (SEED, ONE, *RUNS):
        (two.out / run.name).mkdir()
    two.outcomes["seed"] = outcome([])
    (ep4,) = (run for run in RUNS if run.name == "ep4")
    two.gpus = ["0", "0", "1"]
    assert not two._can_start(ep4)  # two of its ranks would be on GPU 1
    two.gpus.append("1")
    assert two._can_start(ep4) and two._held(ep4) == 2 and two._held(DP2) == 2
    hosts = [two._command(ep4, host, port=7) for host in (0, 1)]
    for host, (words, environment) in enumerate(hosts):
        assert environment["NCCL_HOSTID"] == str(host)
        assert words[words.index("--node-rank") + 1] == str(host)
        assert words[words.index("--nproc-per-node") + 1] == "2" and "--standalone" not in words
    same = [[w for w in words if w not in ("0", "1")] for words, _ in hosts]
    assert same[0] == same[1] and "launch.nnodes=2" in same[0]
    words, environment = two._command(DP2)
    assert "--standalone" in words and "NCCL_HOSTID" not in environment


def test_a_launch_of_two_hosts_ends_with_either(tmp_path, monkeypatch):
    """The first to fail ends the other; both logs are read for what was said."""
    two = Packed(tmp_path / "out", ["0", "1"], limit_s=20)
    program = (
        "import sys, time; time.sleep({}); print('OSError: host {}'); "
        "print('ERROR:megatron.core:no make'); print('some more'); sys.exit({})"
    )

    def launch(first, second):
        ends = [(first, 0), (second, 1)]
        monkeypatch.setattr(two, "_command", lambda run, host, port: (
            [sys.executable, "-c", program.format(ends[host][0][0], host, ends[host][0][1])],
            dict(os.environ),
        ))  # fmt: skip
        return two._end_of(Run("four", 4), ["0", "1"])

    assert launch((0, 0), (0.3, 0)) is None
    began = time.monotonic()
    assert launch((60, 0), (0, 3)) == (
        "exit status 3:\nOSError: host 1\nERROR:megatron.core:no make"
    )
    assert time.monotonic() - began < 15
    two.limit_s = 0.5
    assert "no end within 0 s" in launch((60, 0), (0, 0))


def test_an_outcome_is_there_as_soon_as_its_run_has_ended(tmp_path, monkeypatch):
    """Also while other runs go on; and no run outlives the last test that waits for one."""
    packed = Packed(tmp_path / "out", ["0"], limit_s=60)
    seconds = {"seed": 0, "one": 0, "long": 60, "later": 0}
    monkeypatch.setattr(packed, "_command", lambda run, host, port: (
        [sys.executable, "-c", f"import time; time.sleep({seconds[run.name]})"], dict(os.environ)
    ))  # fmt: skip
    long, later = Run("long"), Run("later", start=("long", SAVED))
    began = time.monotonic()
    outcomes = packed.begin((SEED, ONE, long, later))
    assert outcomes["one"].reason is None and "long" not in packed.outcomes
    assert "later" in outcomes and "stock" not in outcomes
    packed.stop()
    assert outcomes["long"].reason.startswith("stopped")
    with pytest.raises(RuntimeError, match="the runs have ended without later"):
        outcomes["later"]
    with pytest.raises(KeyError):
        outcomes["stock"]
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_the_ranks_of_a_launch_that_is_ended_end_with_it(tmp_path):
    """A real torchrun: it makes every rank a session of its own, which killing its own leaves."""
    program = tmp_path / "rank.py"
    program.write_text("import os, time\nopen(os.environ['RANK'], 'w').write(str(os.getpid()))\n"
                       "time.sleep(120)\n")  # fmt: skip
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    agent = subprocess.Popen([sys.executable, *words], cwd=tmp_path, start_new_session=True)
    pids = [tmp_path / "0", tmp_path / "1"]
    while not all(path.exists() and path.read_text() for path in pids):
        assert agent.poll() is None
        time.sleep(0.1)
    ranks = [psutil.Process(int(path.read_text())) for path in pids]
    assert "no end within 0 s" in parallel_launches.status([agent], 0.1)
    gone, alive = psutil.wait_procs(ranks, timeout=10)
    assert len(gone) == 2 and not alive and agent.poll() is not None


def outcome(losses, norm=2.0, reason=None):
    steps = range(STEPS - len(losses) + 1, STEPS + 1)
    return Outcome(dict(zip(steps, losses, strict=True)), dict.fromkeys(steps, norm), 1.0, reason)


def told(words, found, run, **others):
    outcomes = {ONE.name: outcome([4.0] * STEPS), run.name: found, **others}
    assert words in " ".join(differences(run, outcomes))
    assert f"DIFFERENT: {words}" in table([run], outcomes)


def test_a_run_that_differs_is_told():
    one = outcome([4.0] * STEPS)
    assert differences(DP2, {ONE.name: one, DP2.name: one}) == []
    told("exit status 1", outcome([], reason="exit status 1"), DP2)
    told("no losses of steps [1]", outcome([4.0] * (STEPS - 1)), DP2)
    told("step 20: loss 4.2", outcome([4.0] * (STEPS - 1) + [4.2]), DP2)
    told("step 20: loss nan", outcome([4.0] * (STEPS - 1) + [float("nan")]), DP2)
    told("step 1: gradient norm 2.1", outcome([4.0] * STEPS, norm=2.1), DP2)


def test_a_run_may_be_off_by_twice_what_rounding_alone_does():
    rounding = outcome([4.0] * 11 + [4.04] + [4.0] * (STEPS - 12))  # a spike, in one step
    others = {ROUNDING[0].name: rounding}
    late = outcome([4.0] * 12 + [4.12] * (STEPS - 12))
    assert differences(DP2, {ONE.name: outcome([4.0] * STEPS), DP2.name: late, **others}) == []
    told("step 13: loss 4.12", late, DP2)
    told("step 11: loss 4.12", outcome([4.0] * 10 + [4.12] * (STEPS - 10)), DP2, **others)
    told("step 12: loss 4.12", outcome([4.0] * 11 + [4.12] * (STEPS - 11)), ROUNDING[0])


def test_a_run_that_resumes_goes_on_where_the_other_run_was():
    run = Run("tp2-from-dp2", 2, start=("dp2", 10))
    dp2 = outcome([4.05] * STEPS, norm=2.2)  # in the bounds of step 20, not of step 1
    outcomes = {ONE.name: outcome([4.0] * 10 + [4.04] * 10), "dp2": dp2}
    goes_on = outcome([4.05] * 10, norm=2.2)
    assert differences(run, outcomes | {run.name: goes_on}) == []
    told("step 11: gradient norm 2.0", outcome([4.05] * 10, norm=2.0), run, dp2=dp2)
    told("step 11: loss 4.02", outcome([4.02] + [4.05] * 9, norm=2.2), run, dp2=dp2)


RECEIPTS = Path(__file__).parents[2] / "examples/receipts/h200/layouts-2xh200"


COMMITTED = {path.stem: path for path in RECEIPTS.glob("*.json")}


@pytest.mark.parametrize(
    "run", [run for run in RUNS if run.name in COMMITTED], ids=lambda run: run.name
)
def test_receipts_of_h200s_have_the_losses_of_one(run):
    """All of one call on two GPUs; four ranks are two hosts of two."""
    outcomes = {
        name: Outcome(*parallel_runs._read(path, RECEIPTS / "none"))
        for name, path in COMMITTED.items()
    }
    assert differences(run, outcomes) == []
    receipt = receipts.read(COMMITTED[run.name])
    assert receipt["topology"]["world_size"] == run.gpus
    assert receipt["lane"]["device"]["count"] == min(run.gpus, 2)
    assert receipt["lane"]["device"]["name"] == "NVIDIA H200"


def test_gpus_are_shared_out_emptiest_first(packed):
    packed.gpus.remove("2")
    assert packed._free()[-1] == "2" and packed._can_start(SEED)
    assert not packed._can_start(ONE)  # the seed run has not ended
    packed.outcomes["seed"] = outcome([])
    packed.gpus = ["1", "1", "3"]
    assert packed._can_start(DP2) and DP2.gpus == 2
    assert not packed._can_start(Run("four", 4))


def test_losses_of_megatrons_own_log(tmp_path):
    """The second of its lines has the mean of the first two steps."""
    row = " iteration {:8}/      20 | lm loss: {:.6E} | loss scale: 1.0 | grad norm: {} |\n"
    shown = [(1, 4.868805, 14.686), (2, 4.889406, 14.157), (3, 4.367006, 11.618)]
    (tmp_path / "log").write_text("".join(row.format(*values) for values in shown))
    losses, norms = parallel_runs._read(tmp_path / "receipt.json", tmp_path / "log")
    assert losses == pytest.approx({1: 4.868805, 2: 4.910007, 3: 4.367006}, abs=1e-6)
    assert norms == {1: 14.686, 2: 14.157, 3: 11.618}
    assert parallel_runs._read(tmp_path / "receipt.json", tmp_path / "absent") == ({}, {})


def test_a_loss_that_the_script_did_not_print_is_told():
    ours = outcome([4.0] * STEPS)
    assert unlike_in_print(outcome([4.0] * STEPS), ours) == []
    assert unlike_in_print(outcome([4.0] * (STEPS - 1) + [4.000001]), ours)
    assert unlike_in_print(outcome([4.0] * STEPS, norm=2.001), ours)
    assert unlike_in_print(outcome([4.0] * STEPS, norm=float("nan")), ours)
    assert unlike_in_print(outcome([]), outcome([])) and unlike_in_print(outcome([4.0]), ours)
