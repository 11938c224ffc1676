"""Atomic writes, where what is there is no file."""

import os
from pathlib import Path

import pytest

from megacpp_mcore import cli
from megacpp_mcore.files import write_atomically


@pytest.fixture(params=["fifo", "link to a device"])
def no_file(request, tmp_path: Path) -> Path:
    path = tmp_path / "out"
    if request.param == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(os.devnull)
    return path


def test_a_device_or_a_fifo_is_not_replaced(no_file):
    def identity() -> tuple[int, ...]:
        """Without the time of the last access, which following a link may change."""
        found = os.lstat(no_file)
        return found.st_dev, found.st_ino, found.st_mode, found.st_mtime_ns, found.st_ctime_ns

    before = identity()
    with pytest.raises(OSError, match="not a regular file, and would be replaced by one"):
        write_atomically(no_file, "x")
    assert identity() == before
    assert [path.name for path in no_file.parent.iterdir()] == ["out"]


def test_a_command_says_so_in_one_line(no_file, capsys):
    assert cli.main(["report", "html", _receipt(), "--out", str(no_file)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{no_file}" in said and "not a regular file" in said


def _receipt() -> str:
    examples = Path(__file__).parents[1] / "examples" / "receipts"
    return str(examples / "h200" / "run-nam56r-2xh200-dp2-graph.json")


def test_a_file_and_a_link_to_one_are_replaced(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_atomically(tmp_path / "link", "new")
    assert not (tmp_path / "link").is_symlink() and (tmp_path / "link").read_text() == "new"
    assert (tmp_path / "file").read_text() == "old"
