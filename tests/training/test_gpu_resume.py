"""A run goes on from the last complete checkpoint, whatever a kill left behind."""

import pickle
from pathlib import Path

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from megacpp_mcore.training.checkpoints import checksums
from megacpp_mcore.training.gpu.resume import (
    TRACKER,
    ResumeError,
    check,
    check_iteration,
    complete,
    go_back,
    newest,
    repair_tracker,
)


def checkpoint(folder: Path, iteration: int, *files: str) -> Path:
    path = folder / f"iter_{iteration:07d}"
    path.mkdir(parents=True)
    for name in files or (".metadata", "metadata.json", "__0_0.distcp"):
        (path / name).write_text("{}")
    return path


def indexed(folder: Path, iteration: int) -> Path:
    """A checkpoint with an index of its one shard, and checksums."""
    path = checkpoint(folder, iteration)
    entry = _StorageInfo("__0_0.distcp", 0, 2)
    index = Metadata({"w": BytesStorageMetadata()}, storage_data={MetadataIndex("w"): entry})
    (path / ".metadata").write_bytes(pickle.dumps(index))
    checksums.write(path, {})
    return path


@pytest.mark.parametrize("half", [("__0_0.distcp",), (".metadata",), ("metadata.json",)])
def test_a_half_written_checkpoint_is_never_chosen(tmp_path, half):
    checkpoint(tmp_path, 100)
    checkpoint(tmp_path, 200, *half)
    assert complete(tmp_path) == [100]
    (tmp_path / TRACKER).write_text("200")
    said = repair_tracker(str(tmp_path))
    assert "named 200" in said and "step 100" in said
    assert (tmp_path / TRACKER).read_text() == "100"
    assert newest(str(tmp_path)) == tmp_path / "iter_0000100"
    assert repair_tracker(str(tmp_path)) is None


@pytest.mark.parametrize("text", ["", "12x", "-3"])
def test_a_tracker_that_was_cut_is_written_anew(tmp_path, text):
    """Megatron would end itself with status 0 and train nothing."""
    checkpoint(tmp_path, 100)
    checkpoint(tmp_path, 12_345_678)
    (tmp_path / TRACKER).write_text(text)
    said = repair_tracker(str(tmp_path))
    assert "resuming from the last complete checkpoint, step 12345678" in said
    assert (tmp_path / TRACKER).read_text() == "12345678"
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_kill_before_the_first_tracker_loses_nothing(tmp_path):
    checkpoint(tmp_path, 100)
    assert "was missing" in repair_tracker(str(tmp_path))
    assert (tmp_path / TRACKER).read_text() == "100"


def test_a_tracker_that_was_set_back_stays(tmp_path):
    checkpoint(tmp_path, 100)
    checkpoint(tmp_path, 200)
    (tmp_path / TRACKER).write_text("100")
    assert repair_tracker(str(tmp_path)) is None
    assert newest(str(tmp_path)) == tmp_path / "iter_0000100"


def test_nothing_complete_is_refused_and_nothing_at_all_is_a_beginning(tmp_path):
    assert repair_tracker(str(tmp_path / "absent")) is None and newest(None) is None
    checkpoint(tmp_path, 200, "__0_0.distcp")
    assert repair_tracker(str(tmp_path)) is None  # no tracker: Megatron begins
    (tmp_path / TRACKER).write_text("200")
    with pytest.raises(ResumeError, match=r"no checkpoint in .* is complete"):
        repair_tracker(str(tmp_path))


def test_a_released_checkpoint_is_not_ours_to_judge(tmp_path):
    (tmp_path / TRACKER).write_text("release\n")
    assert repair_tracker(str(tmp_path)) is None


def test_a_damaged_checkpoint_is_named_with_the_older_good_one(tmp_path, capfd):
    for iteration in (100, 200, 300):
        indexed(tmp_path, iteration)
    check(newest(str(tmp_path)))
    (tmp_path / "iter_0000300" / "__0_0.distcp").write_text("[]")
    offered = "iter_0000200 is whole: resume from it with --resume-from 200"
    with pytest.raises(ResumeError, match=rf"iter_0000300/__0_0\.distcp is damaged: .*{offered}"):
        check(newest(str(tmp_path)))
    check(newest(str(tmp_path)), verify=False)
    check(tmp_path / "iter_0000100")
    assert capfd.readouterr().err == ""


def test_a_checkpoint_without_checksums_is_told_apart(tmp_path, capfd):
    path = indexed(tmp_path, 100)
    (path / checksums.NAME).unlink()
    check(path)
    assert "iter_0000100 was saved without checksums: it is not verified" in capfd.readouterr().err


def test_code_in_an_index_is_refused_before_megatron_reads_it(tmp_path):
    class Planted:
        def __reduce__(self):
            return Path.mkdir, (tmp_path / "code ran",)

    path = indexed(tmp_path, 100)
    (path / ".metadata").write_bytes(pickle.dumps(Planted()))
    checksums.write(path, {})
    with pytest.raises(ResumeError, match=r"which no index of a checkpoint needs"):
        check(path)
    assert not (tmp_path / "code ran").exists()


def test_a_run_goes_back_to_an_older_checkpoint(tmp_path):
    for iteration in (100, 200, 300):
        indexed(tmp_path, iteration)
    (tmp_path / TRACKER).write_text("300")
    with pytest.raises(ResumeError, match=r"--resume-from 250: .* of iterations 100, 200, 300"):
        go_back(str(tmp_path), 250)
    (said,) = go_back(str(tmp_path), 200)
    assert "iter_0000300 is newer than iteration 200: it is now superseded-iter_0000300" in said
    assert (tmp_path / TRACKER).read_text() == "200" and complete(tmp_path) == [100, 200]


def test_going_back_to_a_damaged_checkpoint_changes_nothing(tmp_path):
    for iteration in (100, 200, 300):
        indexed(tmp_path, iteration)
    (tmp_path / TRACKER).write_text("300")
    (tmp_path / "iter_0000200" / "__0_0.distcp").write_text("[]")
    with pytest.raises(ResumeError, match=r"is damaged: .*--resume-from 100"):
        go_back(str(tmp_path), 200)
    assert (tmp_path / TRACKER).read_text() == "300" and complete(tmp_path) == [100, 200, 300]


def test_a_checkpoint_that_made_way_for_another_comes_back(tmp_path, capfd):
    """Megatron was killed as it saved the same iteration again."""
    indexed(tmp_path, 100)
    indexed(tmp_path, 200).rename(tmp_path / ".old-iter_0000200")
    checkpoint(tmp_path, 200, "__0_0.distcp")
    (tmp_path / TRACKER).write_text("200")
    assert repair_tracker(str(tmp_path)) is None
    assert "iter_0000200 was complete, but a kill left it as .old-" in capfd.readouterr().err
    check(newest(str(tmp_path)))


def test_a_half_written_checkpoint_is_named(tmp_path, capfd):
    checkpoint(tmp_path, 100)
    checkpoint(tmp_path, 200, "__0_0.distcp")
    repair_tracker(str(tmp_path))
    assert "iter_0000200 is not complete: no run resumes from it" in capfd.readouterr().err


def test_a_checkpoint_under_another_iterations_name_is_refused(tmp_path):
    path = indexed(tmp_path, 6)
    check_iteration(path, 6)
    with pytest.raises(ResumeError, match="iter_0000006 is of iteration 4, by what it holds"):
        check_iteration(path, 4)
