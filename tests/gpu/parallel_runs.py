"""Training runs of one small NAM56R at many layouts, packed onto the GPUs of one machine.

    python tests/gpu/parallel_runs.py OUT [NAME ...]

Every run is a launch of torchrun with the words of `megacpp recipe args`. All begin at one
checkpoint that a one-GPU run wrote, with the same batches in the same order, so that losses are
the same sums in another order; `parallel_verdicts` holds them against the one-GPU run's.

Two GPUs serve runs of four ranks, too: as two hosts with a torchrun each, every host with both
GPUs. NCCL refuses two ranks on one GPU of one host, and tells hosts apart by NCCL_HOSTID; their
ranks talk through sockets. It shows that the sums are right, and nothing of speed.
"""

import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import parallel_launches
from parallel_layouts import ONE, RECIPE, RUNS, SAVED, SEED, STOCK, Run
from parallel_verdicts import Outcome, differences, line, table

RUN_S = 180  # the time limit of one run; the first also compiles the kernels
_RUNS_ON_A_GPU = 12  # at once: a run is small, and half of its time is Python starting


class Packed:
    """Runs side by side on the GPUs of this machine, each with its log, OUT/NAME.log.

    A run waits until the one that it starts from has ended, and until enough GPUs are free.
    """

    def __init__(self, out: Path, gpus: Iterable[str], limit_s: float = RUN_S) -> None:
        self.out, self.limit_s = out.resolve(), limit_s
        visible = list(gpus)
        self.size, self.gpus = len(visible), visible * _RUNS_ON_A_GPU
        self.outcomes: dict[str, Outcome] = {}
        self._unjudged: list[Run] = []
        self._ended, self._stopped = threading.Condition(), threading.Event()
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "recipe.toml").write_text(RECIPE)
        self.corpus = _corpus(self.out / "corpus")

    def run(self, runs: Iterable[Run]) -> dict[str, Outcome]:
        """Launch them all, the first that can start before the others. Returns by name."""
        waiting, threads = list(runs), []
        with self._ended:
            while waiting and not self._stopped.is_set():
                chosen = next((run for run in waiting if self._can_start(run)), None)
                if chosen is None:
                    self._ended.wait()
                    continue
                waiting.remove(chosen)
                held = self._free(self._hosts(chosen))[: self._held(chosen)]
                for gpu in held * self._hosts(chosen):
                    self.gpus.remove(gpu)
                threads.append(threading.Thread(target=self._launch, args=(chosen, held)))
                threads[-1].start()
        for thread in threads:
            thread.join()
        return self.outcomes

    def begin(self, runs: Iterable[Run]) -> "Outcomes":
        """The same beside the caller, who waits for an outcome when asking for it."""
        planned = tuple(runs)
        self._thread = threading.Thread(target=self.run, args=(planned,), daemon=True)
        self._thread.start()
        return Outcomes(planned, self.outcomes, self._ended, self._thread)

    def stop(self) -> None:
        """Launch no more, and end what is under way."""
        self._stopped.set()
        with self._ended:
            self._ended.notify_all()
        self._thread.join()

    def _can_start(self, run: Run) -> bool:
        ready = run.start is None or run.start[0] in self.outcomes
        return ready and self._held(run) <= len(self._free(self._hosts(run)))

    def _hosts(self, run: Run) -> int:
        """As how many hosts the run is launched: one, or what gives it a rank a GPU."""
        return math.ceil(run.gpus / self.size)

    def _held(self, run: Run) -> int:
        return run.gpus // self._hosts(run)

    def _free(self, places: int = 1) -> list[str]:
        """GPUs with so many places left, the emptiest first."""
        left = {gpu for gpu in self.gpus if self.gpus.count(gpu) >= places}
        return sorted(left, key=self.gpus.count, reverse=True)

    def _launch(self, run: Run, gpus: list[str]) -> None:
        began, reason = time.monotonic(), "the launch itself failed"
        try:
            reason = self._reason_not_to(run) or self._end_of(run, gpus)
        finally:
            found = _read(self.out / run.name / "receipt.json", self.out / f"{run.name}.log")
            outcome = Outcome(*found, time.monotonic() - began, reason)
            with self._ended:
                self.outcomes[run.name] = outcome
                self.gpus += gpus * self._hosts(run)
                self._tell(run)
                self._ended.notify_all()

    def _tell(self, run: Run) -> None:
        """What came of a run and, as soon as the one-GPU run has ended, the verdicts: they are
        said at once, for whoever stops this process later."""
        print(line(run, self.outcomes[run.name]), flush=True)
        if run not in (SEED, ONE):
            self._unjudged.append(run)
        if ONE.name in self.outcomes:
            while self._unjudged:
                print(table([self._unjudged.pop()], self.outcomes), flush=True)

    def _reason_not_to(self, run: Run) -> str | None:
        parent = None if run.start is None else self.outcomes[run.start[0]]
        return None if parent is None or parent.reason is None else f"{run.start[0]} failed"

    def _end_of(self, run: Run, gpus: list[str]) -> str | None:
        """Wait for the launch. Returns None, or why it failed, with the end of its log."""
        logs = [
            self.out / f"{run.name}{f'.host{n}' * (n > 0)}.log" for n in range(self._hosts(run))
        ]
        processes, port = [], parallel_launches.free_port()
        for host, log in enumerate(logs):
            command, environment = self._command(run, host, port)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            with log.open("w") as stream:
                processes.append(subprocess.Popen(
                    command, env=environment, stdout=stream, stderr=stream, start_new_session=True
                ))  # fmt: skip
        status = parallel_launches.status(processes, self.limit_s, self._stopped)
        if status == 0:
            return None
        telling = re.compile(r"\[rank|megacpp: [^b]|ERROR\b|[\w.]*Error\b")
        lines = [line for log in logs for line in log.read_text().splitlines()]
        said = [line for line in lines if telling.match(line.lstrip())]
        what = f"exit status {status}" if isinstance(status, int) else status
        return f"{what}:\n" + "\n".join(said[-25:])

    def _command(self, run: Run, host: int = 0, port: int = 0) -> tuple[list[str], dict[str, str]]:
        """The words and the environment of one host's torchrun. port: where hosts meet."""
        from megacpp_mcore.recipe import load_recipe
        from megacpp_mcore.recipe.lowering import lower
        from megacpp_mcore.training.gpu.rank_setup import OUT, recipe_argv

        recipe = load_recipe(str(self.out / "recipe.toml"), self._overrides(run))
        lowered = lower(recipe)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MEGACPP_RECIPE")}
        torchrun = [sys.executable, "-m", "torch.distributed.run",
                    "--nproc-per-node", str(recipe.launch.nproc_per_node)]  # fmt: skip
        if recipe.launch.nnodes > 1:
            torchrun += ["--nnodes", str(recipe.launch.nnodes), "--node-rank", str(host),
                         "--master-addr", "localhost", "--master-port", str(port)]  # fmt: skip
            environment |= {"NCCL_HOSTID": str(host), "NCCL_SOCKET_IFNAME": "lo",
                            "NCCL_IB_DISABLE": "1"}  # fmt: skip
        else:
            torchrun += ["--standalone"]
        if run.script:
            script = Path(os.environ["MEGACPP_MEGATRON_LM"]).resolve() / run.script
            return [*torchrun, str(script), *lowered.argv], environment | lowered.environment
        words = [*recipe_argv(recipe), OUT, str(self.out / run.name), *lowered.argv]
        return [*torchrun, "-m", "megacpp_mcore.pretrain", *words], environment

    def _overrides(self, run: Run) -> list[str]:
        folder = self.out / run.name
        words = [
            *run.overrides, f"launch.nnodes={self._hosts(run)}",
            f"launch.nproc_per_node={self._held(run)}",
            f'data.data_path=["{self.corpus}"]', f"data.data_cache_path={folder}/cache",
        ]  # fmt: skip
        if run.saves or run.start is None:
            every = SAVED if run.saves else 1
            words += [f"checkpoint.save={folder}/saved", f"checkpoint.save_interval={every}"]
        if run.start is not None:
            words += [f"checkpoint.load={self._checkpoint(*run.start)}",
                      "checkpoint.exit_on_missing_checkpoint=true"]  # fmt: skip
            words += [] if run.resumes else ["checkpoint.finetune=true"]  # weights alone
        return words

    def _checkpoint(self, name: str, step: int) -> Path:
        """A folder that has the checkpoint of `step` alone, whatever was saved after it."""
        folder = self.out / name / f"at-{step}"
        with self._ended:  # one thread at a time
            folder.mkdir(exist_ok=True)
            link = folder / f"iter_{step:07d}"
            if not link.is_symlink():
                link.symlink_to(self.out / name / "saved" / link.name)
            (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
        return folder


class Outcomes(Mapping[str, Outcome]):
    """Of runs that are under way, by name: each is waited for when it is asked for."""

    def __init__(
        self, runs: Iterable[Run], found: Mapping[str, Outcome], ended: threading.Condition,
        thread: threading.Thread,
    ) -> None:  # fmt: skip
        self._names = [run.name for run in runs]
        self._found, self._ended, self._thread = found, ended, thread

    def __getitem__(self, name: str) -> Outcome:
        if name not in self._names:
            raise KeyError(name)
        with self._ended:
            while name not in self._found:
                if not self._thread.is_alive():
                    raise RuntimeError(f"the runs have ended without {name}")
                self._ended.wait(1)
            return self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names  # without waiting for it

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _corpus(prefix: Path) -> Path:
    """The bytes of this package's own source as a dataset."""
    if not prefix.with_suffix(".idx").exists():
        from megacpp_mcore.training.data.build import build
        from megacpp_mcore.training.data.text import TextFiles

        package = Path(__file__).parents[2] / "megacpp_mcore"
        build(TextFiles([package], ["*.py"]), prefix, quiet=True)
    return prefix


def _read(receipt: Path, log: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Losses and gradient norms by step: of the receipt, or of Megatron's lines in the log."""
    if receipt.exists():
        series = json.loads(receipt.read_text())["series"]
        return tuple(
            dict(zip(series["step"], series[key], strict=True)) for key in ("loss", "grad_norm")
        )
    text = log.read_text() if log.exists() else ""
    number = r"([-+.\dE]+)"
    found = re.findall(rf"iteration +(\d+)/.*lm loss: {number}.*grad norm: {number}", text)
    losses = {int(step): float(loss) for step, loss, _ in found}
    first = min(losses, default=0)
    if first + 1 in losses:  # Megatron does not reset its sum of losses after the first step
        losses[first + 1] = 2 * losses[first + 1] - losses[first]
    return losses, {int(step): float(norm) for step, _, norm in found}


def runs_for(ranks: int) -> tuple[Run, ...]:
    """What so many ranks can compare with the one-GPU run."""
    stock = STOCK if "MEGACPP_MEGATRON_LM" in os.environ else ()
    return tuple(run for run in (*stock, *RUNS) if run.gpus <= ranks)


def ranks_of(gpus: Sequence[str]) -> int:
    """How many ranks a run may have on them: two GPUs are two hosts of two."""
    return 4 if len(gpus) == 2 else len(gpus)


def visible_gpus() -> list[str]:
    """The devices that a run may be given, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def main(out: str, *names: str) -> int:
    """Make the runs (or those that are named) and print their verdicts. Returns the exit status."""
    gpus = visible_gpus()
    runs = [run for run in runs_for(ranks_of(gpus)) if not names or run.name in names]
    outcomes = Packed(Path(out), gpus).run((SEED, ONE, *runs))
    print(table(runs, outcomes), flush=True)
    return int(any(differences(run, outcomes) for run in runs))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
