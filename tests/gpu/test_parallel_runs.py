"""The runs of test_parallel_losses.py as far as a machine without a GPU goes."""

import parallel_runs
import pytest
from parallel_runs import ONE, RUNS, SEED, STEPS, STOCK, Outcome, Packed, Run

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
    runs = (SEED, ONE, *RUNS, STOCK)
    recipes = [load_recipe(f"{packed.out}/recipe.toml", packed._overrides(run)) for run in runs]
    reports = dict(zip((run.name for run in runs), check.check(recipes), strict=True))
    assert {n: (r.refused, r.differences) for n, r in reports.items() if not r.ok} == {}
    for run in runs:
        words, _ = packed._command(run)
        assert ("megacpp_mcore.pretrain" in words) is (run.script is None), run.name


def outcome(losses, norm=2.0, reason=None):
    steps = range(STEPS - len(losses) + 1, STEPS + 1)
    return Outcome(dict(zip(steps, losses, strict=True)), dict.fromkeys(steps, norm), 1.0, reason)


def test_a_run_that_differs_is_told(packed):
    one, run = outcome([4.0] * STEPS), DP2
    assert parallel_runs.differences(run, one, one) == []

    def told(words, found, run=run):
        assert words in " ".join(parallel_runs.differences(run, found, one))
        assert f"DIFFERENT: {words}" in parallel_runs.table([run], {ONE.name: one, run.name: found})

    told("exit status 1", outcome([], reason="exit status 1"))
    told("no losses of steps [1]", outcome([4.0] * (STEPS - 1)))
    told("step 20: loss 4.2", outcome([4.0] * (STEPS - 1) + [4.2]))
    told("step 20: loss nan", outcome([4.0] * (STEPS - 1) + [float("nan")]))
    told("step 1: gradient norm 2.1", outcome([4.0] * STEPS, norm=2.1))
    resumed = Run("resumed", start=("one", 10))
    told("step 11: gradient norm 2.1", outcome([4.0] * 10, norm=2.1), resumed)


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
