"""Training runs of one small NAM56R at many layouts, packed onto the GPUs of one machine.

    python tests/gpu/parallel_runs.py OUT [NAME ...]

Every run is a launch of torchrun with the words of `megacpp recipe args`. All begin at one
checkpoint that a one-GPU run wrote, with the same batches in the same order, so that losses are
the same sums in another order; `compare` holds them against the one-GPU run's.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

STEPS, SAVED = 20, 10
_BF16_EPS = 2.0**-7
RUN_S = 180  # the time limit of one run; the first also compiles the kernels
_RUNS_ON_A_GPU = 3  # at once: a run is small, and half of its time is Python starting

RECIPE = """
extends = "nam56r"
description = "every letter and an MTP depth, small; one GPU unless overridden"
unset = ["checkpoint.save", "checkpoint.load", "checkpoint.save_interval"]

[model]
pattern = "AEMEARME"
depth = 8
hidden_size = 512
ffn_hidden_size = 1024
num_attention_heads = 8
vocab_size = 257
make_vocab_size_divisible_by = 256  # times TP 2: the padding has a part in every loss
seq_length = 512

[moe]
num_experts = 8
moe_router_topk = 2
moe_ffn_hidden_size = 256
moe_shared_expert_intermediate_size = 256

[mamba3]
mamba_num_heads = 8
mamba_num_groups = 4

[m2rnn]
num_heads = 8

[parallel]
expert_model_parallel_size = 1
ddp_bucket_size = 200_000  # several buckets, or there is nothing to overlap

[optimizer]
lr = 1e-3
min_lr = 1e-4

[schedule]
train_iters = 20
micro_batch_size = 1
global_batch_size = 4
lr_warmup_iters = 2
eval_iters = 0
log_interval = 1
log_throughput = false

[data]
split = "100,0,0"
null_tokenizer_eod_id = 256
num_workers = 1

[checkpoint]
dist_ckpt_optim_fully_reshardable = true

[launch]
nproc_per_node = 1
"""
_TP = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
_PP = ("parallel.pipeline_model_parallel_size=2",)


def _ep(ranks: int) -> tuple[str, ...]:
    return (f"parallel.expert_model_parallel_size={ranks}",)


@dataclass(frozen=True)
class Run:
    """One launch. start: the run whose checkpoint it loads, and the step of it; None trains from
    random weights. saves: it keeps a checkpoint of step SAVED. script: Megatron-LM's instead of
    megacpp_mcore.pretrain, from the checkout that MEGACPP_MEGATRON_LM names."""

    name: str
    gpus: int = 1
    overrides: tuple[str, ...] = ()
    start: tuple[str, int] | None = ("seed", 1)
    saves: bool = False
    script: str | None = None

    @property
    def resumes(self) -> bool:
        return self.start is not None and self.start[0] != "seed"

    @property
    def first_step(self) -> int:
        return SAVED + 1 if self.resumes else 1


SEED = Run("seed", overrides=("schedule.train_iters=1", "schedule.lr_warmup_iters=0"), start=None)
ONE = Run("one", saves=True)
# Half the micro batches, twice as large: how far rounding alone takes the losses apart.
ROUNDING = Run("one-mb2", overrides=("schedule.micro_batch_size=2",))
# What a machine that is lent for minutes must not miss comes first.
RUNS = (
    Run("dp2", 2, saves=True),
    Run("ep2", 2, _ep(2), saves=True),
    Run("tp2", 2, _TP),
    Run("pp2", 2, (*_PP, "model.pattern=AEM|EARME")),
    Run("dp4", 4),
    Run("ep4", 4, _ep(4)),
    Run("tp2-ep2", 4, (*_TP, *_ep(2))),
    Run("pp2-vpp2", 2, (*_PP, "model.pattern=AE|ME|AR|ME")),
    Run("tp2-from-dp2", 2, _TP, start=("dp2", SAVED)),
    Run("ep4-from-ep2", 4, _ep(4), start=("ep2", SAVED)),
    ROUNDING,
    Run("one-resumed", start=("one", SAVED)),
    Run("dp2-grouped-mm", 2, ("backends.moe_experts=grouped_mm",)),
)
STOCK = (
    Run("stock", script="pretrain_hybrid.py"),
    Run("stock-tp2", 2, _TP, script="pretrain_hybrid.py"),
)


@dataclass
class Outcome:
    """What a run left. losses, norms: by step. reason: why there is nothing to compare, or None."""

    losses: dict[int, float]
    norms: dict[int, float]
    seconds: float = 0.0
    reason: str | None = None


class Packed:
    """Runs side by side on the GPUs of this machine, each with its log, OUT/NAME.log.

    A run waits until the one that it starts from has ended, and until enough GPUs are free.
    """

    def __init__(self, out: Path, gpus: Iterable[str], limit_s: float = RUN_S) -> None:
        self.out, self.limit_s = out.resolve(), limit_s
        self.gpus = list(gpus) * _RUNS_ON_A_GPU
        self.outcomes: dict[str, Outcome] = {}
        self._unjudged: list[Run] = []
        self._ended = threading.Condition()
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "recipe.toml").write_text(RECIPE)
        self.corpus = _corpus(self.out / "corpus")

    def run(self, runs: Iterable[Run]) -> dict[str, Outcome]:
        """Launch them all, the first that can start before the others. Returns by name."""
        waiting, threads = list(runs), []
        with self._ended:
            while waiting:
                chosen = next((run for run in waiting if self._can_start(run)), None)
                if chosen is None:
                    self._ended.wait()
                    continue
                waiting.remove(chosen)
                held = self._free()[: chosen.gpus]
                for gpu in held:
                    self.gpus.remove(gpu)
                threads.append(threading.Thread(target=self._launch, args=(chosen, held)))
                threads[-1].start()
        for thread in threads:
            thread.join()
        return self.outcomes

    def _can_start(self, run: Run) -> bool:
        ready = run.start is None or run.start[0] in self.outcomes
        return ready and run.gpus <= len(self._free())

    def _free(self) -> list[str]:
        """GPUs with a place left, the emptiest first."""
        return sorted(set(self.gpus), key=self.gpus.count, reverse=True)

    def _launch(self, run: Run, gpus: list[str]) -> None:
        began, reason = time.monotonic(), "the launch itself failed"
        try:
            reason = self._reason_not_to(run) or self._end_of(run, gpus)
        finally:
            found = _read(self.out / run.name / "receipt.json", self.out / f"{run.name}.log")
            outcome = Outcome(*found, time.monotonic() - began, reason)
            with self._ended:
                self.outcomes[run.name] = outcome
                self.gpus += gpus
                self._tell(run)
                self._ended.notify()

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
        log = self.out / f"{run.name}.log"
        command, environment = self._command(run)
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        with log.open("w") as stream:
            process = subprocess.Popen(
                command, env=environment, stdout=stream, stderr=stream, start_new_session=True
            )
            try:
                status = process.wait(self.limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = f"no end within {self.limit_s:.0f} s"
        if status == 0:
            return None
        telling = re.compile(r"\[rank|megacpp: [^b]|[\w.]*Error\b")
        said = [text for text in log.read_text().splitlines() if telling.match(text.lstrip())]
        return f"exit status {status}:\n" + "\n".join(said[-25:])

    def _command(self, run: Run) -> tuple[list[str], dict[str, str]]:
        from megacpp_mcore.lowering import lower
        from megacpp_mcore.recipe import load_recipe
        from megacpp_mcore.training.gpu_launch import OUT, recipe_words

        recipe = load_recipe(str(self.out / "recipe.toml"), self._overrides(run))
        lowered = lower(recipe)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MEGACPP_RECIPE")}
        for variable, folder in (("TRITON_CACHE_DIR", "triton"),
                                 ("TORCHINDUCTOR_CACHE_DIR", "inductor")):  # fmt: skip
            environment.setdefault(variable, str(self.out / folder))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                    "--nproc-per-node", str(run.gpus)]  # fmt: skip
        if run.script:
            script = Path(os.environ["MEGACPP_MEGATRON_LM"]).resolve() / run.script
            return [*torchrun, str(script), *lowered.argv], environment | lowered.environment
        words = [*recipe_words(recipe), OUT, str(self.out / run.name), *lowered.argv]
        return [*torchrun, "-m", "megacpp_mcore.pretrain", *words], environment

    def _overrides(self, run: Run) -> list[str]:
        folder = self.out / run.name
        words = [
            *run.overrides, f"launch.nproc_per_node={run.gpus}",
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


def _corpus(prefix: Path) -> Path:
    """The bytes of this package's own source as a dataset."""
    if not prefix.with_suffix(".idx").exists():
        from megacpp_mcore.training.data_build import build
        from megacpp_mcore.training.data_text import TextFiles

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


def bound(step: int) -> float:
    """How far a loss may be from the one-GPU run's, as a part of it.

    A rounding to bf16 is wrong by half an epsilon at most. Every step adds to the weights what came
    of its own roundings, independent of the others': after n steps the root of n times as much.
    """
    return _BF16_EPS / 2 * math.sqrt(step)


def differences(run: Run, outcomes: Mapping[str, Outcome]) -> list[str]:
    """What of a run is not as it should be: steps that are missing; losses out of bounds of the
    one-GPU run's; and of the run's whose checkpoint it goes on from, with the gradient norm of the
    first step, since both have the weights of that step. (Another run's norms are far apart after
    ten steps, where losses are not.)"""
    outcome, one = outcomes[run.name], outcomes[ONE.name]
    steps = range(run.first_step, STEPS + 1)
    missing = [step for step in steps if step not in outcome.losses]
    if outcome.reason or missing:
        return [outcome.reason or f"no losses of steps {missing}"]
    origin, first = _origin(run), run.first_step
    found = _apart(outcome.losses, one.losses, "loss", "one GPU", steps, 0)
    if origin != ONE.name:
        found += _apart(outcome.losses, outcomes[origin].losses, "loss", origin, steps, first - 1)
    norms = outcomes[origin].norms
    return found + _apart(outcome.norms, norms, "gradient norm", origin, [first], first - 1)


def _origin(run: Run) -> str:
    """The run that has this one's weights before its first step."""
    return run.start[0] if run.resumes else ONE.name


def _apart(
    found: dict[int, float], expected: dict[int, float], what: str, whose: str,
    steps: Iterable[int], equal_at: int,
) -> list[str]:  # fmt: skip
    """equal_at: the step after which both had the same weights."""
    return [
        f"step {step}: {what} {found[step]:.6f}, {whose} {expected[step]:.6f}"
        for step in steps
        if not abs(found[step] / expected[step] - 1) <= bound(step - equal_at)
    ]


def line(run: Run, outcome: Outcome) -> str:
    """One run for people: first and last losses, time, or why it failed."""
    losses = list(outcome.losses.items())
    shown = ", ".join(f"{step}: {loss:.6f}" for step, loss in [*losses[:2], *losses[-2:]])
    norms = ", ".join(f"{norm:.6f}" for norm in list(outcome.norms.values())[:1])
    return (
        f"{run.name:16} {run.gpus} GPU {outcome.seconds:6.1f} s  losses {shown}; first gradient "
        f"norm {norms or 'none'}" + (f"  FAILED: {outcome.reason}" if outcome.reason else "")
    )


def table(runs: Iterable[Run], outcomes: Mapping[str, Outcome]) -> str:
    """A verdict a run, with the largest differences of losses and of the first gradient norm."""
    one, lines = outcomes[ONE.name], []
    for run in runs:
        outcome, origin = outcomes[run.name], outcomes[_origin(run)]
        off = [
            abs(outcome.losses[s] / one.losses[s] - 1) for s in outcome.losses if s in one.losses
        ]
        first = run.first_step
        has_norm = first in outcome.norms and first in origin.norms
        norm = abs(outcome.norms[first] / origin.norms[first] - 1) if has_norm else math.nan
        wrong = differences(run, outcomes)
        lines.append(
            f"{run.name:16} loss off by {max(off, default=math.nan):.2e} at most, first gradient "
            f"norm by {norm:.2e}: {'equal' if not wrong else 'DIFFERENT: ' + wrong[0]}"
        )
    return "\n".join(lines)


def runs_for(gpus: int) -> tuple[Run, ...]:
    """What a machine of so many GPUs can compare with the one-GPU run."""
    stock = STOCK if "MEGACPP_MEGATRON_LM" in os.environ else ()
    return tuple(run for run in (*stock, *RUNS) if run.gpus <= gpus)


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
    runs = [run for run in runs_for(len(gpus)) if not names or run.name in names]
    outcomes = Packed(Path(out), gpus).run((SEED, ONE, *runs))
    print(table(runs, outcomes), flush=True)
    return int(any(differences(run, outcomes) for run in runs))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
