"""Ranks that hang: one is named, all stacks are there, the run ends; and kills without number.

`MEGACPP_KILLS=50 pytest tests/training/test_heartbeat.py` is the long run.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from left_behind import Marked, wait_until

from megacpp_mcore.training import heartbeat as heartbeat_module
from megacpp_mcore.training.checkpoints import folder
from megacpp_mcore.training.heartbeat import EXIT_STATUS, Heartbeat

KILLS = int(os.environ.get("MEGACPP_KILLS", 1))
STEPS = 200

# Two ranks of a training loop over gloo, with the launcher, heartbeats and checkpoint folders of a
# run; a rank's progress is in OUT/at-N.
RANK = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from megacpp_mcore.files import sync
from megacpp_mcore.training.checkpoints import checksums, folder
from megacpp_mcore.training.heartbeat import Heartbeat

def main(out, steps, pause, timeout):
    dist.init_process_group("gloo")
    rank, place = dist.get_rank(), out / "checkpoints"
    torch.manual_seed(1)
    weight, first, losses = torch.zeros(8), 1, []
    if rank == 0:
        place.mkdir(parents=True, exist_ok=True)
        folder.recover(place)
    dist.barrier()
    if found := folder.complete(place):
        newest = folder.path_of(place, found[-1])
        assert checksums.verify(newest)
        state = torch.load(newest / "__0_0.distcp", weights_only=True)
        weight, losses, first = state["weight"], state["losses"], found[-1] + 1
    with Heartbeat(out / "heartbeat", rank, timeout) as heartbeat:
        for step in range(first, steps + 1):
            heartbeat.beat(f"in step {step}")
            (out / f"at-{rank}").write_text(str(step))
            time.sleep(pause)
            if (out / f"hang-{rank}").exists():
                (out / f"hang-{rank}").unlink()
                time.sleep(1000)
            data = torch.randn(8, generator=torch.Generator().manual_seed(100 * step + rank))
            gradient = weight - data
            dist.all_reduce(gradient)
            weight -= 0.01 * gradient
            losses.append(float(weight.norm()))
            if step % 2 == 0:
                if rank == 0:
                    final = folder.path_of(place, step)
                    partial = folder.being_written(final)
                    folder.sweep(place)
                    partial.mkdir()
                    torch.save({"weight": weight, "losses": losses}, partial / "__0_0.distcp")
                    for name in (".metadata", "metadata.json"):
                        (partial / name).write_text("{}")
                    checksums.write(partial, {})
                    for path in [*partial.iterdir(), partial]:
                        sync(path)
                    folder.replace(partial, final)
                    folder.prune(place, 2)
                dist.barrier()
        if rank == 0:
            (out / "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()

main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
"""
LAUNCHER = """
import sys
from megacpp_mcore.training.gpu.torchrun import run_ranks

ended = run_ranks("a_looping_rank", sys.argv[1:], 2)
print(ended.reason, file=sys.stderr)
sys.exit(ended.status)
"""


class Run:
    """A run of two ranks that can be started again and again."""

    def __init__(self, place: Path, name: str, pause: float) -> None:
        self.out, self.err, self.marked = place / name, place / f"{name}.err", Marked()
        self.out.mkdir()
        (place / "a_looping_rank.py").write_text(RANK)
        path = f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self._environment = os.environ | self.marked.environment | {"PYTHONPATH": path}
        self._words = [sys.executable, "-c", LAUNCHER, str(self.out), str(STEPS), str(pause)]

    def start(self, timeout: float = 3.0) -> subprocess.Popen:
        """timeout: seconds without progress that end it, which a busy machine may take."""
        return subprocess.Popen(
            [*self._words, str(timeout)], env=self._environment, stdout=self.err.open("a"),
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def ranks(self) -> list[int]:
        found = []
        for pid in self.marked.pids():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"a_looping_rank" in words and b"-m" in words:
                found.append(pid)
        return sorted(found)

    def step(self) -> int:
        try:
            return int((self.out / "at-0").read_text() or 0)
        except (OSError, ValueError):
            return 0

    def losses(self) -> list[float]:
        return json.loads((self.out / "losses.json").read_text())


def unbroken() -> list[float]:
    """The losses of all steps, computed here."""
    weight, losses = torch.zeros(8), []
    for step in range(1, STEPS + 1):
        seeds = (torch.Generator().manual_seed(100 * step + rank) for rank in range(2))
        gradients = [weight - torch.randn(8, generator=seed) for seed in seeds]
        weight = weight - 0.01 * (gradients[0] + gradients[1])
        losses.append(float(weight.norm()))
    return losses


@pytest.mark.slow
@pytest.mark.timeout(120 + 60 * KILLS)
def test_kills_and_hangs_end_at_the_losses_of_an_unbroken_run(tmp_path):
    """A rank or the launcher is killed, or a rank hangs, at random; then the run is resumed."""
    run, rng, hurt = Run(tmp_path, "broken", 0.03), random.Random(), 0
    for number in range(KILLS):
        before, process = run.step(), run.start()
        (run.out / "at-0").unlink(missing_ok=True)
        wait_until(lambda: run.step() > 0 or process.poll() is not None, 60)  # noqa: B023
        time.sleep(rng.uniform(0, min(1.0, 0.06 * STEPS / KILLS)))  # spread over the steps
        ranks = run.ranks()
        way = ["hang", "kill", "launcher", "stop"][number % 4]
        if process.poll() is not None or not ranks:
            assert process.wait() == 0 and before  # it ended before it could be hurt
            break
        hurt += 1
        victim = rng.choice(ranks)
        if way == "launcher":
            process.kill()
        elif way == "hang":
            (run.out / f"hang-{rng.randrange(2)}").touch()
        else:
            os.kill(victim, signal.SIGSTOP if way == "stop" else signal.SIGKILL)
        status = process.wait(timeout=100)
        for left in run.out.glob("hang-*"):  # the run had ended
            left.unlink()
        said = run.err.read_text()
        if way in ("hang", "stop") and status != 0:
            assert status == EXIT_STATUS  # also where the launcher kills the rank that is stopped
            assert "has made no progress for" in said and "stacks of rank" in said
        assert run.marked.left() == []
    print(f"{hurt} of {KILLS} times hurt")
    assert hurt >= KILLS / 2
    assert run.start(timeout=100.0).wait(timeout=120) == 0
    assert run.losses() == unbroken()
    assert folder.complete(run.out / "checkpoints") == [STEPS - 2, STEPS]


def heartbeats(place: Path, **counts: tuple[int, float]) -> None:
    for name, (count, at) in counts.items():
        content = {"count": count, "doing": f"in step {count}", "at": at, "host": f"h{name[-1]}"}
        (place / f"rank-{name[-1]}.json").write_text(json.dumps(content))


def test_the_rank_that_is_behind_is_named(tmp_path):
    now = time.time()
    heartbeats(tmp_path, r0=(7, now), r1=(5, now - 40), r2=(7, now - 1))
    (tmp_path / "rank-9.json").write_text("junk")
    mine = Heartbeat(tmp_path, 3, None)
    mine._count, mine._doing = 7, "in step 7"
    assert mine.verdict().startswith("rank 1 on h1 has made no progress for 40 s: it was in step 5")
    mine._count = 2
    assert mine.verdict().startswith("rank 3 on ")


@pytest.mark.parametrize("text", [
    "[]", "null", "7", "{}", '{"count": "x"}', '{"count": 1e400, "at": 0}', "[" * 100_000,
    '{"count": -1, "at": null, "doing": "", "alone": false, "host": "", "pid": 1}',
    '{"count": -1, "at": 0, "alone": false, "pid": 1}',
])  # fmt: skip
def test_a_word_that_no_rank_wrote_is_not_believed(tmp_path, text):
    """The thread that watches would end, and a run that hangs would not."""
    mine = Heartbeat(tmp_path, 0, 3.0)
    (tmp_path / "rank-1.json").write_text(text)
    assert mine.verdict().startswith("rank 0 on ")


def test_a_rank_that_reads_is_named_before_those_that_wait_for_it(tmp_path):
    """One of two tensor-parallel ranks reads for both; the other has said nothing in this step."""
    reads, waits = Heartbeat(tmp_path, 0, 1e6), Heartbeat(tmp_path, 1, 1e6)
    with reads, waits:
        for heartbeat in (waits, reads):
            heartbeat.beat("in step 1")
        for _ in range(4):
            reads.note("in step 1, reading a micro batch", alone=True)
            reads.note("in step 1")
        reads._write(), waits._write()
        assert reads.verdict().startswith("rank 1 on ")  # the first to be silent
        reads.note("in step 1, reading a micro batch", alone=True)
        reads._write()
        for heartbeat in (waits, reads):
            named = heartbeat.verdict()
            assert named.startswith("rank 0 on ") and named.endswith("reading a micro batch")
        waits.beat("in step 2")
        assert waits.verdict().startswith("rank 0 on ")


def test_ranks_of_an_earlier_and_larger_run_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    now = time.time()
    heartbeats(tmp_path, r1=(3, now - 9000), r2=(2, now - 9000), r7=(1, now - 9000))
    (tmp_path / "rank-old.json").write_text("junk")
    first, second = Heartbeat(tmp_path, 0, 1e6), Heartbeat(tmp_path, 1, 1e6)
    with first, second:
        for step in range(5):
            for heartbeat in (second, first):
                heartbeat.beat(f"in step {step}")
        assert first.verdict().startswith("rank 1 on ") and "h1" not in first.verdict()
    assert [path.name for path in tmp_path.iterdir()] == ["rank-old.json"]


def test_a_clock_that_is_set_is_no_hang(tmp_path, monkeypatch):
    ended, clock = [], time.time
    with Heartbeat(tmp_path, 0, 2.0, on_timeout=ended.append) as heartbeat:
        monkeypatch.setattr(os, "_exit", lambda status: ended.append(status))
        heartbeat.beat("working")
        monkeypatch.setattr(time, "time", lambda: clock() + 3600)
        time.sleep(0.6)
        assert not ended


def test_a_process_that_hangs_ends_with_its_stacks(tmp_path):
    script = (
        "import sys, time; from pathlib import Path\n"
        "from megacpp_mcore.training.heartbeat import Heartbeat\n"
        "def hangs_here():\n"
        "    time.sleep(60)\n"
        "told = lambda sentence: print('told:', sentence)\n"
        "with Heartbeat(Path(sys.argv[1]), 0, 0.5, on_timeout=told) as beat:\n"
        "    for step in range(5):\n"
        "        beat.beat(f'in step {step}'); time.sleep(0.2)\n"
        "    hangs_here()\n"
    )
    done = subprocess.run(
        [sys.executable, "-u", "-c", script, str(tmp_path)], capture_output=True, text=True,
        timeout=30,
    )  # fmt: skip
    assert done.returncode == 75
    assert "told: rank 0 on" in done.stdout and "it was in step 4" in done.stderr
    assert "in hangs_here" in done.stderr


def test_a_loop_that_goes_on_is_left_alone(tmp_path, monkeypatch):
    """By a clock of its own, as a machine with much to do may stop this process for any time."""
    now, ended = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr(heartbeat_module, "time", clock)
    monkeypatch.setattr(heartbeat_module, "_GRACE_S", 600)
    monkeypatch.setattr(Heartbeat, "_end", lambda self: ended.append(now[0]))
    with Heartbeat(tmp_path, 0, 0.4) as heartbeat:
        for _ in range(6):
            heartbeat.beat("working")
            time.sleep(0.1)  # twice as long as the thread waits
            now[0] += 0.3
        assert ended == []
        now[0] += 0.3
        wait_until(lambda: ended)
    assert list(tmp_path.iterdir()) == []
    with Heartbeat(tmp_path / "off", 0, None) as heartbeat:
        heartbeat.beat("working")
    assert not (tmp_path / "off").exists()
