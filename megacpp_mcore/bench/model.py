"""A recipe's whole model: forward, forward and backward, and a step with the optimizer.

Of several variants every model has its own weights, gradients and optimizer in memory; what is told
of a model's memory leaves out what the others keep.
"""

import contextlib
import resource
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megacpp_mcore.bench.clock import Clock
from megacpp_mcore.bench.likeness import Likeness
from megacpp_mcore.bench.runner import Contender
from megacpp_mcore.bench.variants import Built, Variant, VariantTarget, build
from megacpp_mcore.hybrid.flops import count
from megacpp_mcore.kernels import regions
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.training import one_process
from megacpp_mcore.training.one_process import in_half_precision, random_batches

_SECONDS_A_PHASE = 15.0  # of each model
_OWN_NAME = "model"
_BATCHES = 4
_LOSS = "the mean loss"
_NOTES = [
    "FLOPs: megacpp_mcore.hybrid.flops, every layer and head and the pairs that the causal "
    "mask leaves; not what is elementwise",
    "the forward pass makes the gradients of the heads too, unless they are Megatron's own "
    "(backend megatron of linear_cross_entropy)",
]


class ModelTarget(VariantTarget):
    """The model of a recipe from `load_for_bench`, on random tokens, one micro batch at a time."""

    def __init__(
        self, recipe: Recipe, against: Sequence[str] = (), *, optimizer: bool = True
    ) -> None:
        """optimizer: also time a step: Megatron's distributed data parallel and optimizer on a GPU,
        the CPU lane's AdamW on a CPU."""
        seconds = _SECONDS_A_PHASE * (1 + len(against))
        super().__init__("model", _OWN_NAME, recipe, against, seconds)
        self.phases = (*self.phases, *(["step"] if optimizer else []))
        self._told: list[str] = []

    def make(self, name: str, variant: Variant) -> "_Model":
        return _Model(name, variant, self.clock)

    def build(self, clock: Clock, say: Callable[[str], None]) -> None:
        super().build(clock, say)
        args = self.first.args
        self.dtype, self.tokens = args.params_dtype, args.micro_batch_size * args.seq_length
        self._told.append(
            "peak memory: of one warm call, with the model's own weights, gradients and optimizer "
            "and without what other models keep"
            if clock.device == "cuda"
            else "peak memory: the process's"
        )
        if len(self.built) > 1:
            self._told.append(
                f"cold: the first call of each, in one process: {', '.join(self.built)}"
            )

    def ready(self, phase: str) -> Sequence[Contender]:
        """Raises torch's OutOfMemoryError where a forward and a backward pass do not fit."""
        models = super().ready(phase)
        if phase == "step":
            for model in models:
                model.add_optimizer()
        for model in models:
            model.cold_ms[phase] = cold = model.keeping(
                lambda call=model.calls[phase]: self.clock.cold(partial(call, 0))
            )
            self.say(f"{phase}, {model.name}: {cold / 1000:.2f} s the first time")
        if self.compared and phase == "forward":
            self._compare()
        return models

    def _compare(self) -> None:
        """How far the mean loss of a batch and every gradient are from the baseline's, with the
        same weights."""
        expected = self.first.values()
        # Every logit and loss is rounded by half an epsilon; the mean of them by less.
        likeness = Likeness(expected, torch.finfo(self.dtype).eps)
        for seed in range(1, regions.DRAWS + 1):
            likeness.draw(self.first.values(seed))
        for model in self.compared:
            self.judge(model, *likeness.worst(model.values()))
        self._told.append(
            f"error: of the mean loss of a batch ({expected[_LOSS].item():.6f} with "
            f"{self.baseline}) and of all gradients, in the region that is the worst for its "
            "tolerance, which follows from the baseline's own roundings there"
        )

    def peak_memory_bytes(self, contender: Contender, phase: str, clock: Clock) -> int | None:
        """Most memory that the model had in a warm call; on a CPU the process's, of all models."""
        if clock.device != "cuda":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        model = self.built[contender.name]
        others = sum(m.kept_bytes for m in self.built.values() if m is not model)

        def most(call: Callable[[], object]) -> int:
            in_use = torch.cuda.memory_allocated()
            return in_use + (clock.peak_memory_bytes(call) or 0) - others

        if phase != "step":
            return most(partial(model.calls[phase], 1))
        parts = most(partial(model.forward_and_gradients, 1)), most(model.update)
        self._told.append(
            f"step, {model.name}: most memory up to the backward pass's end "
            f"{parts[0] / 2**30:.2f} GiB, in the optimizer {parts[1] / 2**30:.2f} GiB, "
            f"kept {model.kept_bytes / 2**30:.2f} GiB"
        )
        return max(parts)

    def failed(self, phase: str, error: Exception) -> None:
        """The first two phases stand without the step."""
        if phase != "step":
            raise error
        if isinstance(error, torch.OutOfMemoryError):
            self.wrong.append(f"no step: out of memory: {str(error).splitlines()[0]}")
            return
        traceback.print_exception(error)
        self.wrong.append(f"no step: {type(error).__name__}: {error}")

    def cost(self, phase: str) -> tuple[int, None]:
        cost = count(self.recipe)
        return int((cost.forward if phase == "forward" else cost.training) * self.tokens), None

    def sizes(self) -> dict[str, Any]:
        recipe = self.recipe
        return {
            "layers": recipe.plan.depth,
            "pattern": recipe.plan.megatron_pattern,
            "hidden_size": recipe.model.hidden_size,
            "parameters": sum(p.numel() for p in self.first.parameters),
            "micro_batch_size": recipe.schedule.micro_batch_size,
            "seq_length": recipe.model.seq_length,
            "tokens": self.tokens,
        }

    def notes(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        rates = [
            f"{row['phase']}, {row['backend']}: {self.tokens / row['median_ms'] * 1000:,.0f} "
            "tokens/s"
            for row in rows
        ]
        return [*rates, *_NOTES, *self._told, *self.wrong]


class _Model(Built):
    """A model with its batches. trained: not wrapped. kept_bytes: on the device between calls."""

    def __init__(self, name: str, variant: Variant, clock: Clock) -> None:
        calls = {"forward": self.forward, "forward_backward": self.forward_backward,
                 "step": self.step}  # fmt: skip
        super().__init__(name, calls)
        self.clock, self.kept_bytes = clock, 0
        self.keeping(partial(self._build, variant))

    def _build(self, variant: Variant) -> None:
        self.trained, self.args = build(variant)
        self.fused_update = variant.recipe.optimizer.fused_update
        self.batches = random_batches(variant.recipe, self.args, self.clock.device, _BATCHES)
        self.parameters = [p for p in self.trained.parameters() if p.requires_grad]
        self.model = in_half_precision(self.trained, self.args)

    def keeping[T](self, work: Callable[[], T]) -> T:
        """Do `work`, and count what it leaves in memory as this model's."""
        before = self.clock.allocated_bytes()
        result = work()
        self.kept_bytes += self.clock.allocated_bytes() - before
        return result

    def forward(self, turn: int) -> Tensor:
        """The mean loss of one micro batch, the first after an update of the weights.

        As Megatron's schedules say so: Transformer Engine keeps the weights it has cast to FP8.
        """
        self.model.set_is_first_microbatch()
        batch = self.batches[turn % _BATCHES]
        return self.model(**batch) / batch["labels"].numel()

    def forward_backward(self, turn: int) -> None:
        self.forward(turn).backward()
        self.forget()

    def forget(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def values(self, seed: int = 0) -> dict[str, Tensor]:
        """The mean loss of a batch and all gradients; with a seed, of a model whose embedding is
        jittered: what follows is rounded anew."""
        with _jittered(self.trained.embedding.word_embeddings.weight, seed):
            loss = self.forward(0)
            loss.backward()
        named = self.trained.named_parameters()
        values = {_LOSS: loss.detach()} | {n: p.grad for n, p in named if p.grad is not None}
        self.forget()
        return values

    def add_optimizer(self) -> None:
        """Add the optimizer: from here on the model is as Megatron trains it."""
        if self.clock.device == "cuda":
            build = partial(one_process.on_gpu, fused=self.fused_update)
        else:
            build = one_process.on_cpu
        self.training = self.keeping(partial(build, self.trained, self.args))
        self.model = self.training.model

    def step(self, turn: int) -> None:
        """One training step on a micro batch: forward, backward, clipping, optimizer."""
        self.forward_and_gradients(turn)
        self.update()

    def forward_and_gradients(self, turn: int) -> None:
        self.training.backward(self.forward(turn))

    def update(self) -> None:
        self.training.update()


@contextlib.contextmanager
def _jittered(weight: Tensor, seed: int) -> Iterator[None]:
    if not seed:
        yield
        return
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(regions.jittered(kept, seed))
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(kept)
