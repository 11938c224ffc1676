"""The logs of the GPU tests, from notes as conftest.py makes them; on any machine."""

import io
import json

import logs
import pytest


def note(name, when, outcome, s=0.0, said="", printed=""):
    return {"id": f"t/{name}", "when": when, "outcome": outcome, "s": s, "said": said,
            "printed": printed}  # fmt: skip


NOTES = [
    {"collected": ["t/test_a.py::one[x]", "t/test_a.py::two", "t/test_b.py::three"]},
    note("test_a.py::one[x]", "setup", "passed", 1.0),
    note("test_a.py::one[x]", "call", "passed", 2.0, printed="5 ms\n"),
    note("test_b.py::three", "setup", "skipped", said="no GPU"),
]
FAILED = note("test_a.py::two", "call", "failed", 1.0, "E  boom", "x" * 9000 + "its last words")
PASSED = note("test_a.py::two", "call", "passed", 1.0)
SET_UP = note("test_a.py::two", "setup", "passed")
TORN_DOWN = note("test_a.py::two", "teardown", "failed", said="E  boom")


@pytest.fixture
def run(tmp_path, monkeypatch):
    def run(*notes):
        monkeypatch.setattr("sys.stdin", io.StringIO("commit c, tree t\n2 x H200\n"))
        (tmp_path / "notes").write_text("".join(f"{json.dumps(n)}\n" for n in notes))
        status = logs.main(str(tmp_path / "notes"), str(tmp_path))
        return status, {path.stem: path.read_text() for path in tmp_path.glob("*.log")}

    return run


def test_a_log_a_file_with_every_outcome(run):
    status, found = run(*NOTES, PASSED)
    assert status == 0 and found.keys() == {"test_a", "test_b"}
    lines = found["test_a"].splitlines()
    assert lines[:2] == ["commit c, tree t", "2 x H200"]
    assert lines[3:5] == ["passed      3.0 s  one[x]", "    5 ms"]
    assert lines[-1] == "2 passed, 4 s of tests"
    assert "skipped     0.0 s  three: no GPU" in found["test_b"]


@pytest.mark.parametrize("notes", [(), (SET_UP,), (FAILED,), (PASSED, TORN_DOWN), (FAILED, PASSED)])
def test_what_failed_or_was_not_run_fails_the_run(run, notes):
    status, found = run(*NOTES, *notes)
    last = found["test_a"].splitlines()[-1]
    told = notes not in ((), (SET_UP,))
    assert status == 1 and last.startswith(f"1 passed, 1 {'failed' if told else 'not run'}, ")
    assert ("E  boom" in found["test_a"]) == told
    if FAILED in notes:
        assert "xits last words\n" in found["test_a"]
        assert len(found["test_a"]) < 4000


def test_paths_of_the_checkout_are_relative(run):
    root = logs.ROOT
    said = f'E  File "{root}/tests/x.py"; {root}/megacpp_mcore/y.py; {root}-other/z.py'
    printed = f"saved to {root}/runs"
    _, found = run(*NOTES, FAILED | {"said": said, "printed": printed})
    assert 'E  File "tests/x.py"; megacpp_mcore/y.py; ' in found["test_a"]
    assert f"{root}-other/z.py" in found["test_a"] and "saved to runs" in found["test_a"]
    assert f"{root}/" not in found["test_a"]


def test_a_run_of_no_tests_fails(run):
    assert run()[0] == 1
