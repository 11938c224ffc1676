"""Observe Megatron's training loop: goodput, and the series of the receipt.

One rank keeps the receipt: the first of those that have the loss, which is rank 0 without pipeline
parallelism.

A step's results are read when the next one has been started (`readback`), so that the GPU never
waits for the host's reading. Nothing is unread when Megatron logs values, when a checkpoint is
saved, when the model is evaluated, and at the end. A step that went wrong ends the run there, on
every rank.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from megatron.training import get_args, training

from megacpp_mcore import dispatch
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.layers.loss import keep_log_group
from megacpp_mcore.receipts.goodput import Goodput, Span
from megacpp_mcore.receipts.power import PowerMeter, Reading
from megacpp_mcore.receipts.run import RunReceipt
from megacpp_mcore.training.gpu import (
    decisions,
    fused_update,
    memory,
    packed,
    step_end,
    zeroing,
)
from megacpp_mcore.training.gpu.compilations import (
    captured_bytes,
    compilations,
    compile_times,
    triton_cache_entries,
)
from megacpp_mcore.training.gpu.gather_check import GatherCheck
from megacpp_mcore.training.gpu.loop import WatchError, wrapped
from megacpp_mcore.training.gpu.process_start import start_times
from megacpp_mcore.training.gpu.rank_setup import Launch, check_profile
from megacpp_mcore.training.gpu.readback import Results, Sent, this_device
from megacpp_mcore.training.gpu.receipt import keeps_the_receipt, new_receipt
from megacpp_mcore.training.gpu.saves import Saves, check_what_was_loaded
from megacpp_mcore.training.gpu.step_profile import StepProfile
from megacpp_mcore.training.heartbeat import Heartbeat

_LOSS = "lm loss"


class NotFiniteError(MegacppError):
    """A step's loss or gradient norm is NaN or infinite."""

    exit_status = 1


@dataclass(frozen=True)
class _Unread:
    """A step whose results are on their way. span: what the host did for it. first: of this
    process. row: what the receipt has of it that the host knows."""

    step: int
    sent: Sent
    span: Span
    first: bool
    row: dict[str, Any]


class Watch:
    """Goodput and the receipt of a run. receipt: None before the model is built, and on every rank
    but the one that keeps it. iteration: the last step whose results have been read."""

    def __init__(self, launch: Launch, goodput: Goodput, heartbeat: Heartbeat) -> None:
        self.launch, self.goodput, self._heartbeat = launch, goodput, heartbeat
        self._doing = "starting"  # what the last beat said
        self.path = launch.out / "receipt.json"
        self.receipt: RunReceipt | None = None
        self.iteration = 0
        self._warm = False
        self._saves = Saves(launch.recipe.checkpoint.keep_latest)
        self._gathers: GatherCheck | None = None
        self._evaluated: dict[str, Any] | None = None
        self._results: dict[str, float | int | str] = {}
        self._memory: memory.MemoryWatch | None = None
        self._power: PowerMeter | None = None
        self._power_from: tuple[Reading, float] | None = None  # and when that was read
        self._device = this_device()
        self._signals = step_end.Signals()
        self._reductions = step_end.Reductions()
        self._unread: deque[_Unread] = deque()
        self._profile = StepProfile(None)

    def installed(self) -> AbstractContextManager[None]:
        """Observe Megatron's functions inside the block. Raises WatchError when one is missing."""
        return wrapped(
            {
                "setup_model_and_optimizer": (self._setup, ()),
                "get_megatron_optimizer": (self._optimizer, ()),
                "build_train_valid_test_data_iterators": (self._data, ()),
                "train_step": (self._step, ("optimizer", "iteration")),
                "save_checkpoint_and_time": (self._save, ("iteration",)),
                "maybe_finalize_async_save": (self._finalize, ("blocking",)),
                "evaluate_and_print_results": (self._evaluation, ("prefix", "iteration")),
                "evaluate": (self._losses, ()),
                "get_signal_handler": (self._signals.handler, ()),
                "logical_and_across_model_parallel_group": (
                    self._reductions.update_was_done,
                    ("input", "group"),
                ),
                "reduce_max_stat_across_model_parallel_group": (
                    self._reductions.largest,
                    ("stat", "group"),
                ),
                "training_log": (self._log, ("iteration",)),
                "consume_seqlen_stats_in_iteration": (packed.WORK.consumed, ()),
                "set_jit_fusion_options": (self._compile_megatrons, ()),
            }
        )

    def _compile_megatrons(self, call: Callable, given: dict[str, Any]) -> None:
        """Before anything is built Megatron compiles its bias_swiglu and bias_dropout_add, which
        takes seconds in every process: left to their first call, which our layers have not."""
        if self.launch.yardstick:
            call()

    def _setup(self, call: Callable, given: dict[str, Any]) -> Any:
        built = call()
        self.iteration = get_args().iteration
        check_profile(self.launch.recipe, self.launch.profile, self.iteration)
        check_what_was_loaded()
        if get_args().overlap_param_gather and not self.launch.yardstick:
            self._gathers = GatherCheck(built[0])
        if not self.launch.yardstick:
            zeroing.install(built[0])
        self._memory = memory.MemoryWatch(built[0], built[1])
        backends = decisions.gather()  # and refuses ranks that differ
        if os.environ.get("RANK", "0") == "0":
            print(dispatch.summary(), file=sys.stderr, flush=True)
        if keeps_the_receipt():
            self.receipt = new_receipt(self.path, self.launch, self.goodput, backends)
            self._power = PowerMeter()
            self._profile = StepProfile(self.launch.profile)
            parameters = sum(p.numel() for chunk in built[0] for p in chunk.parameters())
            self._results["rank_parameters"] = parameters
            self._results["triton_cache_entries_at_start"] = triton_cache_entries()
        return built

    def _optimizer(self, call: Callable, given: dict[str, Any]) -> Any:
        built = call()
        self._reductions.always_updated = step_end.keep_loss_scale_on_the_host(built)
        if not self.launch.yardstick:
            fused_update.install(built, self.launch.recipe.optimizer.fused_update)
        return built

    def _beat(self, doing: str) -> None:
        self._doing = doing
        self._heartbeat.beat(doing)

    def _data(self, call: Callable, given: dict[str, Any]) -> Any:
        with self.goodput.span("data"):
            iterators = call()
        for iterator in filter(None, iterators):
            iterator.iterable = self._read(iterator.iterable)
        return iterators

    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        """A data loader's micro batches; what waits for one is booked and named so. Measured here,
        for a captured step's are read by Megatron, not by our forward step."""
        end = object()
        while True:
            self._heartbeat.note(f"{self._doing}, reading a micro batch", alone=True)
            with self.goodput.span("data"):
                batch = next(batches, end)
            self._heartbeat.note(self._doing)
            if batch is end:
                return
            yield batch

    def _step(self, call: Callable, given: dict[str, Any]) -> Any:
        step, args = given["iteration"] + 1, get_args()
        self._beat(f"in step {step}")
        lr = training.get_canonical_lr_for_logging(given["optimizer"].param_groups)
        first, self._warm = not self._warm, True
        compiled = compilations()
        if not self._unread:
            self._begin_power_window()
        # From the end of the step before: what the GPU waits for between two steps belongs to one.
        started = self._unread[-1].sent.ended if self._unread else self._device.mark()
        with self.goodput.span("step") as span:
            done = self._profile.run(step, call)
        losses, should_exit, norm = done[0], done[3], done[5]
        if should_exit:  # a result was rejected: the step is to be run again, by another process
            self.drain()
            return done
        sent = Sent(
            self._device, started, losses, norm,
            compiled=first or compilations() > compiled, signalled=self._signals.here(),
        )  # fmt: skip
        self._after_the_first_pass(first)
        if self.receipt is not None and _LOSS not in losses:
            raise WatchError(f"train_step reported {sorted(losses)} and no {_LOSS!r}")
        row = {
            "tokens": args.global_batch_size * args.seq_length,
            "peak_memory_bytes": torch.cuda.max_memory_allocated(),
            "lr": lr,
        }
        self._unread.append(_Unread(step, sent, span, first, row))
        self._read_until(1)
        # The same on every rank: a rank that read earlier than others would end earlier.
        if first or step >= args.train_iters:
            self.drain()
        return done

    def _after_the_first_pass(self, first: bool) -> None:
        """What a step changes in Python only, which needs no results."""
        if get_args().cuda_graph_impl == "full_iteration":
            keep_log_group()
        if self._gathers is not None:
            self._gathers.finish()
            self._gathers = None
        if first and self._memory:
            self._memory.stop()

    def drain(self) -> None:
        """Read the results of every step, waiting for those that are not done. Raises
        NotFiniteError for the first step that went wrong."""
        self._read_until(0)

    def _read_until(self, left: int) -> None:
        while len(self._unread) > left:
            self._read_oldest()

    def read_what_is_there(self) -> None:
        """Read what a failed run has left, without waiting for a GPU that may not answer or an
        error."""
        with suppress(MegacppError, RuntimeError):
            while self._unread and self._unread[0].sent.is_there():
                self._read_oldest()

    def _read_oldest(self) -> None:
        unread = self._unread.popleft()
        if waits := not unread.sent.is_there():
            self._heartbeat.note(f"waiting for step {unread.step} on the GPU")
        with self.goodput.span("step") as waited:
            results = unread.sent.read()
        if waits:
            self._heartbeat.note(self._doing)
        if results.compiled:
            for span in (unread.span, waited):
                self.goodput.book_as(span, "compile")
        power = self._end_power_window()
        self.iteration = unread.step
        self._signals.agreed |= results.signalled
        if results.wrong:
            self._unread.clear()  # of steps with weights that this one has spoilt
            raise NotFiniteError(_what_is_wrong(unread.step, results))
        if self.receipt is not None:
            self._write_row(unread, results, power)

    def _write_row(self, unread: _Unread, results: Results, power: dict[str, float | None]) -> None:
        self.receipt.step(
            unread.step,
            ms=results.milliseconds,
            loss=results.losses[_LOSS],
            grad_norm=results.norm,
            cold=results.compiled,
            **unread.row,
            **power,
        )
        if results.compiled and get_args().cuda_graph_impl == "full_iteration":
            self._results["cuda_graph_bytes"] = captured_bytes()
        if unread.first:
            self._results["first_step_ms"] = round(results.milliseconds, 3)
            self._results |= start_times() | compile_times() | self._memory_results()
            if self._power and (limit := self._power.limit_w()) is not None:
                self._results["power_limit_w"] = limit
            self.write("running")

    def _begin_power_window(self) -> None:
        if self._power is not None:
            self._power_from = self._power.read(), time.perf_counter()

    def _end_power_window(self) -> dict[str, float | None]:
        """The power since the step before was read, or since this one was started; the next window
        begins. A step is read when it is done or, where the host is late, when the host is."""
        if self._power_from is None:
            return {}
        before, since = self._power_from
        self._begin_power_window()
        now, at = self._power_from
        return before.until(now, at - since)

    def _save(self, call: Callable, given: dict[str, Any]) -> Any:
        self.drain()  # before anything is saved: the weights may be those of a step gone wrong
        self._beat(f"saving after step {given['iteration']}")
        self.write("running")  # before the checkpoint, so that the receipt has every step up to it
        with self.goodput.span("checkpoint"):
            return self._saves.save(call, given["iteration"])

    def _finalize(self, call: Callable, given: dict[str, Any]) -> Any:
        done = call()
        self._saves.tidy()
        return done

    def _evaluation(self, call: Callable, given: dict[str, Any]) -> Any:
        self._evaluated = None
        self.drain()
        self._beat(f"evaluating after step {given['iteration']}")
        with self.goodput.span("evaluation"):
            done = call()
        loss = (self._evaluated or {}).get(_LOSS)
        if self.receipt is not None and loss is not None:
            if given["prefix"].endswith("on test set"):
                self._results["test_loss"] = float(loss)
            else:
                self.receipt.evaluation(given["iteration"], float(loss))
        return done

    def _log(self, call: Callable, given: dict[str, Any]) -> Any:
        if _reads_values(given["iteration"]):
            self.drain()  # the log would wait for the step, outside of its span
        return step_end.logged(call, given)

    def _losses(self, call: Callable, given: dict[str, Any]) -> Any:
        done = call()
        self._evaluated = done[0]
        return done

    def _memory_results(self) -> dict[str, int]:
        """Memory that stays allocated from step to step, on the rank that keeps the receipt."""
        if self._memory is None:
            return {}
        found = self._memory.measure()
        return {
            "parameter_bytes": found.parameters,
            "gradient_bytes": found.gradients,
            "optimizer_bytes": found.optimizer,
            "kept_by_micro_batch_bytes": sum(found.kept.values()),
        }

    def memory_report(self) -> str:
        """The largest consumers of this rank's GPU memory, for an out-of-memory error."""
        stats, (_, total) = torch.cuda.memory_stats(), torch.cuda.mem_get_info()
        if self._memory is None:
            return memory.unfinished_report(stats, total, get_args().rank)
        captured = None if get_args().cuda_graph_impl == "none" else captured_bytes()
        return memory.report(self._memory.measure(), stats, total, get_args().rank, captured)

    def write(self, status: str, reason: str | None = None) -> dict[str, Any] | None:
        """Write the receipt as it stands, on the rank that keeps it."""
        if self.receipt is None:
            return None
        if self._profile.found is not None:
            self.receipt.profile(self._profile.found)
        return self.receipt.write(status, reason, **self._results)


def _reads_values(step: int) -> bool:
    """Whether Megatron's log of a step waits for the GPU, on any rank."""
    args = get_args()
    by_writer = args.tensorboard_dir and step % args.tensorboard_log_interval == 0
    return step % args.log_interval == 0 or bool(by_writer)


def _what_is_wrong(step: int, results: Results) -> str:
    found = results.not_finite() or ["the loss or the gradient norm of another rank is not finite"]
    return (
        f"step {step}: {', '.join(found)}. The weights already have this step's update: resume "
        "from the last checkpoint, which is of an earlier step"
    )
