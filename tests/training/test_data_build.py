"""Building from text: what is read, in which order, what is written, and what a crash leaves."""

import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megacpp_mcore import cli
from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.training.data import build as data_build
from megacpp_mcore.training.data.build import build
from megacpp_mcore.training.data.files import DataError, read_pair
from megacpp_mcore.training.data.sources import torch_headers
from megacpp_mcore.training.data.text import TextFiles


def write_tree(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def tree_of(tmp_path: Path, count: int = 20, name: str = "src") -> Path:
    files = {f"dir{i % 4}/f{i:02}.h": f"int f{i}();\n".encode() * (i + 1) for i in range(count)}
    return write_tree(tmp_path / name, files)


def documents_of(prefix: Path) -> list[bytes]:
    """The documents as Megatron's own reader gives them, without their end token."""
    documents = [sequence.tolist() for sequence in IndexedDataset(str(prefix))]
    assert all(document[-1] == 256 for document in documents)
    return [bytes(document[:-1]) for document in documents]


def test_documents_come_back_byte_for_byte(tmp_path):
    rng = np.random.default_rng()
    contents = {
        "utf8.h": "// größer, 大\n".encode(),
        "latin1.h": "// größer\n".encode("latin-1"),
        "deep/er/bytes.txt": rng.integers(1, 256, 70_001).astype(np.uint8).tobytes(),
        "one": b"x",
        "crlf.h": b"a\r\nb\r\n",
    }
    manifest = build(TextFiles([write_tree(tmp_path / "src", contents)]), tmp_path / "out" / "c")
    found = documents_of(tmp_path / "out" / "c")
    assert sorted(found) == sorted(contents.values())
    assert manifest["documents"] == 5
    assert manifest["tokens"] == sum(map(len, contents.values())) + 5
    assert (manifest["vocab_size"], manifest["eod_id"]) == (257, 256)
    assert manifest == json.loads((tmp_path / "out" / "c.json").read_text())
    assert read_pair(tmp_path / "out" / "c", 257, verify_hashes=True).manifest == manifest


def test_what_is_left_out_is_counted(tmp_path):
    src = write_tree(
        tmp_path / "src",
        {
            "a.h": b"a",
            "empty.h": b"",
            "object.o": b"\x7fELF\0",
            ".git/config": b"x",
            ".hidden": b"x",
        },
    )
    elsewhere = write_tree(tmp_path / "elsewhere", {"b.h": b"b"})
    (src / "linked").symlink_to(elsewhere)
    (src / "linked.h").symlink_to(elsewhere / "b.h")
    os.mkfifo(src / "fifo")
    manifest = build(TextFiles([src]), tmp_path / "c")
    assert sorted(documents_of(tmp_path / "c")) == [b"a", b"b"]
    assert manifest["skipped"] == {
        "binary file": 1,
        "empty file": 1,
        "hidden": 2,
        "linked folder": 1,
        "not a regular file": 1,
    }


def test_include_keeps_names_and_paths(tmp_path):
    src = write_tree(tmp_path / "src", {"a.h": b"1", "b.cpp": b"2", "d/c.h": b"3", "d/e.py": b"4"})

    def kept(*globs):
        build(TextFiles([src], globs), tmp_path / "c", overwrite=True)
        return sorted(documents_of(tmp_path / "c"))

    assert kept("*.h") == [b"1", b"3"]
    assert kept("*.h", "*.cpp") == [b"1", b"2", b"3"]
    assert kept("d/*") == [b"3", b"4"]
    with pytest.raises(DataError, match=r"no file matching \*\.rs"):
        TextFiles([src], ["*.rs"])


def test_files_and_folders_can_be_mixed_as_sources(tmp_path):
    src = write_tree(tmp_path / "src", {"a.h": b"1"})
    lone = write_tree(tmp_path / "lone", {".x": b"2", "y": b"3"})
    build(TextFiles([src, lone / ".x"]), tmp_path / "c")
    assert sorted(documents_of(tmp_path / "c")) == [b"1", b"2"]


def test_same_input_same_bytes_wherever_it_lies(tmp_path):
    first = tree_of(tmp_path)
    second = tmp_path / "some" / "where" / "src"
    shutil.copytree(first, second)
    build(TextFiles([first]), tmp_path / "a")
    build(TextFiles([second]), tmp_path / "b")
    for suffix in (".bin", ".idx", ".json"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()
    assert str(tmp_path) not in (tmp_path / "a.json").read_text()


def test_order_is_drawn_from_the_seed_and_stable_under_additions(tmp_path):
    src = tree_of(tmp_path, 40)
    build(TextFiles([src], seed=1), tmp_path / "a")
    build(TextFiles([src], seed=2), tmp_path / "b")
    by_path = [path.read_bytes() for path in sorted(src.rglob("*.h"))]
    first, other = documents_of(tmp_path / "a"), documents_of(tmp_path / "b")
    assert sorted(first) == sorted(other) == sorted(by_path)
    assert len({tuple(order) for order in (first, other, by_path)}) == 3

    write_tree(src, {"new.h": b"new"})
    build(TextFiles([src], seed=1), tmp_path / "c")
    assert [document for document in documents_of(tmp_path / "c") if document != b"new"] == first


def test_held_out_part_is_not_one_corner_of_the_tree(tmp_path):
    src = write_tree(
        tmp_path / "src", {f"dir{d}/f{i}.h": b"%d" % d for d in range(4) for i in range(50)}
    )
    build(TextFiles([src]), tmp_path / "c")
    assert set(documents_of(tmp_path / "c")[-40:]) == {b"0", b"1", b"2", b"3"}


def test_torch_headers_are_found_and_are_the_installed_ones():
    import torch

    assert torch_headers() == Path(torch.__file__).parent / "include"


class TestRefusals:
    def test_sources(self, tmp_path):
        src = tree_of(tmp_path)
        with pytest.raises(DataError, match="no source"):
            TextFiles([])
        with pytest.raises(DataError, match=r"cannot read the source .*nowhere"):
            TextFiles([tmp_path / "nowhere"])
        with pytest.raises(DataError, match="inside source"):
            TextFiles([src, src / "dir1"])
        with pytest.raises(DataError, match=r"source .*dir1/\.\. is source .*src again"):
            TextFiles([src, src / "dir1" / ".."])
        (tmp_path / "empty").mkdir()
        with pytest.raises(DataError, match="no file in"):
            TextFiles([tmp_path / "empty"])

    def test_a_link_to_nothing_is_counted(self, tmp_path):
        src = tree_of(tmp_path)
        whole = TextFiles([src])
        (src / "broken.h").symlink_to(tmp_path / "nowhere")
        source = TextFiles([src])
        assert source.paths == whole.paths
        assert sum(1 for _ in source.documents(lambda n: None)) == len(whole.paths)
        assert source.skipped["dangling link"] == 1

    def test_file_that_goes_away_while_reading(self, tmp_path):
        src = tree_of(tmp_path)
        source = TextFiles([src])
        (src / "dir0" / "f00.h").unlink()
        with pytest.raises(DataError, match=r"cannot read .*f00\.h"):
            build(source, tmp_path / "out" / "c")
        assert list((tmp_path / "out").iterdir()) == []

    def test_permissions(self):
        # Not tmp_path: only its owner may enter it, and root, who reads everything, steps down.
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            src = tree_of(Path(folder))
            (src / "dir1").chmod(0)
            (src / "dir2" / "f02.h").chmod(0)
            user = os.geteuid()
            try:
                if user == 0:
                    os.seteuid(65534)
                with pytest.raises(DataError, match=r"cannot read the folder .*dir1"):
                    TextFiles([src])
                with pytest.raises(DataError, match=r"cannot read .*f02\.h: Permission denied"):
                    list(TextFiles([src / "dir2"]).documents(lambda count: None))
            finally:
                os.seteuid(user)
                (src / "dir1").chmod(0o755)

    def test_nothing_but_empty_and_binary_files(self, tmp_path):
        src = write_tree(tmp_path / "src", {"a": b"", "b": b"\0"})
        with pytest.raises(DataError, match=r"no document .*1 binary file, 1 empty file"):
            build(TextFiles([src]), tmp_path / "out" / "c")
        assert list((tmp_path / "out").iterdir()) == []

    def test_parquet_among_text(self, tmp_path):
        src = write_tree(tmp_path / "src", {"a.h": b"a", "x.parquet": b"PAR1"})
        with pytest.raises(DataError, match=r"x\.parquet is a Parquet shard .*--text-column"):
            TextFiles([src])

    @pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
    def test_existing_output(self, tmp_path, suffix):
        src = tree_of(tmp_path)
        (tmp_path / f"c{suffix}").write_text("mine")
        with pytest.raises(DataError, match="--overwrite"):
            build(TextFiles([src]), tmp_path / "c")
        assert (tmp_path / f"c{suffix}").read_text() == "mine"
        build(TextFiles([src]), tmp_path / "c", overwrite=True)
        assert read_pair(tmp_path / "c", 257, verify_hashes=True)

    def test_output_over_a_source(self, tmp_path):
        src = write_tree(tmp_path / "src", {"a.h": b"a", "c.json": b"{}"})
        with pytest.raises(DataError, match="one of its sources"):
            build(TextFiles([src]), src / "c", overwrite=True)
        assert (src / "c.json").read_bytes() == b"{}"

    def test_stale_index_cache_of_megatron(self, tmp_path):
        (tmp_path / "c" / "cache" / "GPTDataset_indices").mkdir(parents=True)
        with pytest.raises(DataError, match="remove that folder"):
            build(TextFiles([tree_of(tmp_path)]), tmp_path / "c")

    @pytest.mark.parametrize("prefix", ["out/", "c.bin", "c.idx"])
    def test_prefix_that_names_a_file_or_folder(self, tmp_path, prefix):
        source = TextFiles([tree_of(tmp_path)])
        with pytest.raises(DataError, match="not a file prefix"):
            build(source, f"{tmp_path}/{prefix}")

    def test_parent_that_is_a_file(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(DataError, match="cannot write"):
            build(TextFiles([tree_of(tmp_path)]), tmp_path / "file" / "c")


class TestDiskFull:
    def test_is_seen_before_writing(self, tmp_path, monkeypatch):
        source = TextFiles([tree_of(tmp_path)])
        usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
        monkeypatch.setattr(data_build.shutil, "disk_usage", lambda folder: usage)
        with pytest.raises(DataError, match=r"not enough room .* 1\.0 MiB free"):
            build(source, tmp_path / "out" / "c")
        assert list((tmp_path / "out").iterdir()) == []

    def test_while_writing_leaves_nothing(self, tmp_path, monkeypatch):
        def on_a_full_disk(path, mode):
            return open("/dev/full", mode)

        monkeypatch.setattr(data_build, "open", on_a_full_disk, raising=False)
        with pytest.raises(DataError, match="disk full"):
            build(TextFiles([tree_of(tmp_path, 200)]), tmp_path / "out" / "c")
        assert list((tmp_path / "out").iterdir()) == []

    def test_keeps_the_dataset_it_was_to_replace(self, tmp_path, monkeypatch):
        build(TextFiles([tree_of(tmp_path)]), tmp_path / "c")
        before = documents_of(tmp_path / "c")

        def full(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(data_build, "sync", full)
        with pytest.raises(DataError, match="disk full"):
            build(TextFiles([tree_of(tmp_path, 5, "new")]), tmp_path / "c", overwrite=True)
        assert documents_of(tmp_path / "c") == before
        assert not list(tmp_path.glob(".c.*"))


class Killed(BaseException):
    """The process ends here."""


class TestCrash:
    @pytest.mark.parametrize("overwrite", [False, True])
    @pytest.mark.parametrize("moves", [0, 1, 2])
    def test_between_any_two_moves(self, tmp_path, monkeypatch, overwrite, moves):
        prefix = tmp_path / "c"
        if overwrite:
            build(TextFiles([tree_of(tmp_path)]), prefix)
        real, done = os.replace, []

        def replace(src, dst):
            if len(done) == moves:
                raise Killed
            done.append(real(src, dst))

        monkeypatch.setattr(data_build.os, "replace", replace)
        with pytest.raises(Killed):
            build(TextFiles([tree_of(tmp_path, 5, "new")]), prefix, overwrite=overwrite)
        with pytest.raises(DataError, match=r"c\.idx missing"):
            read_pair(prefix)
        monkeypatch.undo()
        build(TextFiles([tmp_path / "new"]), prefix, overwrite=True)
        assert read_pair(prefix, 257, verify_hashes=True).lengths.size == 5

    @pytest.mark.filterwarnings("ignore:.*multi-threaded")
    def test_kill_at_any_moment_leaves_a_whole_dataset_or_none(self, tmp_path):
        prefix = tmp_path / "c"
        sources = [TextFiles([tree_of(tmp_path, n, f"src{n}")]) for n in (7, 11)]
        build(sources[0], prefix)
        outcomes = set()
        for round_ in range(12):
            pid = os.fork()
            if pid == 0:
                try:
                    while True:
                        for source in sources:
                            build(source, prefix, overwrite=True)
                finally:
                    os._exit(1)
            time.sleep(0.02 + 0.011 * round_)
            os.kill(pid, signal.SIGKILL)
            assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
            try:
                outcomes.add(read_pair(prefix, 257, verify_hashes=True).lengths.size)
            except DataError as error:
                assert "c.idx missing" in str(error)
        assert outcomes <= {7, 11} and outcomes


class TestCommand:
    @pytest.mark.slow
    @pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_leaves_nothing(self, tmp_path, how):
        out = tmp_path / "out"
        (src := tmp_path / "src").mkdir()
        (src / "a.h").write_text("int x;")
        program = """
import os, sys
from megacpp_mcore import cli
from megacpp_mcore.training.data.text import TextFiles
TextFiles._read = lambda self, file: print("reads", flush=True) or os.read(0, 1)
sys.exit(cli.main(sys.argv[1:]))
"""
        words = [sys.executable, "-c", program, "data", "build", str(src), "--out", f"{out}/c"]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True) as child:  # fmt: skip
            assert child.stdout.readline() == "reads\n"
            assert len(list(out.iterdir())) == 1
            child.send_signal(how)
            assert child.wait(30) == 128 + how
            assert len(child.stderr.read().splitlines()) <= 1
        assert list(out.iterdir()) == []

    def test_build_and_check(self, tmp_path, capsys):
        src = write_tree(tmp_path / "src", {"a.h": b"aab", "b.o": b"\0"})
        prefix = str(tmp_path / "c")
        assert cli.main(["data", "build", str(src), "--out", prefix]) == 0
        printed = capsys.readouterr()
        assert "documents  1" in printed.out and "left out   1 (binary file)" in printed.out
        assert f"--data-path {prefix} --tokenizer-type NullTokenizer" in printed.out
        assert "%" not in printed.err  # no progress bar where stderr is no terminal
        assert cli.main(["data", "check", prefix]) == 0
        # aab + end: counts 2, 1, 1; pairs aa, ab, b-end
        assert "unigram 1.0397, bigram 0.4621" in capsys.readouterr().out

    def test_needs_neither_torch_nor_megatron(self, tmp_path):
        src = write_tree(tmp_path / "src", {"a.h": b"int x;"})
        program = "import sys; sys.modules |= {'torch': None, 'megatron': None}\n"
        program += "from megacpp_mcore import cli; sys.exit(cli.main(sys.argv[1:]))"
        for words in (["build", str(src), "--resume", "--out"], ["check"]):
            command = [sys.executable, "-c", program, "data", *words, f"{tmp_path}/c"]
            assert subprocess.run(command, capture_output=True).returncode == 0

    def test_a_pair_of_another_tool_is_checked_as_far_as_that_goes(self, tmp_path, capsys):
        build(TextFiles([write_tree(tmp_path / "src", {"a.cpp": b"int x;"})]), tmp_path / "c")
        (tmp_path / "c.json").unlink()
        assert cli.main(["data", "check", str(tmp_path / "c")]) == 0
        out = capsys.readouterr().out
        assert "whether it is unchanged is not known" in out and "the largest id 256" in out
        with open(tmp_path / "c.bin", "ab") as stream:
            stream.write(b"more")
        assert cli.main(["data", "check", str(tmp_path / "c")]) == 1

    def test_build_goes_past_a_dangling_link_and_says_what_comes_next(self, tmp_path, capsys):
        src = write_tree(tmp_path / "src", {"a.cpp": b"int x;"})
        (src / "b.cpp").symlink_to(tmp_path / "nowhere")
        out = tmp_path / "my data"
        assert cli.main(["data", "build", str(src), "--out", str(out)]) == 0
        said = capsys.readouterr().out
        assert "1 (dangling link)" in said
        (following,) = [line for line in said.splitlines() if line.startswith("next: ")]
        words = shlex.split(following.removeprefix("next: "))
        assert words[:3] == ["megacpp", "train", "nam56r-tiny"]
        assert load_recipe(words[2], words[4:5]).data.data_path == (str(out),)

    def test_check_sees_one_changed_bit(self, tmp_path, capsys):
        build(TextFiles([tree_of(tmp_path)]), tmp_path / "c")
        data = bytearray((tmp_path / "c.bin").read_bytes())
        data[10] ^= 1
        (tmp_path / "c.bin").write_bytes(data)
        assert cli.main(["data", "check", str(tmp_path / "c")]) == 1
        assert "changed after it was built" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            (["--vocab-size", "300"], "--vocab-size is for --tokens-column only"),
            (["--eod-id", "0"], "--eod-id is for --tokens-column only"),
            (["--append-eod"], "--append-eod is for --tokens-column only"),
            (["--tokens-column", "ids"], "needs --vocab-size"),
            (["--text-column", "t", "--seed", "3"], "--seed is for text files only"),
            (["--text-column", "t", "--torch-headers"], "cannot be mixed"),
        ],
    )
    def test_options_that_would_do_nothing_are_refused(self, tmp_path, capsys, extra, message):
        src = tree_of(tmp_path)
        assert cli.main(["data", "build", str(src), "--out", str(tmp_path / "c"), *extra]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "c.bin").exists()

    def test_interrupt_leaves_nothing(self, tmp_path, monkeypatch, capsys):
        def interrupted(self, advance):
            yield np.array([1, 256], np.uint16)
            raise KeyboardInterrupt

        monkeypatch.setattr(TextFiles, "documents", interrupted)
        out = tmp_path / "out"
        assert cli.main(["data", "build", str(tree_of(tmp_path)), "--out", str(out / "c")]) == 130
        assert list(out.iterdir()) == []
        assert "interrupted" in capsys.readouterr().err
