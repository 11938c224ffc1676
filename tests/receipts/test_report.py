"""`megacpp report show | compare | plot`, through the command."""

import json
import math
import random
import re

import pytest
import receipt_samples as samples

from megacpp_mcore.cli import main
from megacpp_mcore.receipts import bench_row, read, recipe_entry, write
from megacpp_mcore.receipts import run as run_receipt
from megacpp_mcore.receipts.goodput import Goodput
from megacpp_mcore.receipts.intervals import ratio_in_turns, time_ratio
from megacpp_mcore.receipts.show import beside

TRITON = [{"surface": "m2rnn", "requested": "triton", "observed": "triton", "reason": "named"}]


@pytest.fixture
def cli(capsys):
    """Run the command: (exit status, stdout, stderr)."""

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "a.json"
    samples.train(path)
    return path


def verdict(text):
    return next(line for line in text.splitlines() if line.startswith("verdict: "))[9:]


def test_show_tells_where_what_and_how_well(cli, base):
    status, out, err = cli("report", "show", "-v", base)
    assert (status, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "status complete, 80 steps, 40,960 tokens" in lines
    assert "lane 1 x Test CPU (cpu)" in lines
    assert "plan AEMR -> +EMG (1 A, 1 E, 1 M, 1 R)" in lines
    assert "m2rnn auto reference first" in lines
    assert "applied OMP_NUM_THREADS=2" in lines
    assert any(line.startswith("goodput 8") and "in useful steps" in line for line in lines)
    assert any(line.startswith("checkpoint 3.2 s") for line in lines)
    assert any(line.startswith("unigram entropy of the corpus 3.31 the training") for line in lines)
    # the first line holds the path, which is as long as it is
    assert len(lines) < 60 and max(map(len, out.splitlines()[1:])) <= 110


def test_a_runs_folder_stands_for_its_receipt(cli, tmp_path):
    runs = [tmp_path / name for name in "ab"]
    for run in runs:
        samples.train(run / "receipt.json")
    files = [run / "receipt.json" for run in runs]
    assert cli("report", "show", runs[0]) == cli("report", "show", files[0])
    assert cli("report", "show", runs[0], "--json") == cli("report", "show", files[0], "--json")
    compared = cli("report", "compare", *runs)
    assert compared[0] == 0 and compared[1].startswith(f"A  {files[0]}\n")
    status, _, err = cli("report", "show", tmp_path)
    assert status == 2 and "receipt.json" in err


def test_show_tells_of_a_failure_a_gap_and_a_resume(cli, tmp_path):
    path = tmp_path / "r.json"
    samples.train(path, steps=20, status="running")
    run = samples.start(path)
    run.resume(read(path), step=20, tokens=20 * samples.TOKENS)
    run.step(21, tokens=8, ms=1.0, loss=math.nan)
    run.write("failed", "the loss of step 21 is nan")
    status, out, _ = cli("report", "show", path)
    assert status == 0
    assert "failed (the loss of step 21 is nan), 21 steps" in out
    assert "loss of step 21 is nan" in out
    assert "note      resumed from the checkpoint of step 20" in out
    assert "2 processes;" in out


def test_show_tells_how_long_no_process_ran(cli, tmp_path):
    path = tmp_path / "r.json"
    clock = samples.Clock()
    run = samples.start(path, goodput=Goodput(clock=clock, started="2026-11-21T09:00:00Z"))
    clock.sleep(100)
    run.write()
    run = samples.start(path, goodput=Goodput(clock=clock, started="2026-11-21T09:10:00Z"))
    run.resume(read(path), step=0, tokens=0)
    clock.sleep(7)
    run.write()
    _, out, _ = cli("report", "show", path)
    assert "2 processes; 8 min 20 s between them" in out


def test_show_of_a_run_that_has_done_nothing_yet(cli, tmp_path):
    samples.start(tmp_path / "r.json").write()
    status, out, _ = cli("report", "show", tmp_path / "r.json")
    assert status == 0 and "status    running, 0 steps, 0 tokens" in out


def test_show_says_all_backends_of_a_run_at_once_and_labels_its_figures(cli, base):
    _, out, _ = cli("report", "show", base)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "backends reference: m2rnn (why: -v)" in lines and " first" not in out
    assert any(line.startswith("result training loss, mean of the last 20 steps") for line in lines)


def test_show_and_the_page_tell_the_power_of_the_median_warm_step(cli, tmp_path):
    path = tmp_path / "r.json"
    run = samples.start(path)
    for step, (watts, limited) in enumerate(((90.0, 0.0), (688.0, 0.75), (None, None)) * 2, 1):
        run.step(step, tokens=8, ms=1.0, loss=2.0, power_w=watts, power_limited=limited)
    run.write(power_limit_w=700.0)
    _, out, _ = cli("report", "show", path)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "W a GPU 688.0 of 700; 75.0 % of the time at the limit" in lines
    assert not any("power_limit_w" in line for line in lines)
    cli("report", "html", path, "--out", tmp_path / "r.html")
    assert "Power of a GPU, W" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("loss", "entropy", "said"), [(1.0, 2.5112, "1.5112 below"), (2.5112, 1.0, "1.5112 above")]
)
def test_a_loss_is_above_or_below_an_entropy_never_minus_below(loss, entropy, said):
    assert beside(loss, entropy, 4) == said


def test_compare_says_which_way_a_figure_goes(cli, tmp_path):
    """Times: B over A, and in words; of the others whether B is better."""
    slow, fast = samples.bench(te=0.9), samples.bench(te=0.45)
    write(tmp_path / "a.json", slow)
    write(tmp_path / "b.json", fast)
    _, out, _ = cli("report", "compare", tmp_path / "a.json", tmp_path / "b.json")
    rows = [line for line in out.splitlines() if line.startswith("te ")]
    assert "time, B / A" in out and all(" % faster " in row for row in rows)
    _, out, _ = cli("report", "compare", tmp_path / "b.json", tmp_path / "a.json")
    rows = [line for line in out.splitlines() if line.startswith("te ")]
    assert len(rows) == 2 and all(re.search(r" (99|100|101)\.\d % slower ", row) for row in rows)


def test_show_of_a_bench_judges_each_backend_against_the_baseline(cli, tmp_path):
    write(tmp_path / "b.json", samples.bench(te=0.7, liger=1.2, twin=1.0))
    status, out, _ = cli("report", "show", tmp_path / "b.json")
    assert status == 0
    found = {line.split()[0]: line.split()[-1] for line in out.splitlines() if ".." in line}
    assert found["te"] == "keep" and found["liger"] == "drop" and found["twin"] == "undecided"
    assert "rule: margin 1.0 %. drop: its error" in out
    assert "norm     te         none      no driver" in out


@pytest.mark.parametrize(("error", "expected"), [(None, "undecided"), (9e-3, "drop")])
def test_a_fast_backend_that_is_wrong_or_unchecked_is_not_kept(cli, tmp_path, error, expected):
    document = samples.bench(te=0.5)
    for row in document["rows"]:
        if row["backend"] == "te":
            row["error"] = error
            row["tolerance"] = None if error is None else row["tolerance"]
    write(tmp_path / "b.json", document)
    _, out, _ = cli("report", "show", tmp_path / "b.json")
    assert {line.split()[-1] for line in out.splitlines() if line.startswith("te ")} == {expected}


COMPARISONS = {
    "faster": ({"ms": 800.0}, "keep", "time: faster"),
    "slower": ({"ms": 1000.0}, "drop", "time: slower"),
    "the same": ({}, "undecided", "time: "),
    "faster, loss worse": ({"ms": 800.0, "worse": 0.2}, "drop", "loss: worse"),
    "faster, loss better": ({"ms": 800.0, "worse": -0.2}, "keep", "loss: not worse"),
    "faster, too short": ({"ms": 800.0, "steps": 4}, "undecided", "5 a side are enough"),
    "faster, interrupted": (
        {"ms": 800.0, "status": "interrupted"},
        "undecided",
        "B is interrupted",
    ),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_compare_gives_the_verdict_and_its_reasons(cli, base, tmp_path, name):
    changes, expected, reason = COMPARISONS[name]
    samples.train(tmp_path / "b.json", noise=1, backends=TRITON, **changes)
    status, out, err = cli("report", "compare", base, tmp_path / "b.json")
    assert (status, err) == (0, "")
    assert verdict(out) == expected
    assert reason in out
    assert "differs  backends.m2rnn: reference | triton" in out
    assert "rule: margin 1.0 %. drop: the loss is worse, or a step slower." in out


def test_patches_are_shown_and_their_differences_said(cli, base, tmp_path):
    applied = {"a-patch": "1" * 64, "b-patch": "2" * 64}
    for name, patches in (("none", {}), ("two", applied), ("old", None)):
        document = json.loads(base.read_text())
        del document["patches"]
        if patches is not None:
            document["patches"] = {"megatron-core": {"version": "0.19.2", "applied": patches}}
        (tmp_path / name).write_text(json.dumps(document))
    none, two, old = (tmp_path / name for name in ("none", "two", "old"))
    shown = cli("report", "show", two)[1]
    assert "patches   megatron-core 0.19.2: 2 applied" in shown
    assert f"          a-patch (sha256 {'1' * 16})" in shown
    assert "patches   megatron-core 0.19.2: none applied" in cli("report", "show", none)[1]
    said = cli("report", "compare", none, two)[1]
    assert f"differs  patches.megatron-core.applied.a-patch: none | {'1' * 64}" in said
    assert "differs  patches: not recorded | recorded" in cli("report", "compare", old, two)[1]
    assert "differs  patches" not in cli("report", "compare", two, two)[1]


def test_compare_of_a_run_whose_loss_became_nan_says_drop(cli, base, tmp_path):
    run = samples.start(tmp_path / "b.json")
    for step in range(1, 41):
        loss = math.nan if step == 40 else 2.0
        run.step(step, tokens=samples.TOKENS, ms=500.0, loss=loss)
    run.write("failed", "the loss of step 40 is nan")
    _, out, _ = cli("report", "compare", base, tmp_path / "b.json")
    assert verdict(out) == "drop" and "loss: worse, B's is not finite" in out


def test_compare_tells_when_a_longer_compilation_has_paid_for_itself(cli, base, tmp_path):
    path = tmp_path / "b.json"
    document = samples.train(path, ms=800.0)
    for part in (document["goodput"], document["goodput"]["segments"][0]):
        part["seconds"]["compile"] += 10
        part["wall_s"] += 10
    document["goodput"]["useful"] = document["goodput"]["seconds"]["step"] / part["wall_s"]
    write(path, document)
    _, out, _ = cli("report", "compare", base, path)
    assert "B compiles 9.9 s longer, which its faster steps win back in" in out


def test_the_margin_is_what_a_difference_must_exceed(cli, base, tmp_path):
    samples.train(tmp_path / "b.json", ms=820.0, noise=1)
    for margin, keep, drop in ((0.01, "keep", "drop"), (0.2, "undecided", "undecided")):
        _, out, _ = cli("report", "compare", base, tmp_path / "b.json", "--margin", margin)
        assert verdict(out) == keep
        _, out, _ = cli("report", "compare", tmp_path / "b.json", base, "--margin", margin)
        assert verdict(out) == drop
    for margin in ("-0.1", "1", "nan"):
        status, _, err = cli("report", "compare", base, base, "--margin", margin)
        assert status == 2 and "it is a share, 0 or more and below 1" in err


UNLIKE = {
    "lane": (
        {"lane": samples.lane(driver="580.65.06", os="Linux-2")},
        ["lane.driver: none | 580.65.06", "lane.os: Linux | Linux-2"],
    ),
    "recipe": (
        {"recipe": recipe_entry("b", samples.CONTENT | {"model": {"hidden_size": 64}})},
        ["recipe.model.hidden_size: 128 | 64"],
    ),
    "topology": (
        {"topology": samples.TOPOLOGY | {"world_size": 2, "tp": 2}},
        ["topology.tp: 1 | 2", "topology.world_size: 1 | 2"],
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_compare_refuses_unlike_receipts_and_names_each_difference(cli, base, tmp_path, name):
    changes, differences = UNLIKE[name]
    samples.train(tmp_path / "b.json", ms=800.0, **changes)
    status, out, err = cli("report", "compare", base, tmp_path / "b.json")
    assert status == 2
    assert [line.strip() for line in err.splitlines()[1:-1]] == differences
    assert "--allow-unlike" in err
    assert out == ""
    status, out, _ = cli("report", "compare", base, tmp_path / "b.json", "--allow-unlike")
    assert status == 0
    assert all(f"UNLIKE   {difference}" in out for difference in differences)
    assert verdict(out) == "keep"


@pytest.mark.parametrize(
    ("a", "b", "status"),
    [
        ({"backends": {"m2rnn": "triton"}}, {"backends": {"m2rnn": "auto"}}, 0),
        ({"data": {"data_cache_path": "/tmp/a"}}, {"data": {"data_cache_path": "/tmp/b"}}, 0),
        ({"data": {"data_path": ["/tmp/a"]}}, {"data": {"data_path": ["/tmp/b"]}}, 2),
    ],
)
def test_recipes_may_differ_in_backends_and_in_where_indices_are_kept(cli, tmp_path, a, b, status):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, content in zip(paths, (a, b), strict=True):
        samples.train(path, recipe=recipe_entry("nam56r-tiny", samples.CONTENT | content))
    assert cli("report", "compare", *paths)[0] == status


def test_losses_at_other_token_counts_are_not_paired(cli, base, tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "TOKENS", 1024)
    samples.train(tmp_path / "b.json", ms=1600.0)
    _, out, _ = cli("report", "compare", base, tmp_path / "b.json")
    assert "loss: no step that both have at the same number of tokens" in out
    assert verdict(out) == "undecided" and "time: faster" in out  # twice the tokens in 1.8 the time


def test_a_thinned_run_is_compared_on_the_steps_both_kept(cli, base, tmp_path, monkeypatch):
    monkeypatch.setattr(run_receipt, "MAX_ROWS", 64)
    samples.train(tmp_path / "b.json", ms=800.0)
    _, out, _ = cli("report", "compare", base, tmp_path / "b.json")
    assert verdict(out) == "keep"


def test_benches_are_compared_backend_by_backend(cli, tmp_path):
    write(tmp_path / "a.json", samples.bench(te=0.7, gone=1.0))
    write(tmp_path / "b.json", samples.bench(te=0.5, new=1.0))
    status, out, _ = cli("report", "compare", tmp_path / "a.json", tmp_path / "b.json")
    assert status == 0
    assert sum(line.startswith("te ") and "keep: faster" in line for line in out.splitlines()) == 2
    assert "only in A: gone forward" in out and "only in B: new forward" in out


def test_benches_of_unlike_problems_and_a_run_with_a_bench_are_refused(cli, base, tmp_path):
    first, second = samples.bench(te=0.7), samples.bench(te=0.7)
    second["problem"]["sizes"]["tokens"] = 1
    write(tmp_path / "1.json", first)
    write(tmp_path / "2.json", second)
    status, _, err = cli("report", "compare", tmp_path / "1.json", tmp_path / "2.json")
    assert status == 2 and "problem.sizes.tokens: 16384 | 1" in err
    for flags in ([], ["--allow-unlike"]):
        status, _, err = cli("report", "compare", base, tmp_path / "1.json", *flags)
        assert status == 2 and "A is a run, B a bench" in err


def test_a_run_without_a_warm_step_cannot_be_compared(cli, base, tmp_path):
    samples.train(tmp_path / "b.json", steps=1)
    status, _, err = cli("report", "compare", base, tmp_path / "b.json")
    assert status == 2 and "B has no warm step" in err


def test_the_interval_holds_the_true_ratio_as_often_as_it_says():
    """99 % of intervals hold it: of 500, below 480 has a chance of 1e-7 (binomial)."""
    own = random.Random(11)

    def times(count, factor):
        return [factor * own.lognormvariate(0, 0.1) for _ in range(count)]

    ratios = [time_ratio(times(own.randint(5, 60), 1.0), times(40, 0.9)) for _ in range(500)]
    assert sum(ratio.low <= 0.9 <= ratio.high for ratio in ratios) >= 480


@pytest.mark.parametrize(("m", "n", "critical"), [(8, 8, 7), (5, 8, 2), (5, 5, 0), (6, 7, 3)])
def test_the_interval_cuts_off_what_the_mann_whitney_table_says(m, n, critical):
    """Critical U at 1 %, two-sided, from the printed table: so many ratios lie below the low."""
    a = [2.0 ** (-n * i) for i in range(m)]
    b = [2.0**j for j in range(n)]  # the ratios are 2 ** 0, 2 ** 1, ... 2 ** (m n - 1)
    ratio = time_ratio(a, b)
    assert (math.log2(ratio.low), math.log2(ratio.high)) == (critical, m * n - 1 - critical)


def test_drift_widens_the_interval_instead_of_deciding():
    """Both machines slow down by 10 % on their way; neither is faster."""
    own = random.Random(5)
    a, b = ([(1 + step / 2000) * own.gauss(1, 0.002) for step in range(200)] for _ in range(2))
    ratio = time_ratio(a, b)
    assert ratio.low < 0.99 and ratio.high > 1.01


def _in_turns(own, rounds, factor, stays=0.0):
    """Two calls' times by round: a machine that drifts by 10 % and has slow spells, spikes of its
    own for each call, and noise of which `stays` is left in the next round."""
    spell, noise, sides = 0.0, [0.0, 0.0], ({}, {})
    for turn in range(rounds):
        spell = 0.8 * spell + own.gauss(0, 0.03)
        for side, times in enumerate(sides):
            noise[side] = stays * noise[side] + own.gauss(0, 0.02) * (1 - stays**2) ** 0.5
            spike = own.expovariate(10) if own.random() < 0.1 else 0.0
            slow = 0.1 * turn / rounds + spell + noise[side] + spike
            times[turn] = (factor if side else 1.0) * math.exp(slow)
    return sides


@pytest.mark.parametrize(("rounds", "stays"), [(8, 0.0), (20, 0.0), (40, 0.0), (40, 0.4)])
def test_the_interval_by_round_holds_the_true_ratio_as_often_as_it_says(rounds, stays):
    """99.2 % of intervals hold it: of 500, below 480 has a chance of 1e-9 (binomial)."""
    own = random.Random(rounds)
    ratios = [ratio_in_turns(*_in_turns(own, rounds, 0.9, stays)) for _ in range(500)]
    assert sum(ratio.low <= 0.9 <= ratio.high for ratio in ratios) >= 480


def test_by_round_a_drift_that_both_share_is_not_in_the_interval():
    """Half as wide, and more, as that of times which were taken apart."""
    own, widths = random.Random(3), []
    for _ in range(50):
        a, b = _in_turns(own, 40, 0.94)
        for ratio in (ratio_in_turns(a, b), time_ratio([*a.values()], [*b.values()])):
            widths.append(ratio.high - ratio.low)
    assert sum(widths[::2]) < sum(widths[1::2]) / 2


def test_by_round_only_rounds_in_common_count_and_eight_are_needed():
    a = {turn: 1.0 + turn for turn in range(12)}
    b = {turn: 2 * ms for turn, ms in a.items() if turn % 4 != 1} | {99: 1.0}
    assert ratio_in_turns(a, b) == ratio_in_turns(a, dict(reversed(b.items())))
    assert vars(ratio_in_turns(a, b)) == {"value": 2.0, "low": 2.0, "high": 2.0}
    assert ratio_in_turns(a, dict.fromkeys(range(7), 1.0)) is None


def test_a_bench_is_judged_by_round_and_two_benches_are_not(cli, tmp_path):
    """A drift of 30 % hides 5 % from who does not look at the rounds."""

    def table(*names):
        status, out, _ = cli("report", *names)
        assert status == 0
        return next(line for line in out.splitlines() if line.startswith("te "))

    def drifting(te, **turns):
        receipt = samples.bench(te=te)
        for row in receipt["rows"]:
            times = [ms * (1 + 0.3 * turn / 40) for turn, ms in enumerate(row["samples_ms"])]
            judged = {key: row[key] for key in ("error", "tolerance")}
            row |= bench_row(row["backend"], row["phase"], times, **judged, **turns)
        return receipt

    write(tmp_path / "a.json", drifting(0.95, rounds=range(40)))
    assert table("show", tmp_path / "a.json").rstrip().endswith("keep")
    write(tmp_path / "b.json", drifting(0.95))
    assert table("show", tmp_path / "b.json").rstrip().endswith("undecided")
    write(tmp_path / "c.json", drifting(0.9, rounds=range(40)))
    assert "undecided" in table("compare", tmp_path / "a.json", tmp_path / "c.json")


@pytest.mark.parametrize(("fewer", "known"), [(4, False), (5, True)])
def test_five_samples_a_side_are_enough_for_an_interval(fewer, known):
    ratio = time_ratio([1.0] * fewer, [2.0] * 5)
    assert (ratio.value, ratio.low is not None) == (2.0, known)


@pytest.mark.parametrize("action", ["show", "compare", "html"])
def test_a_broken_receipt_is_refused_on_stderr_with_exit_2(cli, base, tmp_path, action):
    bad = tmp_path / "bad.json"
    document = json.loads(base.read_text())
    document["series"]["loss"][7] = "nan"
    bad.write_text(json.dumps(document))
    more = {"show": [], "compare": [base], "html": ["--out", tmp_path / "a.html"]}[action]
    status, _, err = cli("report", action, bad, *more)
    assert status == 2
    assert err.startswith("megacpp: ") and 'series.loss[7]: "nan" is string' in err
    bad.write_text(base.read_text()[:-100])
    status, _, err = cli("report", action, bad, *more)
    assert status == 2 and "is truncated" in err


@pytest.mark.parametrize("arguments", [[], ["draw"], ["show"], ["compare", "a"]])
def test_wrong_usage_exits_2(arguments):
    with pytest.raises(SystemExit) as exit:
        main(["report", *arguments])
    assert exit.value.code == 2
