"""Observe Megatron's training loop: goodput, and the series of the receipt.

One rank keeps the receipt: the first of those that have the loss, which is rank 0 without pipeline
parallelism.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.training import get_args, training

from megacpp_mcore import dispatch
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.layers.loss import keep_log_group
from megacpp_mcore.receipts.goodput import Goodput
from megacpp_mcore.receipts.power import PowerMeter
from megacpp_mcore.receipts.run import RunReceipt
from megacpp_mcore.training.gpu import decisions, fused_update, memory, zeroing
from megacpp_mcore.training.gpu.compilations import anywhere, captured_bytes, compilations
from megacpp_mcore.training.gpu.gather_check import GatherCheck
from megacpp_mcore.training.gpu.loop import WatchError, wrapped
from megacpp_mcore.training.gpu.process_start import start_times
from megacpp_mcore.training.gpu.rank_setup import Launch
from megacpp_mcore.training.gpu.receipt import keeps_the_receipt, new_receipt
from megacpp_mcore.training.gpu.saves import Saves, check_what_was_loaded
from megacpp_mcore.training.heartbeat import Heartbeat

_LOSS = "lm loss"


class NotFiniteError(MegacppError):
    """A step's loss or gradient norm is NaN or infinite."""

    exit_status = 1


class Watch:
    """Goodput and the receipt of a run. receipt: None before the model is built, and on every rank
    but the one that keeps it."""

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
        self._results: dict[str, float | int] = {}
        self._memory: memory.MemoryWatch | None = None
        self._power: PowerMeter | None = None

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
            }
        )

    def _setup(self, call: Callable, given: dict[str, Any]) -> Any:
        built = call()
        self.iteration = get_args().iteration
        check_what_was_loaded()
        if get_args().overlap_param_gather and not self.launch.yardstick:
            self._gathers = GatherCheck(built[0])
        if not self.launch.yardstick:
            zeroing.install(built[0], training.get_model_config(built[0][0]))
        self._memory = memory.MemoryWatch(built[0], built[1])
        backends = decisions.gather()  # and refuses ranks that differ
        if os.environ.get("RANK", "0") == "0":
            print(dispatch.summary(), file=sys.stderr, flush=True)
        if keeps_the_receipt():
            self.receipt = new_receipt(self.path, self.launch, self.goodput, backends)
            self._power = PowerMeter()
            parameters = sum(p.numel() for chunk in built[0] for p in chunk.parameters())
            self._results["rank_parameters"] = parameters
            self._results["triton_cache_entries_at_start"] = self.launch.triton_cache_entries
        return built

    def _optimizer(self, call: Callable, given: dict[str, Any]) -> Any:
        built = call()
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
        self._beat(f"in step {given['iteration'] + 1}")
        args = get_args()
        lr = training.get_canonical_lr_for_logging(given["optimizer"].param_groups)
        first, self._warm = not self._warm, True
        compiled = compilations()
        before = self._power.read() if self._power else None
        started = time.perf_counter()
        with self.goodput.span("step") as span:
            done = call()
            torch.cuda.synchronize()
            cold = anywhere(first or compilations() > compiled)
            if cold:
                self.goodput.book_as(span, "compile")
        captures = args.cuda_graph_impl == "full_iteration"
        if captures:
            keep_log_group()
        if self._gathers is not None:
            self._gathers.finish()
            self._gathers = None
        milliseconds = (time.perf_counter() - started) * 1000
        power = before.until(self._power.read(), milliseconds / 1000) if before else {}
        if first and self._memory:
            self._memory.stop()
        losses, should_exit, norm = done[0], done[3], done[5]
        if should_exit:  # a result was rejected: the step is to be run again, by another process
            return done
        self.iteration = given["iteration"] + 1
        self._check_finite(losses, norm)
        if self.receipt is None:
            return done
        if _LOSS not in losses:
            raise WatchError(f"train_step reported {sorted(losses)} and no {_LOSS!r}")
        self.receipt.step(
            self.iteration,
            tokens=args.global_batch_size * args.seq_length,
            ms=milliseconds,
            loss=losses[_LOSS].item(),
            peak_memory_bytes=torch.cuda.max_memory_allocated(),
            grad_norm=None if norm is None else float(norm),
            lr=lr,
            cold=cold,
            **power,
        )
        if cold and captures:
            self._results["cuda_graph_bytes"] = captured_bytes()
        if first:
            self._results["first_step_ms"] = round(milliseconds, 3)
            self._results |= start_times() | self._memory_results()
            if self._power and (limit := self._power.limit_w()) is not None:
                self._results["power_limit_w"] = limit
            self.write("running")
        return done

    def _check_finite(self, losses: dict[str, torch.Tensor], norm: float | None) -> None:
        """End the run after a step whose losses or gradients are not finite.

        The GPU is idle at this point, so reading them costs nothing. Every rank reads the same
        values: losses are reduced over the data-parallel ranks, the norm over all ranks.
        """
        found = {name: float(value) for name, value in losses.items()}
        if norm is not None:
            found["gradient norm"] = float(norm)
        wrong = [f"{name} is {value}" for name, value in found.items() if not math.isfinite(value)]
        if wrong:
            raise NotFiniteError(
                f"step {self.iteration}: {', '.join(wrong)}. The weights already have this step's "
                "update: resume from the last checkpoint, which is of an earlier step"
            )

    def _save(self, call: Callable, given: dict[str, Any]) -> Any:
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
        return self.receipt.write(status, reason, **self._results)
