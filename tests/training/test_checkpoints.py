"""A folder of checkpoints through kills, damage and removal, without a model."""

import io
import json
import os
import random
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from megacpp_mcore.training.checkpoints import checksums, folder


def saved(path: Path, content: bytes = b"shard", **files: bytes) -> Path:
    """A complete checkpoint with checksums, at `path`."""
    path.mkdir(parents=True)
    for name, data in {"__0_0.distcp": content, ".metadata": b"i", **files}.items():
        (path / name).write_bytes(data)
    (path / "metadata.json").write_text("{}")
    checksums.write(path, {})
    return path


def shard(path: Path) -> bytes:
    return (path / "__0_0.distcp").read_bytes()


def test_a_half_deleted_checkpoint_is_not_complete(tmp_path):
    for iteration in (1, 2, 3):
        saved(folder.path_of(tmp_path, iteration))
    (tmp_path / "iter_0000003" / "__0_0.distcp").unlink()  # rm -r takes files in any order
    (tmp_path / "iter_0000002" / "metadata.json").unlink()
    assert folder.complete(tmp_path) == [1]


class Killed(BaseException):
    pass


@pytest.fixture
def dies_at(monkeypatch):
    """dies_at(n, call): run `call`, and end it before its n-th rename or removal of a file."""

    def run(last: int, call) -> bool:
        with monkeypatch.context() as patch:
            counter = iter(range(last + 1))
            for name in ("rename", "unlink", "rmdir"):
                real = getattr(os, name)

                def counted(*args, real=real, **kwargs):
                    if next(counter) == last:
                        raise Killed
                    return real(*args, **kwargs)

                patch.setattr(os, name, counted)
            try:
                call()
            except Killed:
                return True
        return False

    return run


def test_a_kill_at_any_moment_of_a_replacement_loses_no_checkpoint(tmp_path, dies_at):
    contents = set()
    for moment in range(100):
        place = tmp_path / str(moment)
        saved(folder.path_of(place, 2), b"2")
        old, new = saved(folder.path_of(place, 4), b"old"), saved(place / ".tmp-iter_0000004", b"n")
        died = dies_at(moment, lambda new=new, old=old: folder.replace(new, old))
        folder.recover(place)
        assert folder.complete(place) == [2, 4]
        contents.add(shard(old))
        assert shard(old) == b"n" or died
        folder.sweep(place)
        assert sorted(os.listdir(place)) == ["iter_0000002", "iter_0000004"]
        if not died:
            break
    assert moment >= 5 and contents == {b"old", b"n"}


def test_a_kill_at_any_moment_of_a_pruning_leaves_the_newest(tmp_path, dies_at):
    for moment in range(100):
        place = tmp_path / str(moment)
        for iteration in (1, 2, 3, 4):
            saved(folder.path_of(place, iteration))
        died = dies_at(moment, lambda place=place: folder.prune(place, 2))
        assert folder.complete(place)[-2:] == [3, 4]
        if not died:
            break
    assert moment >= 8 and folder.complete(place) == [3, 4]
    assert sorted(os.listdir(place)) == ["iter_0000003", "iter_0000004"]


def test_what_was_being_written_comes_back_only_if_it_is_whole(tmp_path):
    whole, partial = tmp_path / ".tmp-iter_0000004", tmp_path / ".tmp-iter_0000005"
    saved(whole, **{"progress.json": b"{}"})
    saved(partial, **{"progress.json": b"{}"})
    saved(tmp_path / ".tmp-iter_0000006")  # its last file was not written yet
    (partial / "__0_0.distcp").write_bytes(b"SHARD")  # never synced to the disk
    (said,) = folder.recover(tmp_path, needs=("progress.json",))
    assert "iter_0000004 was complete" in said and ".tmp-iter_0000004" in said
    assert folder.complete(tmp_path) == [4]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "metadata.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_every_damaged_file_is_named(tmp_path, name, damage):
    path = saved(folder.path_of(tmp_path, 7)) / name
    assert checksums.verify(path.parent)
    if damage == "flipped":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    with pytest.raises(checksums.DamagedError, match=f"{path} is (damaged|missing)"):
        checksums.verify(path.parent)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"../x": {"bytes": 1, "crc32": ""}}',
                                  '{"a": {"bytes": "1", "crc32": ""}}', "[" * 100_000])  # fmt: skip
def test_a_damaged_list_is_named(tmp_path, text):
    path = saved(folder.path_of(tmp_path, 7))
    (path / checksums.NAME).write_text(text)
    with pytest.raises(checksums.DamagedError, match=r"checksums\.json is damaged"):
        checksums.verify(path)


def test_the_older_good_checkpoint_is_offered(tmp_path):
    for iteration in (1, 2, 3, 4):
        saved(folder.path_of(tmp_path, iteration))
    for iteration in (3, 4):
        (folder.path_of(tmp_path, iteration) / "__0_0.distcp").write_bytes(b"SHARD")
    newest = folder.path_of(tmp_path, 4)
    assert "iter_0000002 is whole: resume from it with --resume-from 2" in folder.advice(newest)
    assert "no older whole checkpoint" in folder.advice(folder.path_of(tmp_path, 1))


def test_a_run_that_goes_back_keeps_what_was_newer_under_another_name(tmp_path):
    for _ in range(2):
        saved(folder.path_of(tmp_path, 4))
        folder.supersede(tmp_path, 3)
    assert sorted(os.listdir(tmp_path)) == ["superseded-iter_0000004", "superseded-iter_0000004.1"]


@pytest.mark.parametrize("remove", ["prune", "replace", "sweep", "recover"])
def test_what_no_run_wrote_is_never_deleted(tmp_path, capfd, remove):
    """A note beside the shards, or the whole of another program's checkpoint."""
    for iteration in (1, 2):
        path = saved(folder.path_of(tmp_path, iteration))
        (path / "mp_rank_00").mkdir()
        (path / "mp_rank_00" / "model_optim_rng.pt").write_text(f"of {iteration}")
    if remove == "prune":
        folder.prune(tmp_path, 1)
    elif remove == "replace":
        folder.replace(saved(tmp_path / ".tmp-iter_0000001"), folder.path_of(tmp_path, 1))
    else:
        (folder.path_of(tmp_path, 1) / "metadata.json").unlink()
        if remove == "sweep":
            folder.set_aside(folder.path_of(tmp_path, 1))
            folder.sweep(tmp_path)
        else:
            saved(tmp_path / ".tmp-iter_0000001")
            folder.recover(tmp_path)
    kept = tmp_path / "superseded-iter_0000001"
    assert (kept / "mp_rank_00" / "model_optim_rng.pt").read_text() == "of 1"
    assert os.listdir(kept) == ["mp_rank_00"]
    assert "files that no run wrote: they are in superseded-iter_0000001" in capfd.readouterr().err
    assert 2 in folder.complete(tmp_path)


def test_a_linked_checkpoint_gives_its_name_up_and_stays(tmp_path):
    elsewhere = saved(tmp_path / "elsewhere")
    folder.path_of(tmp_path, 1).symlink_to(elsewhere)
    folder.delete(folder.path_of(tmp_path, 1))
    assert shard(tmp_path / "superseded-iter_0000001") == shard(elsewhere) == b"shard"


def test_what_torch_leaves_of_an_index_is_ours(tmp_path):
    path = saved(tmp_path / ".tmp-iter_0000001")
    (path / ".metadata").rename(path / ".metadata.tmp")
    (path / ".sum-__0_0.distcp").write_text("{}")
    folder.sweep(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_complete_one_that_made_way_outlives_a_second_kill(tmp_path):
    """A save of the same iteration was killed, and no run has recovered what it replaced."""
    final = saved(folder.path_of(tmp_path, 4), b"old")
    folder.set_aside(final)
    saved(final, b"new")
    (final / "metadata.json").unlink()
    folder.set_aside(final)
    assert shard(tmp_path / ".old-iter_0000004") == b"old" and not final.exists()


def test_the_writer_sums_what_it_writes(tmp_path):
    from megacpp_mcore.training.checkpoints import writer

    path = tmp_path / "__0_0.distcp"
    parts = [b"head", os.urandom(3 << 20), memoryview(os.urandom(1 << 20)), b"tail"]
    with writer._SummedFile(str(path), "wb") as file:
        for part in parts:
            assert file.write(part) == len(part)
        assert file.tell() == sum(map(len, parts))
        os.fsync(file.fileno())
    assert path.read_bytes() == b"".join(parts)
    assert json.loads((tmp_path / ".sum-__0_0.distcp").read_text()) == checksums.of_file(path)
    with pytest.raises(io.UnsupportedOperation), writer._SummedFile(str(path), "wb") as file:
        file.read()


def test_the_sum_of_a_file_is_that_of_its_pieces(tmp_path):
    for _ in range(20):
        whole = os.urandom(random.randrange(1, 10_000))
        at = random.randrange(len(whole) + 1)
        first, second = zlib.crc32(whole[:at]), zlib.crc32(whole[at:])
        assert checksums.joined(first, second, len(whole) - at) == zlib.crc32(whole)


def test_the_writer_sums_while_it_writes(tmp_path, monkeypatch):
    """Each waits for the other to begin, and several pieces of one tensor are summed at once."""
    from megacpp_mcore.training.checkpoints import writer

    together = threading.Barrier(3)  # the write, and two of the pieces
    sums = iter(range(2))

    class File(io.BytesIO):
        def write(self, data):
            together.wait(60)
            return super().write(data)

    def crc32(data, before=0):
        if next(sums, None) is not None:
            together.wait(60)
        return zlib.crc32(data, before)

    monkeypatch.setattr(writer, "zlib", SimpleNamespace(crc32=crc32))
    monkeypatch.setattr(writer, "open", lambda path, mode: File(), raising=False)
    data = os.urandom(3 * writer._PIECE + 17)
    path = tmp_path / "__0_0.distcp"
    with writer._SummedFile(str(path), "wb") as file:
        file.write(data)
    assert not [t for t in threading.enumerate() if "ThreadPoolExecutor" in t.name]
    found = json.loads((tmp_path / ".sum-__0_0.distcp").read_text())
    assert found == {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}


@pytest.mark.parametrize("pieces", [1, 2, 7, 8, 9, 40])
def test_a_block_is_summed_in_a_few_pieces(tmp_path, monkeypatch, pieces):
    """Handing a piece out and joining it costs the same, however long it is."""
    from megacpp_mcore.training.checkpoints import writer

    lengths, crc32 = [], zlib.crc32
    monkeypatch.setattr(writer, "zlib", SimpleNamespace(
        crc32=lambda data, *before: (lengths.append(len(data)), crc32(data, *before))[1]
    ))  # fmt: skip
    data, path = os.urandom(pieces * writer._PIECE - 3), tmp_path / "__0_0.distcp"
    with writer._SummedFile(str(path), "wb") as file:
        file.write(data)
    assert sum(lengths) == len(data) and len(lengths) == min(pieces, writer._PIECES)
    assert json.loads((tmp_path / ".sum-__0_0.distcp").read_text()) == checksums.of_file(path)


def test_a_save_is_on_the_disk_before_an_older_one_is_deleted(tmp_path, monkeypatch):
    """Every file, and the names of file and folder: a power loss after pruning costs nothing."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig

    from megacpp_mcore.training.checkpoints import writer

    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (real(file), synced.append(os.fstat(file))))
    checkpoint = folder.path_of(tmp_path, 1)
    checkpoint.mkdir()
    opened = {"__0_0.distcp": writer._SummedFile, ".metadata": open}
    for name, place in opened.items():  # Megatron syncs these so, before the buffer is written
        with place(str(checkpoint / name), "wb") as file:
            file.write(b"data")
            os.fsync(file.fileno())
    writer._gather_and_save_config(CheckpointingConfig("torch_dist", 1), str(checkpoint))
    assert folder.is_complete(checkpoint) and checksums.verify(checkpoint)
    last = {(found.st_dev, found.st_ino): found for found in synced}
    for path in (tmp_path, checkpoint, *checkpoint.iterdir()):
        now = path.stat()
        then = last.get((now.st_dev, now.st_ino))
        assert then and then.st_mtime_ns == now.st_mtime_ns, f"{path} was not synced"
