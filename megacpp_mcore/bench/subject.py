"""A recipe's model with its batches, and the calls of it that are timed."""

import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megacpp_mcore.bench.clock import Clock
from megacpp_mcore.recipe import Recipe

_BATCHES = 4


@dataclass(frozen=True)
class Training:
    """A model as it is trained. model: wrapped. backward: of a loss, and all that gradients need.
    update: clipping, the optimizer, gradients forgotten."""

    model: torch.nn.Module
    backward: Callable[[Tensor], None]
    update: Callable[[], None]


class Subject:
    """The model with its batches, and the calls that are timed."""

    def __init__(
        self, model: torch.nn.Module, args: Namespace, batches: list[dict[str, Tensor]],
        clock: Clock,
    ) -> None:  # fmt: skip
        self.bare, self.args, self.batches, self.clock = model, args, batches, clock
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.model = in_half_precision(model, args)
        self._training: Training | None = None

    def forward(self, turn: int) -> Tensor:
        """The mean loss of one micro batch, the first after an update of the weights.

        As Megatron's schedules say so: Transformer Engine keeps the weights it has cast to FP8.
        """
        self.model.set_is_first_microbatch()
        batch = self.batches[turn % len(self.batches)]
        return self.model(**batch) / batch["labels"].numel()

    def forward_backward(self, turn: int) -> None:
        self.forward(turn).backward()
        self.forget()

    def forget(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self, turn: int) -> None:
        """One training step on a micro batch: forward, backward, clipping, optimizer."""
        self.step_up_to_update(turn)
        self.update()

    def step_up_to_update(self, turn: int) -> None:
        assert self._training is not None
        self._training.backward(self.forward(turn))

    def update(self) -> None:
        assert self._training is not None
        self._training.update()

    def with_optimizer(self) -> None:
        """From here on the model is as Megatron trains it."""
        build = _on_gpu if self.clock.device == "cuda" else _on_cpu
        self._training = build(self.bare, self.args)
        self.model = self._training.model


def in_half_precision(model: torch.nn.Module, args: Namespace) -> torch.nn.Module:
    """The model as Megatron trains it in bf16: its parameters cast, and wrapped."""
    if not args.bf16:
        return model
    from megatron.core.transformer.module import Float16Module

    return Float16Module(model.config, model)


def batches(recipe: Recipe, args: Namespace, device: str) -> list[dict[str, Tensor]]:
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


def _on_gpu(bare: torch.nn.Module, args: Namespace) -> Training:
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

    def backward(loss: Tensor) -> None:
        optimizer.scale_loss(loss).backward()
        finalize_model_grads([parallel], pg_collection=groups)

    def update() -> None:
        optimizer.step()
        parallel.zero_grad_buffer()
        optimizer.zero_grad()

    return Training(parallel, backward, update)


def _on_cpu(bare: torch.nn.Module, args: Namespace) -> Training:
    """The CPU lane's step."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megacpp_mcore.training.cpu.optimizer import build_optimizer
    from megacpp_mcore.training.cpu.step import NoGradientSync

    groups = ProcessGroupCollection.use_mpu_process_groups()
    wrapped = NoGradientSync(bare)
    optimizer = build_optimizer(bare, args)
    parameters = [p for p in bare.parameters() if p.requires_grad]

    def backward(loss: Tensor) -> None:
        loss.backward()
        finalize_model_grads([wrapped], pg_collection=groups)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, args.clip_grad or float("inf"))
        optimizer.step()
        optimizer.zero_grad()

    return Training(wrapped, backward, update)
