"""A recipe's whole model: forward, forward and backward, and a step with the optimizer.

Alone, or beside itself with other backends inside or in another precision: then every model has
its own weights, gradients and optimizer in memory, and what is told of a model's memory leaves out
what the others keep.
"""

import gc
import resource
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from megacpp_mcore import bench, dispatch, receipts
from megacpp_mcore.bench.clock import Clock, clock_for, interleave
from megacpp_mcore.bench.contenders import Contender, build, contenders, take_weights
from megacpp_mcore.bench.subject import Subject, batches
from megacpp_mcore.bench.surface import environment
from megacpp_mcore.hybrid.flops import count
from megacpp_mcore.receipts.lane import lane
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.stack import bridges
from megacpp_mcore.surfaces import problems

_SECONDS_A_PHASE = 15.0
_AS_IT_IS = "model"


def bench_model(
    recipe: Recipe,
    against: Sequence[str] = (),
    *,
    optimizer: bool = True,
    say: Callable[[str], None] = bench.to_stderr,
) -> tuple[dict[str, Any], list[str]]:
    """Time the model of `recipe` on random tokens, one micro batch at a time.

    recipe: from `load_for_bench`. against: what `contenders` takes, to be timed beside the model
    as the recipe has it, in turns; the first is the baseline. optimizer: also time a step;
    Megatron's distributed data parallel and optimizer on a GPU, the CPU lane's AdamW on a CPU.

    Returns the bench receipt, and what went wrong: with the step, which then has no row, or a loss
    further from the baseline's than rounding explains. Raises DispatchError for a backend that is
    unknown or cannot serve, what `contenders` and building the model raise, and torch's
    OutOfMemoryError when not even a forward and a backward pass fit.
    """
    bench.check_receipts()
    asked = contenders(recipe, _AS_IT_IS, against)
    baseline = next(iter(against), _AS_IT_IS)
    bridges.before_megatron()
    from megacpp_mcore.training.cpu import megatron_setup as setup

    device = problems.current_device()
    with setup.single_process(recipe.schedule.seed, device), setup.quiet():
        race, decisions = _Race(baseline, clock_for(device), say), []
        for name, contender in asked.items():
            say(f"{name}: building {recipe.plan.megatron_pattern} on {device}")
            dispatch.forget()
            race.enter(name, contender)
            decisions += [asdict(decision) for decision in dispatch.decisions()]
        args = race.subjects[baseline].args
        cost, tokens = count(recipe), args.micro_batch_size * args.seq_length
        race.share_weights()
        race.run(int(cost.forward * tokens), int(cost.training * tokens), optimizer)
    receipt = receipts.bench_receipt(
        problem={"surface": "model", "dtype": str(args.params_dtype).removeprefix("torch."),
                 "sizes": _sizes(recipe, race.subjects[baseline], tokens)},
        rows=race.rows,
        baseline=baseline,
        backends=[d for i, d in enumerate(decisions) if d not in decisions[:i]],
        lane=lane("cpu" if device == "cpu" else None),
        topology=bench.TOPOLOGY,
        environment=environment(recipe),
        recipe=receipts.recipe_entry(recipe.name, recipe.to_dict()),
        notes=[
            bench.ONE_RANK_NOTE,
            *(f"{row['phase']}, {row['backend']}: {tokens / row['median_ms'] * 1000:,.0f} tokens/s"
              for row in race.rows),
            "FLOPs: megacpp_mcore.hybrid.flops, every layer and head and the pairs that the causal "
            "mask leaves; not what is elementwise",
            "the forward pass makes the gradients of the heads too, unless they are Megatron's own "
            "(backend megatron of linear_cross_entropy)",
            *race.notes,
            *race.wrong,
        ],
    )  # fmt: skip
    return receipt, race.wrong


class _Race:
    """Models by name, their rows, and what is to be told beside these. wrong: with the models."""

    def __init__(self, baseline: str, clock: Clock, say: Callable[[str], None]) -> None:
        self.baseline, self.clock, self.say = baseline, clock, say
        self.subjects: dict[str, Subject] = {}
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.wrong: list[str] = []
        self._kept: dict[str, int] = {}  # bytes that a model keeps between calls
        self._compared: list[str] = []
        self._errors: dict[str, float] = {}
        # Every logit and loss is rounded by half of it at most; the mean of them by less.
        self._tolerance = 0.0

    def enter(self, name: str, contender: Contender) -> None:
        """Build the contender's model."""
        before = self._allocated()
        model, args = build(contender)
        data = batches(contender.recipe, args, self.clock.device)
        self.subjects[name] = Subject(model, args, data, self.clock)
        self._kept[name] = self._allocated() - before

    def share_weights(self) -> None:
        """Give all models the baseline's weights; one that has others is not compared with it."""
        first = self.subjects[self.baseline]
        weights = dict(first.bare.named_parameters())
        self._tolerance = torch.finfo(first.args.params_dtype).eps
        self._compared = [
            name
            for name, subject in self.subjects.items()
            if name != self.baseline and take_weights(subject.bare, weights)
        ]

    def run(self, forward: int, training: int, optimizer: bool) -> None:
        """Every phase. forward, training: FLOPs of a forward pass, and of one with its backward
        pass."""
        self.notes.append(
            "peak memory: of one warm call, with the model's own weights, gradients and optimizer "
            "and without what other models keep"
            if self.clock.device == "cuda"
            else "peak memory: the process's"
        )
        if len(self.subjects) > 1:
            self.notes.append(
                f"cold: the first call of each, in one process: {', '.join(self.subjects)}"
            )
        self._phase("forward", forward)
        self._phase("forward_backward", training)
        if not optimizer:
            return
        try:
            for name, subject in self.subjects.items():
                before = self._allocated()
                subject.with_optimizer()
                self._kept[name] += self._allocated() - before
            self._phase("step", training)
        except torch.OutOfMemoryError as error:
            self.wrong.append(f"no step: out of memory: {str(error).splitlines()[0]}")
        except Exception as error:  # the first two phases stand; the caller ends with status 1
            traceback.print_exc()
            self.wrong.append(f"no step: {type(error).__name__}: {error}")

    def _compare(self) -> None:
        """How far the mean loss of a batch is from the baseline's, with the same weights."""
        expected = self.subjects[self.baseline].forward(0).item()
        for name in self._compared:
            found = self.subjects[name].forward(0).item()
            self._errors[name] = error = abs(found - expected) / abs(expected)
            if not error <= self._tolerance:
                self.wrong.append(
                    f"{name}: a mean loss of {found:.6f}, {expected:.6f} with {self.baseline}"
                )
        self.notes.append(
            f"error: of the mean loss of a batch, {expected:.6f} with {self.baseline}, in units of "
            "it; gradients are not compared"
        )

    def _phase(self, phase: str, flops: int) -> None:
        calls = {name: getattr(subject, phase) for name, subject in self.subjects.items()}
        cold = {}
        for name, call in calls.items():
            before = self._allocated()
            cold[name] = self.clock.cold(lambda call=call: call(0))
            self._kept[name] += self._allocated() - before
            self.say(f"{phase}, {name}: {cold[name] / 1000:.2f} s the first time")
        if self._compared and phase == "forward":
            self._compare()
        peaks = {name: self._peak(name, phase) for name in calls}
        samples = interleave(self.clock, calls, _SECONDS_A_PHASE * len(calls))
        for name, taken in samples.items():
            self.rows.append(
                receipts.bench_row(
                    name, phase, taken.ms, rounds=taken.rounds, cold_ms=cold[name],
                    peak_memory_bytes=peaks[name],
                    error=self._errors.get(name), flops=flops,
                    tolerance=self._tolerance if name in self._errors else None,
                )
            )  # fmt: skip
        self._allocated()

    def _peak(self, name: str, phase: str) -> int | None:
        """Most memory that the model had in a warm call; on a CPU the process's, of all models."""
        if self.clock.device != "cuda":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        subject = self.subjects[name]
        if phase != "step":
            return self._most(name, lambda: getattr(subject, phase)(1))
        parts = (
            self._most(name, lambda: subject.step_up_to_update(1)),
            self._most(name, subject.update),
        )
        self.notes.append(
            f"step, {name}: most memory up to the backward pass's end {parts[0] / 2**30:.2f} GiB, "
            f"in the optimizer {parts[1] / 2**30:.2f} GiB, kept {self._kept[name] / 2**30:.2f} GiB"
        )
        return max(parts)

    def _most(self, name: str, call: Callable[[], object]) -> int:
        self.clock.wait()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.clock.wait()
        others = sum(kept for other, kept in self._kept.items() if other != name)
        return torch.cuda.max_memory_allocated() - others

    def _allocated(self) -> int:
        """Bytes of device memory that are in use when nothing runs; 0 on a CPU."""
        gc.collect()
        if self.clock.device != "cuda":
            return 0
        self.clock.wait()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()


def _sizes(recipe: Recipe, subject: Subject, tokens: int) -> dict[str, Any]:
    return {
        "layers": recipe.plan.depth,
        "pattern": recipe.plan.megatron_pattern,
        "hidden_size": recipe.model.hidden_size,
        "parameters": sum(p.numel() for p in subject.parameters),
        "micro_batch_size": recipe.schedule.micro_batch_size,
        "seq_length": recipe.model.seq_length,
        "tokens": tokens,
    }
