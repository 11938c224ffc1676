"""Ranks that die: the others end, soon, and one sentence says what happened first."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from left_behind import Marked, wait_until
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from megacpp_mcore.training.gpu.torchrun import RanksOutcome, run_ranks

pytestmark = pytest.mark.slow

# A training loop in miniature: gloo's all-reduce, and a rank that ends in its midst.
RANK = """
import json, os, signal, subprocess, sys, time

if __name__ == "__main__":  # not in the processes that are spawned, which would import it in vain
    import torch
    import torch.distributed as dist

    from megacpp_mcore.training.gpu.torchrun import record_failure

    def children():
        # what a rank starts: the process of asynchronous saves' results, and workers of its data
        from megacpp_mcore.stack import bridges

        bridges.before_megatron()
        from megacpp_mcore.training.checkpoints import writer

        writer.keep_no_process(asynchronous=True)
        data = torch.utils.data.DataLoader(range(8), num_workers=2, persistent_workers=True)
        workers = iter(data)
        # and one that would stay: it heeds no signal and reads no pipe
        deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
        return next(workers), workers, subprocess.Popen([sys.executable, "-c", deaf])

    dist.init_process_group("gloo")
    how = sys.argv[1]
    kept = children() if how in ("killed", "hangs") and dist.get_rank() == 1 else None
    for step in range(1000):
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:  # the peer is gone
            record_failure(error)
            raise
        if step == 3 and dist.get_rank() == 1:
            if how == "killed":
                open(sys.argv[2], "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hangs":
                open(sys.argv[2], "w").write(str(os.getpid()))
                time.sleep(300)
            if how == "killed-as-it-records":
                json.dump = os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
                record_failure(RuntimeError("out of memory"))
            if how == "raises":
                try:
                    raise RuntimeError("loss is NaN")
                except RuntimeError as error:
                    record_failure(error)
                    raise
        if how == "ends" and step == 3:
            break
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch) -> str:
    (tmp_path / "a_rank_in_miniature.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    # For its log torch finds the sources of every frame, of which a test has many: a second a run.
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", lambda: "of a test")
    return "a_rank_in_miniature"


@pytest.fixture
def marked(monkeypatch) -> Marked:
    """The processes of the test's ranks."""
    found = Marked()
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    return found


def test_a_killed_rank_ends_the_others_within_a_minute_and_leaves_nothing(module, marked, tmp_path):
    note = tmp_path / "killed"
    ended = run_ranks(module, ["killed", str(note)], 2)
    assert time.time() - note.stat().st_mtime < 60
    assert ended.status == 128 + signal.SIGKILL
    assert ended.reason.startswith("rank 1 of 2 was killed by SIGKILL")
    assert marked.left() == []


def test_a_rank_that_is_killed_as_it_records_its_error_leaves_no_part_of_it(module):
    ended = run_ranks(module, ["killed-as-it-records"], 2)
    assert ended.status == 128 + signal.SIGKILL
    assert ended.reason.startswith("rank 1 of 2 was killed by SIGKILL")


def test_a_rank_that_raises_is_named_with_its_error(module):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in numbers]
    ended = run_ranks(module, ["raises"], 2)
    assert [signal.getsignal(number) for number in numbers] == before
    assert ended == RanksOutcome(1, "rank 1 of 2 failed: RuntimeError: loss is NaN")


def test_a_rank_that_waits_and_only_notes_sigterm_is_not_blamed_and_ends_soon(
    module, marked, tmp_path
):
    """As one in a collective over NCCL, which does not fail with the other rank's end, under
    Megatron's handler of SIGTERM."""
    (tmp_path / "a_waiting_rank.py").write_text(
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "waits, failed = Path(sys.argv[1], 'waits'), Path(sys.argv[1], 'failed')\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "    waits.touch()\n"
        "    time.sleep(300)\n"
        "while not waits.exists(): time.sleep(0.02)\n"
        "failed.touch()\n"
        "sys.exit(3)\n"
    )
    ended = run_ranks("a_waiting_rank", [str(tmp_path)], 2)
    assert ended == RanksOutcome(3, "rank 1 of 2 ended with status 3; its message is above")
    assert time.time() - (tmp_path / "failed").stat().st_mtime < 25  # the agent waits for 30
    assert marked.left() == []


def test_a_failed_rank_leaves_without_waiting_for_its_data_workers(module, tmp_path, capfd):
    """Megatron's only note SIGTERM; and the error holds the loader, as it does in Megatron's."""
    (tmp_path / "a_rank_with_data.py").write_text(
        "import sys, torch\n"
        "from megacpp_mcore.stack import bridges\n"
        "bridges.before_megatron()\n"
        "from megatron.training.dist_signal_handler import DistributedSignalHandler\n"
        "from megacpp_mcore.host.processes import END_S, end_within\n"
        "def note(_): DistributedSignalHandler().__enter__()\n"
        "if __name__ == '__main__':\n"
        "    data = torch.utils.data.DataLoader(\n"
        "        range(8), num_workers=2, persistent_workers=True, worker_init_fn=note)\n"
        "    workers = iter(data)\n"
        "    next(workers)\n"
        "    try:\n"
        "        raise RuntimeError('loss is NaN')\n"
        "    except RuntimeError:\n"
        "        end_within(END_S)\n"
        "        raise\n"
    )
    ended = run_ranks("a_rank_with_data", [], 1)
    assert ended == RanksOutcome(1, "rank 0 of 1 ended with status 1; its message is above")
    said = capfd.readouterr().err
    assert "RuntimeError: loss is NaN" in said
    assert "Thread 0x" not in said and "worker" not in said.partition("loss is NaN")[2].lower()


@pytest.mark.parametrize("how", ["thread", "library"])
def test_a_failed_rank_that_does_not_leave_is_ended(module, tmp_path, how, capfd):
    """By a thread that is joined, or in a library's own end, after Python's."""
    (tmp_path / "a_staying_rank.py").write_text(
        "import atexit, ctypes, faulthandler, sys, threading, time\n"
        "from megacpp_mcore.host.processes import end_within\n"
        "end_within(1)\n"
        "if sys.argv[1] == 'thread':\n"
        "    threading.Thread(target=time.sleep, args=(300,)).start()\n"
        "else:\n"
        "    atexit.register(lambda: (faulthandler.cancel_dump_traceback_later(),\n"
        "                             ctypes.PyDLL(None).pause()))\n"
        "raise SystemExit(3)\n"
    )
    began = time.monotonic()
    ended = run_ranks("a_staying_rank", [how], 1)
    assert ended.status != 0 and time.monotonic() - began < 60
    if how == "thread":
        assert "Thread 0x" in capfd.readouterr().err  # where it stays
    else:
        assert "SIGALRM" in ended.reason


def test_a_sigterm_before_the_reaper_listens_is_not_lost():
    code = (
        "import os, signal, time; from megacpp_mcore.host.processes import end_children_with_this\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "end_children_with_this(os.getppid()); print('ready', flush=True); time.sleep(300)"
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    assert rank.stdout.readline() == b"ready\n"
    os.killpg(rank.pid, signal.SIGTERM)  # Python has hardly begun to start the reaper
    assert rank.wait(timeout=60) == -signal.SIGKILL


@pytest.fixture
def launcher(module, marked, tmp_path):
    """A launcher whose rank 1 hangs, and that rank's process id."""
    note = tmp_path / "pid"
    code = (
        "from megacpp_mcore.training.gpu.torchrun import run_ranks; import sys; "
        f"e = run_ranks({module!r}, ['hangs', {str(note)!r}], 2); print(e.reason); "
        "sys.exit(e.status)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    wait_until(lambda: note.exists() and note.read_text())
    marked.note_shared_memory()
    assert len(marked.pids()) >= 6  # launcher, ranks, the manager, workers
    yield process, int(note.read_text())
    process.kill()


def test_ranks_that_save_on_sigterm_have_the_time(module, tmp_path):
    """The launcher hands SIGTERM on and waits; then it ends with 128 + 15, and no failure."""
    (tmp_path / "a_saving_rank.py").write_text(
        "import os, signal, sys, time\n"
        "stop = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: stop.append(1))\n"
        "rank = os.environ['RANK']\n"
        "open(sys.argv[1] + '/ready' + rank, 'w')\n"
        "while not stop: time.sleep(0.02)\n"
        "time.sleep(1); open(sys.argv[1] + '/saved' + rank, 'w')\n"
    )
    code = (
        "from megacpp_mcore.training.gpu.torchrun import run_ranks; import sys; "
        f"e = run_ranks('a_saving_rank', [{str(tmp_path)!r}], 2); print(e.reason); "
        "sys.exit(e.status)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2, 60)
    process.terminate()
    said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (128 + signal.SIGTERM, "None\n")
    assert len(list(tmp_path.glob("saved*"))) == 2


def test_a_sigterm_before_the_ranks_are_there_ends_the_launcher(module, tmp_path):
    (tmp_path / "a_rank_that_notes.py").write_text(
        "import sys, time; open(sys.argv[1], 'w'); time.sleep(100)"
    )
    note = tmp_path / "started"
    code = (
        "import os, signal, sys; from megacpp_mcore.training.gpu.torchrun import run_ranks\n"
        "from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent\n"
        "start = LocalElasticAgent._start_workers\n"
        "def term(agent, group):\n"
        "    os.kill(os.getpid(), signal.SIGTERM); return start(agent, group)\n"
        "LocalElasticAgent._start_workers = term\n"
        f"e = run_ranks('a_rank_that_notes', [{str(note)!r}], 1); print(e.reason)\n"
        "sys.exit(e.status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (143, "SIGTERM ended the launcher and its ranks\n")
    assert not note.exists()


def test_the_launcher_takes_its_ranks_with_it(launcher, marked):
    """SIGTERM, as a cluster sends it: no rank is left behind."""
    process, rank = launcher
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM and "SIGTERM ended" in said
    with pytest.raises(ProcessLookupError):
        os.kill(rank, 0)
    assert marked.left() == []


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for it")
def test_a_launcher_that_is_killed_takes_all_of_its_processes_with_it(launcher, marked):
    process, _ = launcher
    process.kill()
    assert marked.left() == []


def test_a_rank_whose_launcher_is_gone_does_not_begin(module):
    nobody = str(2**22 + 1)  # above Linux's largest process id
    command = [
        sys.executable,
        "-m",
        "megacpp_mcore.training.gpu.rank_process",
        nobody,
        module,
        "ends",
    ]
    assert subprocess.run(command).returncode == 128 + signal.SIGKILL
