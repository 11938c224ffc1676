"""`megacpp checkpoint list | verify | prune`, on folders with files as a run leaves them."""

import fcntl
import json
from pathlib import Path

import pytest

from megacpp_mcore.cli import main
from megacpp_mcore.training.checkpoints import checksums


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints of 3, 5 and 8, one that a kill left, and one that was gone back from."""
    for name in ("iter_0000003", "iter_0000005", "iter_0000008", "superseded-iter_0000009"):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        for file in (".metadata", "metadata.json", "__0_0.distcp"):
            (folder / file).write_text(f"{name} {file}" * 9)
        checksums.write(folder, {})
    (tmp_path / "checkpoints" / ".tmp-iter_0000010").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("8\n")
    return tmp_path


def command(capsys, *words):
    status = main(["checkpoint", *map(str, words)])
    return status, *capsys.readouterr()


@pytest.mark.parametrize("where", ["", "checkpoints"])
def test_list_has_everything_with_a_checkpoints_name(run, where, capsys):
    status, out, _ = command(capsys, "list", run / where)
    assert status == 0
    states = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines()}
    assert [name for name, state in states.items() if state.startswith("complete")] == [
        "iter_0000003", "iter_0000005", "iter_0000008",
    ]  # fmt: skip
    assert states["superseded-iter_0000009"].startswith("superseded")
    assert states[".tmp-iter_0000010"].startswith("left by a kill")
    (row, *_) = json.loads(command(capsys, "list", run, "--json")[1])
    size = sum(p.stat().st_size for p in Path(row["path"]).iterdir())
    assert row["bytes"] == size


def test_verify_names_the_damaged_file(run, capsys):
    assert command(capsys, "verify", run)[0] == 0
    shard = run / "checkpoints/iter_0000005/__0_0.distcp"
    shard.write_text(shard.read_text().replace("5", "6"))
    status, out, _ = command(capsys, "verify", run)
    assert status == 1 and out.count(" whole\n") == 2 and f"damaged: {shard}" in out
    assert command(capsys, "verify", run, "--iteration", 8)[0] == 0
    (row,) = json.loads(command(capsys, "verify", run, "--iteration", 5, "--json")[1])
    assert row["state"].startswith("damaged")
    (run / "checkpoints/iter_0000003/metadata.json").unlink()
    assert "iter_0000003" in command(capsys, "verify", run, "--iteration", 3)[1]
    status, _, err = command(capsys, "verify", run, "--iteration", 4)
    assert status == 2 and "has those of 3, 5, 8" in err


def test_prune_keeps_the_newest_and_deletes_nothing_else(run, capsys):
    there = {path.name for path in (run / "checkpoints").iterdir()}
    status, out, _ = command(capsys, "prune", run, "--keep", 1, "--dry-run")
    assert status == 0 and out.startswith("would delete iter_0000003\nwould delete iter_0000005\n")
    assert {path.name for path in (run / "checkpoints").iterdir()} == there
    assert command(capsys, "prune", run, "--keep", 2)[0] == 0
    left = {path.name for path in (run / "checkpoints").iterdir()}
    assert there - left == {"iter_0000003", ".tmp-iter_0000010"}
    assert command(capsys, "prune", run, "--keep", 0)[0] == 2


def test_prune_deletes_nothing_where_all_that_would_stay_are_damaged(run, capsys):
    damaged = run / "checkpoints/iter_0000008/__0_0.distcp"
    damaged.write_text(damaged.read_text().replace("8", "7"))
    status, out, err = command(capsys, "prune", run, "--keep", 1)
    assert (status, out) == (2, "") and f"{damaged} is damaged" in err
    assert "--keep more than 1" in err and (run / "checkpoints/iter_0000005").is_dir()
    assert command(capsys, "prune", run, "--keep", 2)[0] == 0
    assert not (run / "checkpoints/iter_0000003").exists()
    assert command(capsys, "prune", run, "--keep", 2)[1] == "0 deleted, 0.0 MiB\n"


@pytest.mark.parametrize("where", ["", "checkpoints"])
def test_prune_leaves_what_a_run_resumes_from_and_a_run_that_trains(run, where, capsys):
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("5")
    status, _, err = command(capsys, "prune", run / where, "--keep", 1)
    assert status == 2 and "names iter_0000005, from which a run resumes" in err
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, _, err = command(capsys, "prune", run / where, "--keep", 2)
        assert status == 2 and "a process is training in" in err
    assert (run / "checkpoints/iter_0000003").is_dir()


def test_a_folder_without_checkpoints_is_refused(tmp_path, capsys):
    status, _, err = command(capsys, "list", tmp_path)
    assert status == 2 and "holds no checkpoints" in err
