"""Receipts: built, written, read back, refused, resumed."""

import copy
import itertools
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import receipt_samples as samples
from jsonschema import Draft202012Validator

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.receipts import (
    ReceiptError,
    ReceiptWriteError,
    bench_receipt,
    bench_row,
    read,
    recipe_entry,
    schema,
    validate,
    write,
)
from megacpp_mcore.receipts import run as run_receipt
from megacpp_mcore.receipts.goodput import Goodput
from megacpp_mcore.receipts.lane import code, is_traceable, lane
from megacpp_mcore.receipts.reader import warm_rows
from megacpp_mcore.receipts.run import Work
from megacpp_mcore.recipe import load_recipe

STOCK = Draft202012Validator(schema())


@pytest.fixture(scope="module")
def run_document(tmp_path_factory):
    return samples.train(tmp_path_factory.mktemp("run") / "receipt.json", steps=40)


@pytest.fixture
def document(run_document):
    return copy.deepcopy(run_document)


def test_a_run_reads_back_as_it_was_written(tmp_path):
    path = tmp_path / "runs" / "one" / "receipt.json"
    written = samples.train(path, steps=40)
    assert read(path) == written
    series = written["series"]
    assert series["step"] == list(range(1, 41))
    assert series["tokens"][-1] == 40 * samples.TOKENS == written["result"]["tokens"]
    assert written["evaluations"]["step"] == [0, 20, 40]
    assert written["result"]["status"] == "complete"
    assert written["result"]["final_loss"] == pytest.approx(sum(series["loss"][-20:]) / 20)
    assert written["result"]["final_eval_loss"] == written["evaluations"]["loss"][-1]
    assert written["result"]["peak_memory_bytes"] == max(series["peak_memory_bytes"])
    assert warm_rows(written) == list(range(1, 40))
    goodput = written["goodput"]
    assert sum(goodput["seconds"].values()) == pytest.approx(goodput["wall_s"], rel=0.01)


def test_a_bench_reads_back_as_it_was_written(tmp_path):
    document = samples.bench(te=0.7)
    write(tmp_path / "bench.json", document)
    assert read(tmp_path / "bench.json") == document
    row = document["rows"][2]
    assert (row["backend"], row["phase"], row["n"]) == ("te", "forward", 40)
    assert row["median_ms"] == pytest.approx(np.median(row["samples_ms"]))
    assert row["q1_ms"] == pytest.approx(np.quantile(row["samples_ms"], 0.25))
    assert row["q3_ms"] == pytest.approx(np.quantile(row["samples_ms"], 0.75))


def test_any_json_schema_validator_can_use_the_shipped_schema(document):
    Draft202012Validator.check_schema(schema())
    STOCK.validate(document)
    STOCK.validate(samples.bench(te=0.7))
    document["series"]["loss"][3] = "low"
    assert not STOCK.is_valid(document)


def set_at(document, path, value):
    *parents, last = path
    for key in parents:
        document = document[key]
    document[last] = value


WRONG = {
    "type": (("series", "loss", 3), "low", r"series.loss\[3\]: \"low\" is string; allowed: number"),
    "null where none may be": (("lane", "os"), None, "lane.os: null is null; allowed: string"),
    "unknown key": (("topology", "sp"), 1, "topology: unknown key sp; allowed: world_size, tp"),
    "unknown field": (("extra",), 1, "the receipt: unknown key extra; allowed: schema_version"),
    "enum": (("result", "status"), "done", 'result.status: "done"; allowed: "running", "complete"'),
    "kind": (("kind",), "sweep", 'kind: "sweep"; allowed: "run", "bench"'),
    "minimum": (("topology", "tp"), 0, "topology.tp: 0 breaks minimum 1"),
    "pattern": (("created",), "yesterday", 'created: "yesterday" breaks pattern'),
    "no such day": (("created",), "2026-02-31T00:00:00Z", "created: .* is no date and time"),
    "no such start": (
        ("goodput", "segments", 0, "started"),
        "2026-11-21T25:00:00Z",
        r"goodput.segments\[0\].started: .* is no date and time",
    ),
    "useful": (("goodput", "useful"), 0.2, "goodput.useful: 0.2, but step is"),
    "bench field in a run": (("rows",), [], "rows: does not belong in a receipt of this kind"),
    "run without recipe": (("recipe",), None, "recipe: null is null; allowed: object"),
    "failed without reason": (("result", "status"), "failed", "result.reason: null is null"),
    "nested result": (("result", "extra"), {"a": 1}, "result.extra: .* is object; allowed: string"),
    "boolean for a number": (("topology", "tp"), True, "topology.tp: true is boolean"),
    "nan": (("series", "loss", 3), math.nan, r"series.loss\[3\]: nan is not a JSON number"),
    "infinity": (("result", "final_loss"), math.inf, "result.final_loss: inf is not a JSON"),
    "nan in the recipe": (("recipe", "content", "x"), math.nan, "recipe.content.x: nan is not"),
    "short column": (("series", "loss"), [1.0], "series: columns of unequal length.*'loss': 1"),
    "steps that fall": (("series", "step", 5), 2, r"series.step\[5\]: 2 comes after 5; it must"),
    "world size": (("topology", "world_size"), 8, r"tp \* pp \* cp \* dp is 1, world_size 8"),
    "recipe changed": (("recipe", "content", "model"), {}, "recipe.sha256: .* content hashes to"),
    "parts of goodput": (("goodput", "seconds", "idle"), 99.0, "goodput: the parts add up to"),
    "segments": (("goodput", "segments", 0, "wall_s"), 1.0, r"goodput.segments\[0\]: the parts"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_document_is_refused_with_place_and_what_is_allowed(name, document, tmp_path):
    path, value, message = WRONG[name]
    set_at(document, path, value)
    with pytest.raises(ReceiptError, match=message):
        validate(document)
    with pytest.raises(ReceiptError):
        write(tmp_path / "receipt.json", document)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", ["lane", "series", "goodput", "backends", "code"])
def test_a_missing_field_is_named(field, document):
    del document[field]
    with pytest.raises(ReceiptError, match=f"the receipt: '{field}' is missing"):
        validate(document)


WRONG_ROWS = {
    "median": ("median_ms", 0.5, r"rows\[0\].median_ms: 0.5, but the samples give"),
    "n": ("n", 41, r"rows\[0\].n: 41, but the samples give 40"),
    "error without tolerance": ("error", 0.1, r"rows\[0\]: error and tolerance go together"),
    "too few rounds": ("rounds", [1], r"rows\[0\]: columns of unequal length .*'rounds': 1"),
    "a round twice": ("rounds", [0, 0, *range(2, 40)], r"rows\[0\].rounds\[1\]: 0 comes after 0"),
    "twice": ("phase", "forward_backward", r"rows\[1\]: reference forward_backward is there twice"),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_a_wrong_bench_row_is_refused(name):
    field, value, message = WRONG_ROWS[name]
    document = samples.bench(te=0.7)
    document["rows"][0][field] = value
    with pytest.raises(ReceiptError, match=message):
        validate(document)


def test_a_baseline_without_rows_and_a_row_without_samples_are_refused():
    document = samples.bench(te=0.7)
    document["baseline"] = "liger"
    with pytest.raises(ReceiptError, match="baseline: 'liger' is no backend of the rows"):
        validate(document)
    with pytest.raises(ReceiptError, match="backend 'te', forward: no samples"):
        bench_row("te", "forward", [])


def test_a_bench_is_refused_when_it_is_built_not_when_it_is_written():
    with pytest.raises(ReceiptError, match=r"rows\[0\].phase: \"warmup\"; allowed: \"forward\""):
        bench_receipt(
            problem={"surface": "norm", "dtype": "float32", "sizes": {}},
            rows=[bench_row("reference", "warmup", [1.0])],
            baseline="reference",
            backends=[],
            lane=samples.lane(),
            topology=samples.TOPOLOGY,
            environment={"applied": {}, "kept": {}},
        )


def test_a_receipt_does_not_tell_whose_home_it_was(monkeypatch):
    monkeypatch.setenv("HOME", "/users/ada")
    found = bench_receipt(
        problem={"surface": "norm", "dtype": "float32", "sizes": {}},
        rows=[bench_row("reference", "forward", [1.0])], baseline="reference", backends=[],
        lane=samples.lane(), topology=samples.TOPOLOGY,
        environment={"applied": {"CACHE": "/users/ada/.cache"}, "kept": {"A": "/users/ada-2/x"}},
    )["environment"]  # fmt: skip
    assert found == {"applied": {"CACHE": "~/.cache"}, "kept": {"A": "/users/ada-2/x"}}


def test_many_problems_are_counted_not_all_listed(document):
    document["series"]["loss"] = ["x"] * 40
    with pytest.raises(ReceiptError, match="and 35 more") as caught:
        validate(document)
    assert str(caught.value).count("\n") == 6


NO_RECEIPT = {
    "empty": (b"", "is empty"),
    "blank": (b" \n", "is empty"),
    "text": (b"loss 3.1\n", "is not JSON: line 1, column 1"),
    "torn": (b'{"schema_version": 1 "kind"', "is not JSON: line 1, column 22"),
    "binary": (b"\x93NUMPY\x01\x00\xff", "is not JSON: no UTF-8 text at byte 0"),
    "list": (b"[1, 2]", "is no receipt: array, not a JSON object"),
    "other json": (b'{"loss": 3.1}', "is no receipt: it has no schema_version"),
    "newer": (b'{"schema_version": 2}', "has schema_version 2; megacpp .* knows 1 only"),
    "version text": (b'{"schema_version": "1"}', 'has schema_version "1"'),
    "deep": (b'{"a":' + b"[" * 100_000, "is not a receipt"),
    "deep json": (b'{"schema_version": 1, "a":' + b"[" * 990 + b"]" * 990 + b"}", "too deeply"),
    "huge number": (b'{"schema_version": ' + b"9" * 5000 + b"}", "is not a receipt"),
    "infinite": (b'{"schema_version": 1, "x": 1e999}', "x: inf is not a JSON number"),
    "nan": (b'{"schema_version": 1, "x": NaN}', "x: nan is not a JSON number"),
}


@pytest.mark.parametrize("name", NO_RECEIPT)
def test_a_file_that_is_no_receipt_is_refused(name, tmp_path):
    content, message = NO_RECEIPT[name]
    path = tmp_path / "receipt.json"
    path.write_bytes(content)
    with pytest.raises(ReceiptError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, MegacppError)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(ReceiptError, match=r"cannot read the receipt .*none.json: No such file"):
        read(tmp_path / "none.json")
    with pytest.raises(ReceiptError, match="is a folder; name the receipt file in it"):
        read(tmp_path)


def test_a_file_cut_off_anywhere_is_called_truncated(tmp_path):
    """At each byte of a short receipt that has every kind of token: a cut is no other fault."""
    path = tmp_path / "receipt.json"
    document = samples.bench()
    document["rows"] = [bench_row("reference", "step", [0.5], error=1.5e-07, tolerance=1e22)]
    document["code"] |= {"dirty": True, "commit": None}
    document["notes"] = ['a "quoted" n\u00e4me', "\\", ""]
    write(path, document)
    unescaped = '{"notes": "n\u00e4me"}'.encode()  # another writer need not escape
    for whole in (path.read_bytes().rstrip(), unescaped):
        for length in range(1, len(whole)):
            path.write_bytes(whole[:length])
            with pytest.raises(ReceiptError, match="is truncated"):
                read(path)


def test_a_write_killed_before_the_rename_leaves_the_old_receipt(tmp_path):
    path = tmp_path / "receipt.json"
    before = samples.train(path, steps=10)
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "import receipt_samples as samples\n"
        "os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)\n"
        "samples.train(Path(sys.argv[1]), steps=20)\n"
    )
    roots = [str(Path(__file__).parents[1]), str(Path(run_receipt.__file__).parent.parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(roots)}
    killed = subprocess.run([sys.executable, "-c", script, str(path)], env=environment)
    assert killed.returncode == -9
    assert read(path) == before
    samples.train(path, steps=30)
    assert read(path)["result"]["steps"] == 30


def test_a_write_that_fails_leaves_the_old_receipt_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "receipt.json"
    before = samples.train(path, steps=10)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ReceiptWriteError, match=r"cannot write the receipt .*: No space left"):
        samples.train(path, steps=20)
    monkeypatch.undo()
    assert read(path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["receipt.json"]


def test_a_receipt_is_readable_by_others_as_the_umask_says(tmp_path):
    samples.train(tmp_path / "receipt.json", steps=2)
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "receipt.json").stat().st_mode & 0o777 == 0o666 & ~mask


def test_wrong_input_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(ReceiptError, match=r"backends\[0\]: 'observed' is missing"):
        samples.start(
            tmp_path / "r.json", backends=[{"surface": "a", "requested": "b", "reason": ""}]
        )
    with pytest.raises(ReceiptError, match="recipe 'x' does not fit in a receipt"):
        recipe_entry("x", {"path": Path("a")})
    with pytest.raises(ReceiptError, match="recipe 'x' does not fit in a receipt"):
        recipe_entry("x", {"lr": math.nan})


def test_a_loss_that_is_not_finite_is_null_with_its_reason(tmp_path):
    run = samples.start(tmp_path / "r.json")
    run.step(1, tokens=8, ms=2.0, loss=3.0)
    run.step(2, tokens=8, ms=2.0, loss=math.nan, grad_norm=math.inf)
    run.evaluation(2, -math.inf)
    document = run.write("failed", "the loss of step 2 is nan")
    assert document["series"]["loss"] == [3.0, None]
    assert document["result"]["final_loss"] is None
    assert [(g["step"], g["column"], g["value"]) for g in document["series_info"]["gaps"]] == [
        (2, "loss", "nan"),
        (2, "grad_norm", "inf"),
        (2, "evaluation", "-inf"),
    ]
    assert "NaN" not in (tmp_path / "r.json").read_text()
    assert read(tmp_path / "r.json") == document


BAD_STEPS = {
    "again": ({"step": 5, "tokens": 8, "ms": 1.0}, "step 5 comes after step 5"),
    "back": ({"step": 4, "tokens": 8, "ms": 1.0}, "step 4 comes after step 5"),
    "no tokens": (
        {"step": 6, "tokens": 0, "ms": 1.0},
        "step 6: tokens 0 and ms 1.0 must be positive",
    ),
    "no time": ({"step": 6, "tokens": 8, "ms": 0.0}, "ms 0.0 must be positive"),
    "nan time": ({"step": 6, "tokens": 8, "ms": math.nan}, "ms nan must be positive"),
    "endless": ({"step": 6, "tokens": 8, "ms": math.inf}, "ms inf must be positive"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_wrong_step_is_refused_and_not_recorded(name, tmp_path):
    arguments, message = BAD_STEPS[name]
    run = samples.start(tmp_path / "r.json")
    run.step(5, tokens=8, ms=1.0, loss=1.0)
    with pytest.raises(ReceiptError, match=message):
        run.step(loss=1.0, **arguments)
    assert run.write()["series"]["step"] == [5]


def test_a_result_that_the_receipt_computes_cannot_be_given(tmp_path):
    with pytest.raises(ReceiptError, match="result final_loss, tokens is computed by the receipt"):
        samples.start(tmp_path / "r.json").write(final_loss=0.1, tokens=5)


def test_numpy_scalars_are_taken(tmp_path):
    run = samples.start(tmp_path / "r.json")
    run.step(
        np.int64(1), tokens=np.int32(8), ms=np.float32(2), loss=np.float32(3), grad_norm=np.nan
    )
    run.evaluation(np.int64(1), np.float32(3))
    run.write()
    assert read(tmp_path / "r.json")["series"]["tokens"] == [8]


def test_a_written_document_does_not_change_with_the_next_step(tmp_path):
    run = samples.start(tmp_path / "r.json")
    run.step(1, tokens=8, ms=2.0, loss=3.0)
    document = run.write()
    before = copy.deepcopy(document)
    run.step(2, tokens=8, ms=2.0, loss=math.nan)
    run.evaluation(2, 3.0)
    run.note("later")
    assert document == before


def resumed(path, at, **changes):
    run = samples.start(path, **changes)
    run.resume(read(path), step=at, tokens=at * samples.TOKENS)
    return run


def test_a_resumed_run_drops_what_came_after_the_checkpoint(tmp_path):
    path = tmp_path / "r.json"
    first = samples.train(path, steps=50, status="running")
    run = resumed(path, 40)
    for step in range(41, 61):
        run.step(step, tokens=samples.TOKENS, ms=900.0, loss=2.0)
    run.evaluation(60, 2.1)
    document = run.write("complete")
    assert document["series"]["step"] == list(range(1, 61))
    assert document["series"]["tokens"][-1] == 60 * samples.TOKENS
    assert document["series"]["loss"][:40] == first["series"]["loss"][:40]
    assert document["series"]["loss"][40:] == [2.0] * 20
    assert document["evaluations"]["step"] == [0, 20, 40, 60]
    assert document["created"] == first["created"]
    assert document["series_info"]["cold_steps"] == [1, 41]
    lost = sum(first["series"]["ms"][40:]) / 1000
    assert document["goodput"]["seconds"]["lost"] == pytest.approx(lost, abs=1e-3)
    assert document["goodput"]["wall_s"] == pytest.approx(first["goodput"]["wall_s"])
    assert len(document["goodput"]["segments"]) == 2
    assert document["notes"] == ["resumed from the checkpoint of step 40"]


def test_what_a_lost_step_compiled_was_no_step_time(tmp_path):
    path, clock = tmp_path / "r.json", samples.Clock()
    useful = samples.train(path, steps=40, status="running")["goodput"]["seconds"]["step"]
    ledger = Goodput(clock=clock)
    run = resumed(path, 40, goodput=ledger)
    for step, (category, seconds) in enumerate([("compile", 60.0), *[("step", 0.9)] * 4], 41):
        with ledger.span(category):
            clock.sleep(seconds)
        run.step(step, tokens=8, ms=1000 * seconds, loss=2.0)
    run.write("failed", "a loss that is not finite")
    seconds = resumed(path, 40).write()["goodput"]["seconds"]
    assert seconds["step"] == pytest.approx(useful)
    assert seconds["lost"] == pytest.approx(4 * 0.9) and seconds["compile"] >= 60


def test_a_note_stands_once_however_often_a_run_is_resumed(tmp_path):
    path = tmp_path / "r.json"
    samples.train(path, steps=3, status="running")
    for _ in range(3):
        run = resumed(path, 3)
        run.note("the yardstick")
        run.write()
    assert read(path)["notes"].count("the yardstick") == 1


def test_a_resume_drops_gaps_and_cold_marks_after_the_checkpoint(tmp_path):
    path = tmp_path / "r.json"
    run = samples.start(path)
    for step in range(1, 6):
        bad = math.nan if step in (2, 4) else 1.0
        run.step(step, tokens=8, ms=1.0, loss=2.0, grad_norm=bad, cold=step in (3, 5))
    run.write()
    run = samples.start(path)
    run.resume(read(path), step=3, tokens=24)
    info = run.write()["series_info"]
    assert [gap["step"] for gap in info["gaps"]] == [2]
    assert info["cold_steps"] == [1, 3]


def test_segments_that_do_not_make_up_the_wall_time_are_refused(document):
    document["goodput"]["segments"] *= 2
    with pytest.raises(ReceiptError, match="goodput: the segments add up to"):
        validate(document)


def test_a_run_resumed_elsewhere_keeps_its_losses_but_not_its_speeds(tmp_path):
    path = tmp_path / "r.json"
    samples.train(path, steps=20, status="running")
    run = resumed(path, 20, lane=samples.lane(os="Another"))
    for step in (21, 22, 23):
        run.step(step, tokens=samples.TOKENS, ms=100.0, loss=2.0)
    document = run.write("complete")
    assert len(document["series"]["loss"]) == 23
    assert [document["series"]["step"][row] for row in warm_rows(document)] == [22, 23]
    assert document["result"]["tokens_per_s_median"] == samples.TOKENS * 10
    assert "from step 21 on with another lane; the steps before count as cold" in document["notes"]


def test_a_run_resumed_in_another_layout_says_so(tmp_path):
    path = tmp_path / "r.json"
    before = load_recipe("nam56r").to_dict()
    now = load_recipe("nam56r", ["parallel.expert_model_parallel_size=4"]).to_dict()
    run = samples.start(path, recipe=recipe_entry("nam56r", before))
    for step in range(1, 6):
        run.step(step, tokens=samples.TOKENS, ms=10.0, loss=2.0)
    run.write("complete")
    notes = resumed(path, 5, recipe=recipe_entry("nam56r", now)).write()["notes"]
    key = "parallel.expert_model_parallel_size"
    assert f"from step 6 on {key} is 4, before it was 1" in notes


def test_steps_that_no_receipt_saw_are_noted(tmp_path):
    path = tmp_path / "r.json"
    samples.train(path, steps=20, status="running")
    run = resumed(path, 25)
    run.step(26, tokens=samples.TOKENS, ms=1.0, loss=2.0)
    document = run.write("complete")
    assert document["result"]["tokens"] == 26 * samples.TOKENS
    assert any("steps 21 to 25 are not in the series" in note for note in document["notes"])


def test_a_resume_of_another_recipe_or_kind_or_after_a_step_is_refused(tmp_path):
    path = tmp_path / "r.json"
    earlier = samples.train(path, steps=5)
    refused = (
        r"is of recipe nam56r-tiny \(.*this run of other \(.*model.hidden_size was .* and is None"
    )
    with pytest.raises(ReceiptError, match=refused):
        resumed(path, 5, recipe=recipe_entry("other", {"model": {}}))
    with pytest.raises(ReceiptError, match="cannot resume from a bench receipt"):
        samples.start(path).resume(samples.bench(te=1.0), 5, 5)
    run = samples.start(path)
    run.step(1, tokens=1, ms=1.0, loss=1.0)
    with pytest.raises(ReceiptError, match="resume comes before the first step"):
        run.resume(earlier, 5, 5)


def test_a_long_series_is_thinned_evenly_and_totals_stay_exact(tmp_path, monkeypatch):
    monkeypatch.setattr(run_receipt, "MAX_ROWS", 64)
    run = samples.start(tmp_path / "r.json")
    for step in range(1, 1001):
        loss = math.nan if step in (3, 993) else 2.0
        run.step(step, tokens=8, ms=4.0, loss=loss, peak_memory_bytes=step)
    document = run.write("complete")
    series, stride = document["series"], document["series_info"]["stride"]
    steps = series["step"]
    assert 32 <= len(steps) < 64 and stride == 16
    assert {after - before for before, after in itertools.pairwise(steps)} == {stride}
    assert all(tokens == 8 * step for step, tokens in zip(steps, series["tokens"], strict=True))
    assert document["result"]["steps"] == 1000
    assert document["result"]["tokens"] == 8000
    assert document["result"]["peak_memory_bytes"] == 1000
    nulls = [step for step, loss in zip(steps, series["loss"], strict=True) if loss is None]
    assert nulls == [gap["step"] for gap in document["series_info"]["gaps"]] == [993]


def test_a_step_costs_microseconds_and_not_more_as_the_run_grows(tmp_path):
    """Under 0.5 % of a 10 ms step is 50 us; the best of five keeps a busy machine out of it."""
    run = samples.start(tmp_path / "r.json", goodput=Goodput())

    def microseconds(first):
        start = time.perf_counter()
        for step in range(first, first + 1000):
            run.step(step, tokens=512, ms=900.0, loss=2.5, peak_memory_bytes=1, grad_norm=1.0)
        return (time.perf_counter() - start) * 1000

    early = min(microseconds(1 + 1000 * n) for n in range(5))
    late = min(microseconds(50_001 + 1000 * n) for n in range(5))
    assert max(early, late) < 50


def test_the_lane_is_gathered_here_and_is_valid(document):
    document["lane"] = lane("cpu")
    document["code"] = code()
    validate(document)
    assert document["lane"]["device"]["type"] == "cpu"
    assert document["lane"]["packages"]["torch"].startswith("2.")
    assert document["lane"]["cpu"]["count"] >= 1


DRIVERS = {
    "closed": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\nGCC 12.3.0\n",
    "open": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
}


@pytest.mark.parametrize("kind", [*DRIVERS, None])
def test_the_lane_of_a_gpu(kind, document, monkeypatch, tmp_path):
    """A GPU as torch describes one; the driver's version is the kernel module's."""
    import torch

    if kind:
        (tmp_path / "version").write_text(DRIVERS[kind])
    monkeypatch.setattr("megacpp_mcore.receipts.lane._DRIVER", tmp_path / "version")
    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=150_754_820_096, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    document["lane"] = lane()
    validate(document)
    assert document["lane"]["device"] == {
        "type": "cuda",
        "name": "NVIDIA H200",
        "count": 8,
        "memory_bytes": 150_754_820_096,
        "capability": "9.0",
    }
    assert document["lane"]["driver"] == ("580.65.06" if kind else None)
    assert lane("cpu")["device"]["type"] == "cpu"


def test_the_lane_is_gathered_where_torch_cannot_be_imported(document, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # makes `import torch` raise ImportError
    document["lane"] = lane()
    validate(document)
    assert document["lane"]["cpu"]["threads"] is None


def test_reading_receipts_imports_no_torch():
    script = (
        "import sys\n"
        "import megacpp_mcore.receipts.compare, megacpp_mcore.receipts.html\n"
        "import megacpp_mcore.receipts.run, megacpp_mcore.receipts.show\n"
        "import megacpp_mcore.commands.report\n"
        "sys.exit('torch' in sys.modules)"
    )
    root = str(Path(run_receipt.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": root}
    assert subprocess.run([sys.executable, "-c", script], env=environment).returncode == 0


def test_the_file_is_json_with_a_line_per_field(tmp_path):
    document = samples.train(tmp_path / "r.json", steps=30)
    text = (tmp_path / "r.json").read_text()
    assert json.loads(text) == document
    assert sum(line.strip().startswith('"loss": [') for line in text.splitlines()) == 2
    assert len(text.splitlines()) < 120


@pytest.mark.parametrize("off", [0.985, 1.015])
@pytest.mark.parametrize("part", ["idle", "wall", "segment", "useful"])
def test_a_goodput_that_is_off_by_more_than_one_percent_is_refused(tmp_path, part, off):
    document = samples.train(tmp_path / "run.json")
    goodput = document["goodput"]
    share = 0.02 * goodput["wall_s"]
    goodput["seconds"]["idle"] += share
    goodput["segments"][0]["seconds"]["idle"] += share
    goodput["wall_s"] += share
    goodput["segments"][0]["wall_s"] += share
    goodput["useful"] = goodput["seconds"]["step"] / goodput["wall_s"]
    validate(document)
    if part == "idle":
        goodput["seconds"]["idle"] += (off - 1) * goodput["wall_s"]
    elif part == "wall":
        goodput["wall_s"] *= off
    elif part == "segment":
        goodput["segments"][0]["wall_s"] *= off
    else:
        goodput["useful"] += off - 1
    with pytest.raises(ReceiptError, match="goodput"):
        validate(document)


def test_an_evaluation_of_the_same_step_replaces_the_one_before(tmp_path):
    receipt = samples.start(tmp_path / "run.json")
    receipt.evaluation(0, 3.0)
    receipt.evaluation(0, 2.0)
    assert receipt.write()["evaluations"] == {"step": [0], "loss": [2.0]}


def test_the_mean_the_wall_and_the_slow_steps_stand_beside_the_median(tmp_path):
    clock = samples.Clock()
    receipt = samples.start(tmp_path / "run.json", goodput=Goodput(clock=clock))
    for step, ms in enumerate([5000, 100, 100, 126, 124, 100, 1000, 100, 100], start=1):
        clock.sleep(ms / 1000)
        receipt.step(step, tokens=10, ms=ms, loss=1.0)
    clock.sleep(3.25)
    result = receipt.write("complete")["result"]
    assert result["tokens_per_s_median"] == 100
    assert result["tokens_per_s_mean"] == pytest.approx(80 / 1.75)
    assert result["tokens_per_s_wall"] == pytest.approx(90 / 10)
    assert result["slow_steps"] == [[7, 1000], [4, 126]]


def test_speed_in_operations_is_per_device_and_against_a_stated_peak(tmp_path):
    """1,000 tokens a second of 6 GFLOP on two devices: 3 TFLOP/s each."""
    two = {"world_size": 2, "tp": 1, "pp": 1, "ep": 1, "cp": 1, "dp": 2}
    known = samples.start(tmp_path / "a.json", topology=two, work=Work(6e9, 12e12))
    unknown = samples.start(tmp_path / "b.json", topology=two, work=Work(6e9))
    for receipt in (known, unknown):
        assert receipt.write()["result"]["tflops_per_s_per_device"] is None  # no warm step yet
        for step in range(1, 5):
            receipt.step(step, tokens=100, ms=100.0, loss=1.0)
    result = known.write("complete")["result"]
    assert result["flops_per_token"] == 6e9 and result["mfu_peak_tflops"] == 12
    assert result["tflops_per_s_per_device"] == 3 and result["mfu"] == 0.25
    result = unknown.write("complete")["result"]
    assert result["tflops_per_s_per_device"] == 3
    assert result["mfu"] is None and result["mfu_peak_tflops"] is None


def test_the_tree_is_what_git_calls_the_packages_folder(tmp_path):
    root = Path(run_receipt.__file__).parents[2]
    environment = os.environ | {"GIT_INDEX_FILE": str(tmp_path / "index")}

    def git(*words):
        done = subprocess.run(
            ["git", "-C", str(root), *words], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"no git checkout: {done.stderr}")
        return done.stdout.strip()

    git("add", "megacpp_mcore")
    assert code()["tree"] == git("write-tree", "--prefix=megacpp_mcore/")


def test_a_receipt_names_its_code_by_digest_and_commit_or_tree(tmp_path):
    document = samples.train(tmp_path / "run.json")
    for change, valid in (
        ({"sha256": None}, False),
        ({"tree": None, "commit": None}, False),
        ({"tree": None, "commit": "0" * 40}, True),
        ({"commit": None}, True),
        ({"sha256": None, "tree": None, "history": True}, False),
    ):
        own = {**document["code"], **change}
        nullable = ("commit", "dirty")
        own = {k: v for k, v in own.items() if v is not None or k in nullable}
        if valid:
            validate(document | {"code": own})
        else:
            with pytest.raises(ReceiptError, match="code"):
                validate(document | {"code": own})


def test_new_receipts_are_no_changes_of_the_code(tmp_path):
    from megacpp_mcore.receipts.lane import _has_changes

    assert _has_changes(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    (tmp_path / "examples/receipts").mkdir(parents=True)
    old, code = tmp_path / "examples/receipts/old.json", tmp_path / "code.py"
    for file in (old, code):
        file.write_text("1")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    old.write_text("2")
    (tmp_path / "examples/receipts/new.json").write_text("1")
    assert _has_changes(tmp_path) is False
    code.write_text("2")
    assert _has_changes(tmp_path) is True


def test_a_dirty_checkouts_tree_must_be_a_commits(tmp_path):
    """Not one that was only added, nor another folder's; an earlier commit's will do."""
    folder = tmp_path / "megacpp_mcore"
    folder.mkdir()

    def git(*words):
        own = ("-c", "user.name=x", "-c", "user.email=x")
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *own, *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def traceable():
        git("add", ".")
        own = {"tree": git("write-tree", "--prefix=megacpp_mcore/"), "sha256": "b"}
        return is_traceable(own | {"commit": "a", "dirty": True}, tmp_path)

    git("init", "-q")
    (folder / "code.py").write_text("1")
    assert not traceable()
    for content in ("2", "3"):
        (folder / "code.py").write_text(content)
        assert not traceable()
        git("commit", "-qm", "x")
        assert traceable()
    (folder / "code.py").write_text("2")
    assert traceable()
    whole = {"tree": git("rev-parse", "HEAD^{tree}"), "sha256": "b", "commit": "a", "dirty": True}
    assert not is_traceable(whole, tmp_path)


@pytest.mark.parametrize(
    ("own", "traceable"),
    [
        ({"commit": "a", "dirty": False}, False),
        ({"sha256": "b", "commit": "a", "dirty": False}, True),
        ({"sha256": "b", "commit": "a", "dirty": True}, False),
        ({"sha256": "b", "commit": None, "dirty": None}, False),
        ({"sha256": "b", "tree": "c", "commit": None, "dirty": None}, True),
        ({"sha256": "b", "tree": "c", "commit": "a", "dirty": False}, True),
        ({"sha256": "b", "tree": "c", "commit": "a", "dirty": True}, False),
    ],
)
def test_code_that_can_be_found_again(own, traceable, monkeypatch):
    from megacpp_mcore.bench import BenchError
    from megacpp_mcore.commands.bench import _check_origin
    from megacpp_mcore.receipts import lane as lanes

    assert lanes.is_traceable(own) is traceable
    monkeypatch.setattr(lanes, "code", lambda: own)
    _check_origin(Path("elsewhere/norm.json"))
    if traceable:
        _check_origin(Path("examples/receipts/h200/norm.json"))
    else:
        with pytest.raises(BenchError, match="clean checkout"):
            _check_origin(Path("examples/receipts/h200/norm.json"))
