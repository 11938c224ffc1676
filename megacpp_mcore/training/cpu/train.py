"""`megacpp train` on a machine with no GPU: Megatron's HybridModel with our spec, in one process.

What a run does at step n depends only on the recipe and n, so a run that is killed at any moment
and resumed ends with the same losses.
"""

import contextlib
import resource
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from megacpp_mcore import dispatch, receipts
from megacpp_mcore.hybrid import flops
from megacpp_mcore.receipts.goodput import Goodput
from megacpp_mcore.receipts.lane import lane
from megacpp_mcore.receipts.run import RunReceipt, Work
from megacpp_mcore.recipe import Recipe, patch_needs
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.training.cpu import checkpoint, memory, support
from megacpp_mcore.training.cpu.megatron_setup import build_model, megatron_args, single_process
from megacpp_mcore.training.cpu.optimizer import build_optimizer, build_scheduler
from megacpp_mcore.training.cpu.progress import ProgressLog, TimeLeft, held_out_line
from megacpp_mcore.training.cpu.step import Batch, Trainer, TrainingError
from megacpp_mcore.training.cpu.stop import StopSignals
from megacpp_mcore.training.data.blend import check_data
from megacpp_mcore.training.data.datasets import TokenDataset, batches, build_datasets, order_digest
from megacpp_mcore.training.data.entropy import corpus_entropy
from megacpp_mcore.training.environment import apply_environment
from megacpp_mcore.training.heartbeat import Heartbeat
from megacpp_mcore.training.packages import check_packages
from megacpp_mcore.training.run_folder import RunFolder


@dataclass(frozen=True)
class Outcome:
    """How a run ended. exit_status: 0, or 128 + the signal that stopped it."""

    receipt: dict[str, Any]
    exit_status: int


def train(
    recipe: Recipe, out: Path, *, steps: int | None = None, resume: bool = False,
    resume_from: int | None = None, overwrite: bool = False,
) -> Outcome:  # fmt: skip
    """Train `recipe` on the CPU into the folder `out`.

    steps: stop after this many steps in all (the schedule stays the recipe's); None: train_iters.
    resume: resume from the newest complete checkpoint in `out`, or start if there is none.
    resume_from: resume from that of this iteration. On SIGINT and SIGTERM the current step is
    finished and saved before the function returns.

    Raises CpuLaneError for a recipe that the lane cannot run as written, MissingPackageError and
    MissingPatchError for one that needs a package or a patch that is not there, OutOfMemoryError
    for one that this machine's memory does not hold, RunFolderError,
    DataError, CheckpointError, and TrainingError when the loss or a gradient is not finite; the
    receipt then says so, and the last good checkpoint is kept.
    """
    support.check(recipe, steps)
    with _started(recipe, out, resume=resume, overwrite=overwrite, resume_from=resume_from) as run:
        return run.until(steps or run.args.train_iters)


def begin_with(recipe: Recipe, out: Path, fill: Callable[[MegatronModule], None]) -> Path:
    """Begin a run with other weights than drawn ones: `train` with `resume` goes on from there.

    fill: replaces the parameters of the recipe's model. Returns the checkpoint, of iteration 0 and
    with a fresh optimizer. Raises as `train`.
    """
    support.check(recipe)
    with _started(recipe, out) as run:
        with torch.no_grad():
            fill(run.trainer.model.module)
        saved = run.save()
        run.receipt.write("interrupted", "its weights were imported; go on with --resume")
        return saved


@contextlib.contextmanager
def _started(
    recipe: Recipe, out: Path, *, overwrite: bool = False, resume_from: int | None = None,
    **claim: Any,
) -> Iterator["_Run"]:  # fmt: skip
    """A run in the folder `out`, from its checkpoint or from the beginning."""
    check_packages(recipe)
    patch_needs.check(recipe)
    memory.check(recipe)
    check_data(recipe)
    goodput = Goodput()
    folder = RunFolder(out)
    latest = folder.claim(overwrite=overwrite, resume_from=resume_from, **claim)
    environment = apply_environment(recipe.launch.environment)
    try:
        args = megatron_args(lower(recipe).argv)
        with single_process(recipe.schedule.seed), StopSignals() as stop:
            timeout = recipe.launch.heartbeat_timeout_s
            with Heartbeat(folder.path / "heartbeat", 0, timeout) as heartbeat:
                run = _Run(recipe, args, folder, goodput, environment, heartbeat, stop)
                if overwrite:
                    folder.clear()  # now that the new run can start
                if latest:
                    run.resume(latest)
                if resume_from is not None:
                    folder.go_back(resume_from)
                yield run
    finally:
        folder.release()


class _Run:
    """The part of a run that one process does: it ends, or is resumed by another."""

    def __init__(
        self, recipe: Recipe, args: Namespace, folder: RunFolder, goodput: Goodput,
        environment: dict[str, dict[str, str]], heartbeat: Heartbeat, stop: StopSignals,
    ) -> None:  # fmt: skip
        self.heartbeat, self.stop = heartbeat, stop
        self.recipe, self.args, self.folder, self.goodput = recipe, args, folder, goodput
        with goodput.span("data"):
            self.train_data, self.valid_data = _datasets(recipe, folder.cache)
            self.data_digest = order_digest(self.train_data)
        dispatch.begin(say_each=False)
        dispatch.strict(recipe.launch.strict)
        model = build_model(args, recipe)
        print(dispatch.summary(), file=sys.stderr, flush=True)
        optimizer = build_optimizer(model, args)
        self.trainer = Trainer(model, optimizer, build_scheduler(optimizer, args), args)
        self.iteration = 0
        evaluates = self.valid_data is not None
        self.left = TimeLeft(recipe.schedule, recipe.checkpoint.save_interval, evaluates)
        self.receipt = RunReceipt(
            folder.receipt,
            recipe=receipts.recipe_entry(recipe.name, recipe.to_dict()),
            topology={"world_size": 1, "tp": 1, "pp": 1, "ep": 1, "cp": 1, "dp": 1},
            plan=receipts.plan_entry(recipe.plan),
            backends=[asdict(decision) for decision in dispatch.decisions()],
            environment=environment,
            lane=lane("cpu"),
            goodput=goodput,
            work=Work(flops.training_flops(recipe), formula=flops.FORMULA),
        )

    def resume(self, latest: Path) -> None:
        """Load a checkpoint, which must be of this recipe and this data."""
        with self.goodput.span("checkpoint"):
            verify = self.recipe.checkpoint.verify_checksums
            progress = checkpoint.load(
                latest, self.trainer, self._progress(), self._digest_of, verify=verify
            )
        self.iteration = progress.iteration
        if self.folder.receipt.exists():
            tokens = self.iteration * self.tokens_per_step
            self.receipt.resume(receipts.read(self.folder.receipt), self.iteration, tokens)

    def _digest_of(self, saved: Mapping[str, Any]) -> str:
        """The order of samples that a recipe of `saved`'s length has with the data of now: beyond
        one epoch it depends on the length."""
        length = saved["schedule"]["train_iters"]
        if length == self.recipe.schedule.train_iters:
            return self.data_digest
        schedule = replace(self.recipe.schedule, train_iters=length)
        was = replace(self.recipe, schedule=schedule)
        memory.check(was)
        train_data, _ = _datasets(was, self.folder.cache)
        return order_digest(train_data)

    @property
    def tokens_per_step(self) -> int:
        return self.args.global_batch_size * self.args.seq_length

    def until(self, last: int) -> Outcome:
        """Train up to iteration `last`, then evaluate, save and write the result."""
        stop = self.stop
        log = ProgressLog(
            self.iteration, last, self.recipe.schedule.log_interval,
            lambda step_s: self.left.seconds(self.iteration, last, step_s),
        )  # fmt: skip
        log.say(self._headline(last))
        try:
            for micro_batches in self._global_batches(last):
                self._step(micro_batches, log)
                if stop.signal or self._due(self.recipe.checkpoint.save_interval, last):
                    self.save()
                if stop.signal:
                    return self._interrupted(stop.signal, log)
                if self._due(self.recipe.schedule.eval_interval, last):
                    self._evaluate(log)
            return self._finish(log)
        except TrainingError as error:
            reason = f"step {self.iteration + 1}: {error}"
            self.receipt.write("failed", reason)
            raise TrainingError(
                f"training stopped at {reason}; the last good checkpoint is "
                f"{checkpoint.latest(self.folder.checkpoints) or 'none'}"
            ) from error
        except checkpoint.CheckpointWriteError as error:
            with contextlib.suppress(receipts.ReceiptError):  # the disk may be full
                self.receipt.write("failed", f"after step {self.iteration}: {error}")
            raise
        finally:
            log.close()

    def _due(self, interval: int | None, last: int) -> bool:
        """True at the interval, except at the end, which always saves and evaluates."""
        return bool(interval) and self.iteration % interval == 0 and self.iteration != last

    def _global_batches(self, last: int) -> Iterator[list[Batch]]:
        """The global batches of iterations iteration + 1 .. last, each as its micro batches."""
        size = self.args.micro_batch_size
        per_step = self.args.global_batch_size // size
        start = self.iteration * self.args.global_batch_size
        micro_batches = batches(self.train_data, size, start)
        for _ in range(self.iteration, last):
            self.heartbeat.beat(f"in step {self.iteration + 1}")
            with self.goodput.span("data"):
                batch = list(islice(micro_batches, per_step))
            yield batch

    def _step(self, micro_batches: list[Batch], log: ProgressLog) -> None:
        lr = self.trainer.optimizer.param_groups[0]["lr"]
        started = time.perf_counter()
        with self.goodput.span("step"):
            loss, norm = self.trainer.step(micro_batches)
        seconds = time.perf_counter() - started
        self.iteration += 1
        self.receipt.step(
            self.iteration, tokens=self.tokens_per_step, ms=seconds * 1000, loss=loss,
            peak_memory_bytes=peak_memory_bytes(), grad_norm=norm, lr=lr,
        )  # fmt: skip
        log.step(self.iteration, loss, self.tokens_per_step, lr, norm, seconds)

    def _evaluate(self, log: ProgressLog) -> None:
        if self.valid_data is None:
            return
        self.heartbeat.beat(f"evaluating after step {self.iteration}")
        schedule, size = self.recipe.schedule, self.args.micro_batch_size
        # always the first ones: the dataset is a whole epoch of the held-out documents
        count = schedule.eval_iters * schedule.global_batch_size // size
        started = time.perf_counter()
        with self.goodput.span("evaluation"):
            loss = self.trainer.evaluate(list(islice(batches(self.valid_data, size), count)))
        self.left.evaluation_s = time.perf_counter() - started
        self.receipt.evaluation(self.iteration, loss)
        log.say(held_out_line(self.iteration, loss))

    def save(self) -> Path:
        """Save a checkpoint, and the receipt so far. Returns the checkpoint's folder."""
        # The receipt first: a resumed run can drop steps after the checkpoint from it, but cannot
        # restore missing steps before the checkpoint.
        self.heartbeat.beat(f"saving after step {self.iteration}")
        started = time.perf_counter()
        self.receipt.write("running")
        with self.goodput.span("checkpoint"):
            keep = self.recipe.checkpoint.keep_latest
            saved = checkpoint.save(self.folder.checkpoints, self.trainer, self._progress(), keep)
        self.left.save_s = time.perf_counter() - started
        return saved

    def _progress(self) -> checkpoint.Progress:
        return checkpoint.Progress(
            self.iteration,
            self.iteration * self.args.global_batch_size,
            self.data_digest,
            self.recipe.to_dict(),
        )

    def _interrupted(self, number: int, log: ProgressLog) -> Outcome:
        name = signal.Signals(number).name
        log.say(f"{name}: stopped after step {self.iteration}, which is saved; use --resume")
        written = self.receipt.write("interrupted", f"{name} after step {self.iteration}")
        return Outcome(written, 128 + number)

    def _finish(self, log: ProgressLog) -> Outcome:
        self._evaluate(log)
        self.save()
        result: dict[str, Any] = {}
        if len(self.recipe.data.data_path) == 1:  # a blend of corpora has another entropy
            with self.goodput.span("data"):
                unigram, bigram = corpus_entropy(self.recipe.data.data_path[0])
            result = {"unigram_entropy": unigram, "bigram_entropy": bigram}
        return Outcome(self.receipt.write("complete", **result), 0)

    def _headline(self, last: int) -> str:
        parameters = sum(p.numel() for p in self.trainer.parameters)
        steps = f"steps {self.iteration + 1} to {last} of {self.tokens_per_step:,} tokens"
        if self.iteration >= last:
            steps = f"step {self.iteration} of {last} is done: evaluating and saving"
        return (
            f"{self.recipe.name}: {self.recipe.plan.megatron_pattern}, {parameters:,} parameters, "
            f"{steps}"
        )


def _datasets(recipe: Recipe, cache: Path) -> tuple[TokenDataset, TokenDataset | None]:
    """Training samples for the whole schedule, and held-out ones for at least one evaluation."""
    schedule, data = recipe.schedule, recipe.data
    held_out = schedule.eval_iters * schedule.global_batch_size if schedule.eval_interval else 0
    train_data, valid_data, _ = build_datasets(
        data.data_path,
        seq_length=recipe.model.seq_length,
        num_samples=(schedule.train_iters * schedule.global_batch_size, held_out, 0),
        split=data.split or "100,0,0",
        seed=schedule.seed,
        vocab_size=recipe.model.vocab_size,
        # as Megatron's NullTokenizer
        eod_id=recipe.model.vocab_size - 1
        if data.null_tokenizer_eod_id is None
        else data.null_tokenizer_eod_id,
        eod_mask_loss=data.eod_mask_loss,
        reset_position_ids=data.reset_position_ids,
        cache_dir=data.data_cache_path or cache,
    )
    return train_data, valid_data


def peak_memory_bytes() -> int:
    """The peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
