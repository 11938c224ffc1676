"""Kernels that are compiled before a run's model is built, by a process for each part of it.

A rank compiles the kernels of Triton, Inductor and FlashAttention-4 one after another as its first
step reaches them, and so does every other rank. The processes here fill the same caches, all parts
at once, while nvcc compiles in the launcher, and while the ranks import their packages: those wait
(`wait_for`) before they build anything. A rank compiles what it does not find, so that nothing here
decides whether there is a run.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import psutil

from megacpp_mcore import dispatch
from megacpp_mcore.files import content_sha256, write_atomically
from megacpp_mcore.host.gpus import Gpu, visible
from megacpp_mcore.receipts import lane
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.training.gpu.precompile_part import ENDS, TOOK, parts
from megacpp_mcore.training.gpu.rank_setup import OUT, environment_of, recipe_argv

LIMIT_S = 180.0
_PART = "megacpp_mcore.training.gpu.precompile_part"
_PROCESS = "megacpp_mcore.training.gpu.rank_process"  # ends with the launcher, with all it started
_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
# Sections and keys of a recipe that no kernel depends on.
_SECTIONS_APART = ("checkpoint", "schedule", "data", "launch")
_KEYS_OF_THEM = (
    "schedule.micro_batch_size", "data.dataloader_inter_document_masking", "launch.environment",
)  # fmt: skip


@contextlib.contextmanager
def beside(recipe: Recipe, gpus: int, out: Path) -> Iterator[list[int]]:
    """Compile the kernels of the recipe's parts while the block runs. Yields the processes that do,
    for ranks to wait for; those that are left at the block's end, or where SIGTERM or Ctrl-C ends
    this process, are killed.

    gpus: of this machine, to which the parts go in turn. out: the run's folder. Nothing is done
    where there is no GPU, where ranks have a part of each layer (tensor or context parallelism),
    or where the caches hold the mark of an earlier launch that compiled the same. What fails, or
    takes more than LIMIT_S in all, is said in a line on stderr.
    """
    found = [] if _splits_layers(recipe) else visible()
    marks = _marks(recipe, out, found[0]) if found else []
    if not marks or all(mark.is_file() for mark in marks):
        yield []
        return
    names = parts(recipe)
    letters = ", ".join(name for name in names if name != ENDS)
    _say(
        f"compiling the kernels of {letters} and of the model's ends in {len(names)} processes: "
        "once"
    )
    began, running, cut = time.monotonic(), [], threading.Event()
    waiting = threading.Thread(target=lambda: _collect(running, len(names), began, marks, cut))
    try:
        try:
            for number, name in enumerate(names):
                running.append(_start(name, recipe, out, _device(number, gpus)))
        except OSError as error:  # no more processes, no place for a log
            _say(f"not all parts are compiled ahead, the ranks compile them: {error}")
        waiting.start()
        yield [part.process.pid for part in running]
    finally:
        # poll() says None of one that has ended while the other thread waits for it
        if any(_is_running(part.process.pid) for part in running):
            cut.set()
        for part in running:
            part.kill()
        if waiting.ident:  # else Ctrl-C came before it was started
            waiting.join()
        for part in running:
            part.log.close()


def wait_for(processes: Sequence[int]) -> None:
    """Wait until these processes of the launcher have ended; it kills one that takes too long."""
    while any(map(_is_running, processes)):
        time.sleep(0.05)


def _is_running(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _collect(
    running: list["_Part"], count: int, began: float, marks: list[Path], cut: threading.Event
) -> None:
    """Wait for the parts, kill those that take too long, and say what came of `count` parts, unless
    the end of the block that they ran beside has `cut` them short."""
    whys = _wait(running, began + LIMIT_S)
    if cut.is_set():
        return
    for why in whys:
        _say(why)
    if not whys and len(running) == count:
        _leave(marks)
    took = ", ".join(found for part in running if (found := part.took()))
    _say(f"compiled them in {time.monotonic() - began:.1f} s: {took or 'none'}")


def _say(text: str) -> None:
    print(f"megacpp: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Part:
    """A process that compiles, the leader of a session. log: what it has printed."""

    name: str
    process: subprocess.Popen
    log: IO[bytes]

    def kill(self) -> None:
        """With all of its group, if it is there."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def why_it_failed(self) -> str | None:
        """None for one that did not, or that is still there."""
        status = self.process.poll()
        if not status:
            return None
        if status < 0:
            return f"it was killed by {signal.Signals(-status).name}"
        said = [line.strip() for line in self._said().split("\n") if line.strip()]
        return (said or [f"status {status}"])[-1].removeprefix("megacpp: ")[:500]

    def took(self) -> str | None:
        """Its name and its seconds, which one that ended well has printed; others None."""
        found = re.findall(TOOK.format(r"([\d.]+)"), self._said())
        return f"{self.name} {float(found[-1]):.0f} s" if found else None

    def _said(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")


def _start(name: str, recipe: Recipe, out: Path, device: str) -> _Part:
    words = [*_command(), name, *recipe_argv(recipe), OUT, str(out)]
    environment = {**os.environ, **_ALONE, "CUDA_VISIBLE_DEVICES": device}
    environment.setdefault("OMP_NUM_THREADS", "1")  # they share the machine's cores
    log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `beside`)
    process = subprocess.Popen(
        words, env=environment, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=log, stderr=log,
    )  # fmt: skip
    return _Part(name, process, log)


def _command() -> list[str]:
    return [sys.executable, "-m", _PROCESS, str(os.getpid()), _PART]


def _wait(running: list[_Part], deadline: float) -> list[str]:
    """Wait for all of them until the deadline, then kill them. Returns what failed, and why."""
    found = []
    for part in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            part.process.wait(max(0.0, deadline - time.monotonic()))
        in_time = part.process.poll() is not None
        why = part.why_it_failed() if in_time else f"it took more than {LIMIT_S:g} s"
        part.kill()
        if why is not None:
            of = "the model's ends" if part.name == ENDS else part.name
            found.append(f"no kernels of {of} are compiled ahead, the ranks compile them: {why}")
    return found


def _device(number: int, gpus: int) -> str:
    """CUDA_VISIBLE_DEVICES of the part of this number."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    seen = [device for device in seen if device] or [str(device) for device in range(gpus)]
    seen = seen[:gpus]
    return seen[number % len(seen)]


def _splits_layers(recipe: Recipe) -> bool:
    p = recipe.parallel
    sizes = p.tensor_model_parallel_size, p.context_parallel_size, p.expert_tensor_parallel_size
    return any((size or 1) > 1 for size in sizes)


def _marks(recipe: Recipe, out: Path, gpu: Gpu) -> list[Path]:
    """A file in each cache, with which goes that all of a launch's kernels are there."""
    wanted = {**environment_of(recipe, out, say=False), **os.environ}
    name = f"megacpp-precompiled-{_digest(recipe, gpu)[:16]}"
    return [Path(wanted[cache], name) for cache in _CACHES]


def _digest(recipe: Recipe, gpu: Gpu) -> str:
    """Of everything that kernels depend on."""
    content = recipe.to_dict()
    sections = {name: keys for name, keys in content.items() if name not in _SECTIONS_APART}
    return content_sha256({
        "code": lane.code_sha256(), "packages": lane.packages(), "gpu": asdict(gpu),
        "recipe": sections, "keys": {key: recipe.get(key) for key in _KEYS_OF_THEM},
        "backends": dispatch.forced_backends(),
    })  # fmt: skip


def _leave(marks: list[Path]) -> None:
    with contextlib.suppress(OSError):  # then they are compiled, or found, once more
        for mark in marks:
            mark.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(mark, "")
