"""A run goes on from the last complete checkpoint, whatever a kill left behind."""

from pathlib import Path

import pytest

from megacpp_mcore.training.gpu.resume import TRACKER, ResumeError, complete, newest, repair_tracker


def checkpoint(folder: Path, iteration: int, *files: str) -> None:
    path = folder / f"iter_{iteration:07d}"
    path.mkdir(parents=True)
    for name in files or (".metadata", "metadata.json", "__0_0.distcp"):
        (path / name).write_text("{}")


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
