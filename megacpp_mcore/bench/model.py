"""A recipe's whole model: forward, forward and backward, and a step with the optimizer."""

import gc
import os
import re
import resource
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from megacpp_mcore import bench, bridges, dispatch, problems, receipts
from megacpp_mcore.bench.clock import Clock, clock_for, interleave
from megacpp_mcore.bench.surface import environment
from megacpp_mcore.flops import count
from megacpp_mcore.lowering import lower
from megacpp_mcore.receipts.lane import lane
from megacpp_mcore.recipe import ENVIRONMENT_VARIABLE, Recipe

_SECONDS_A_PHASE = 15.0
_BATCHES = 4
_NAME = "model"


def bench_model(
    recipe: Recipe, *, optimizer: bool = True, say: Callable[[str], None] = bench.to_stderr
) -> tuple[dict[str, Any], list[str]]:
    """Time the model of `recipe` on random tokens, one micro batch at a time.

    recipe: from `load_for_bench`. optimizer: also time a step; Megatron's distributed data parallel
    and optimizer on a GPU, the CPU lane's AdamW on a CPU.

    Returns the bench receipt, and what went wrong with the step, which then has no row. Raises what
    building the model raises, and torch's OutOfMemoryError when not even a forward and a backward
    pass fit.
    """
    bench.check_receipts()
    lowered = lower(recipe)
    os.environ[ENVIRONMENT_VARIABLE] = lowered.environment[ENVIRONMENT_VARIABLE]
    # The spec chooses its parts as it is imported, which may have been for another recipe.
    sys.modules.pop("megacpp_mcore.specs.nam56r", None)
    bridges.before_megatron()
    from megacpp_mcore.training import megatron_setup as setup

    device = problems.current_device()
    clock = clock_for(device)
    args = setup.megatron_args(lowered.argv, lowered.environment)
    with setup.single_process(recipe.schedule.seed, device), setup.quiet():
        say(f"building {recipe.plan.megatron_pattern} on {device}")
        subject = _Subject(setup.build_model(args), args, _batches(recipe, args, device), clock)
        cost, tokens = count(recipe), args.micro_batch_size * args.seq_length
        flops = int(cost.forward * tokens), int(cost.training * tokens)
        rows, wrong = _rows(subject, flops, optimizer, say)
        decisions = [asdict(decision) for decision in dispatch.decisions()]
    receipt = receipts.bench_receipt(
        problem={"surface": _NAME, "dtype": str(args.params_dtype).removeprefix("torch."),
                 "sizes": _sizes(recipe, subject, tokens)},
        rows=rows,
        baseline=_NAME,
        backends=decisions,
        lane=lane("cpu" if device == "cpu" else None),
        topology=bench.TOPOLOGY,
        environment=environment(recipe),
        recipe=receipts.recipe_entry(recipe.name, recipe.to_dict()),
        notes=[
            bench.ONE_RANK_NOTE,
            *(f"{row['phase']}: {tokens / row['median_ms'] * 1000:,.0f} tokens/s" for row in rows),
            "FLOPs: megacpp_mcore.flops, every layer and head and the pairs that the causal mask "
            "leaves; not what is elementwise. Peak memory is the process's, weights included",
            "the forward pass makes the gradients of the heads too, unless they are Megatron's own "
            "(backend megatron of linear_cross_entropy)",
            *wrong,
        ],
    )  # fmt: skip
    return receipt, wrong


class _Subject:
    """The model with its batches, and the calls that are timed."""

    def __init__(
        self, model: torch.nn.Module, args: Namespace, batches: list[dict[str, Tensor]],
        clock: Clock,
    ) -> None:  # fmt: skip
        self.bare, self.args, self.batches, self.clock = model, args, batches, clock
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.model = in_half_precision(model, args)
        self._step: Callable[[Tensor], None] | None = None

    def forward(self, turn: int) -> Tensor:
        """The mean loss of one micro batch, the first after an update of the weights.

        As Megatron's schedules say so: Transformer Engine keeps the weights it has cast to FP8.
        """
        self.model.set_is_first_microbatch()
        batch = self.batches[turn % len(self.batches)]
        return self.model(**batch) / batch["labels"].numel()

    def forward_backward(self, turn: int) -> None:
        self.forward(turn).backward()
        for parameter in self.parameters:
            parameter.grad = None

    def step(self, turn: int) -> None:
        """One training step on a micro batch: forward, backward, clipping, optimizer."""
        assert self._step is not None
        self._step(self.forward(turn))

    def with_optimizer(self) -> None:
        """From here on the model is as Megatron trains it."""
        build = _megatron_step if self.clock.device == "cuda" else _cpu_step
        self.model, self._step = build(self.bare, self.args)


def weight_flops(module: torch.nn.Module, recipe: Recipe, tokens: int) -> float:
    """Two a weight and token, an expert's share of them.

    Transformer Engine calls the experts' weights weight0, weight1 and so on.
    """
    share = recipe.moe.moe_router_topk / (recipe.moe.num_experts or 1)
    total = 0.0
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2 or not re.search(r"weight\d*$", name) or "embedding" in name:
            continue
        used = share if ".experts." in name else 1
        total += 2 * parameter.numel() * tokens * used
    return total


def in_half_precision(model: torch.nn.Module, args: Namespace) -> torch.nn.Module:
    """The model as Megatron trains it in bf16: its parameters cast, and wrapped."""
    if not args.bf16:
        return model
    from megatron.core.transformer.module import Float16Module

    return Float16Module(model.config, model)


def _batches(recipe: Recipe, args: Namespace, device: str) -> list[dict[str, Tensor]]:
    """Random tokens, each the label of the one before it."""
    generator = torch.Generator().manual_seed(recipe.schedule.seed)
    shape = (_BATCHES, args.micro_batch_size, args.seq_length + 1)
    tokens = torch.randint(recipe.model.vocab_size, shape, generator=generator).to(device)
    positions = torch.arange(args.seq_length, device=device).expand(args.micro_batch_size, -1)
    every_token = torch.ones_like(positions, dtype=torch.float32)
    return [
        {
            "input_ids": batch[:, :-1],
            "position_ids": positions,
            "attention_mask": None,
            "labels": batch[:, 1:].contiguous(),
            "loss_mask": every_token,
            "loss_weights": every_token,
        }
        for batch in tokens
    ]


Step = tuple[torch.nn.Module, Callable[[Tensor], None]]


def _megatron_step(bare: torch.nn.Module, args: Namespace) -> Step:
    """Megatron's own distributed data parallel and optimizer, in a world of one."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models import dist_utils
    from megatron.training.training import get_megatron_ddp_config, get_megatron_optimizer_config

    groups = ProcessGroupCollection.use_mpu_process_groups()
    [parallel] = dist_utils.prepare_existing_model_chunks_for_distributed_training(
        [bare], bare.config, groups, ddp_config=get_megatron_ddp_config(args)
    )
    config, overrides = get_megatron_optimizer_config(args)
    optimizer = get_megatron_optimizer(config, [parallel], config_overrides=overrides)

    def step(loss: Tensor) -> None:
        optimizer.scale_loss(loss).backward()
        finalize_model_grads([parallel], pg_collection=groups)
        optimizer.step()
        parallel.zero_grad_buffer()
        optimizer.zero_grad()

    return parallel, step


def _cpu_step(bare: torch.nn.Module, args: Namespace) -> Step:
    """The CPU lane's step."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megacpp_mcore.training.optimizer import build_optimizer
    from megacpp_mcore.training.step import NoGradientSync

    groups = ProcessGroupCollection.use_mpu_process_groups()
    wrapped = NoGradientSync(bare)
    optimizer = build_optimizer(bare, args)
    parameters = [p for p in bare.parameters() if p.requires_grad]

    def step(loss: Tensor) -> None:
        loss.backward()
        finalize_model_grads([wrapped], pg_collection=groups)
        torch.nn.utils.clip_grad_norm_(parameters, args.clip_grad or float("inf"))
        optimizer.step()
        optimizer.zero_grad()

    return wrapped, step


def _rows(
    subject: _Subject, flops: tuple[int, int], optimizer: bool, say: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[str]]:
    """flops: of a forward pass, and of one with its backward pass."""
    forward, training = flops
    rows = [_row(subject, "forward", forward, say)]
    rows.append(_row(subject, "forward_backward", training, say))
    if not optimizer:
        return rows, []
    try:
        subject.with_optimizer()
        rows.append(_row(subject, "step", training, say))
    except torch.OutOfMemoryError as error:
        return rows, [f"no step: out of memory: {str(error).splitlines()[0]}"]
    except Exception as error:  # the first two rows stand; the caller ends with status 1
        traceback.print_exc()
        return rows, [f"no step: {type(error).__name__}: {error}"]
    return rows, []


def _row(
    subject: _Subject, phase: str, flops: int, say: Callable[[str], None]
) -> dict[str, Any]:  # fmt: skip
    clock, call = subject.clock, getattr(subject, phase)
    say(f"{phase}: first call")
    if clock.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    cold = clock.cold(lambda: call(0))
    say(f"{phase}: {cold / 1000:.2f} s, then warm")
    samples = interleave(clock, {_NAME: call}, _SECONDS_A_PHASE)[_NAME]
    if clock.device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gc.collect()
    if clock.device == "cuda":
        torch.cuda.empty_cache()
    return receipts.bench_row(
        _NAME, phase, samples, cold_ms=cold, peak_memory_bytes=peak, flops=flops
    )


def _sizes(recipe: Recipe, subject: _Subject, tokens: int) -> dict[str, Any]:
    return {
        "layers": recipe.plan.depth,
        "pattern": recipe.plan.megatron_pattern,
        "hidden_size": recipe.model.hidden_size,
        "parameters": sum(p.numel() for p in subject.parameters),
        "micro_batch_size": recipe.schedule.micro_batch_size,
        "seq_length": recipe.model.seq_length,
        "tokens": tokens,
    }
