"""Training steps and evaluation in a single process, through Megatron's schedule functions."""

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from megacpp_mcore.errors import MegacppError

Batch = dict[str, torch.Tensor]


class TrainingError(MegacppError):
    """Training cannot go on: the loss or a gradient is not finite."""

    exit_status = 1


class NoGradientSync(MegatronModule):
    """A model wrapper with the interface that Megatron's schedules need, for one rank.

    Megatron's DistributedDataParallel needs CUDA streams; one rank has no gradients to reduce.
    """

    def __init__(self, model: MegatronModule) -> None:
        super().__init__(model.config)
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.module(*args, **kwargs)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Nothing to do."""


def loss_func(loss_mask: torch.Tensor, total: torch.Tensor) -> tuple:
    """Megatron's loss_func: (sum of masked losses, number of tokens, what to report).

    total: that sum, in nats, as the model returns it for `loss_weights=loss_mask`.
    """
    tokens = loss_mask.sum().to(torch.int)
    # Copies, because Megatron divides the first value in place.
    return total.clone(), tokens, (total.detach().clone(), tokens)


def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple:
    """Megatron's forward_step_func: the summed loss of the next micro batch, and its loss_func."""
    batch = next(batches)
    total = model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        loss_weights=batch["loss_mask"],
    )
    return total, partial(loss_func, batch["loss_mask"])


class Trainer:
    """A model with its optimizer and schedule. step() and evaluate() return nats per token."""

    def __init__(
        self,
        model: MegatronModule,
        optimizer: torch.optim.Optimizer,
        scheduler: OptimizerParamScheduler,
        args: Namespace,
    ) -> None:
        self.model = NoGradientSync(model)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.args = args
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.groups = ProcessGroupCollection.use_mpu_process_groups()

    def step(self, micro_batches: list[Batch]) -> tuple[float, float]:
        """Train on one global batch. Returns (mean loss, gradient norm before clipping).

        Raises TrainingError when the loss or the gradient norm is not finite; the parameters are
        then those before the step.
        """
        self.model.train()
        self.optimizer.zero_grad()
        loss = self._run(micro_batches, forward_only=False)
        if not torch.isfinite(loss):
            raise TrainingError(f"the loss is {loss.item()}")
        finalize_model_grads([self.model], pg_collection=self.groups)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.args.clip_grad or float("inf"))
        if not torch.isfinite(norm):
            raise TrainingError(f"the gradient norm is {norm.item()} at loss {loss.item():.4f}")
        self.optimizer.step()
        self.scheduler.step(increment=self.args.global_batch_size)
        return loss.item(), norm.item()

    def evaluate(self, micro_batches: list[Batch]) -> float:
        """The mean loss of the next-token head over the batches, without gradients."""
        self.model.eval()
        with torch.no_grad():
            return self._run(micro_batches, forward_only=True).item()

    def _run(self, micro_batches: list[Batch], forward_only: bool) -> torch.Tensor:
        """Forward, and backward unless forward_only; returns the mean loss over all tokens."""
        reports: list[tuple[torch.Tensor, torch.Tensor]] = []
        batches = iter(micro_batches)
        for index in range(len(micro_batches)):
            output, _ = schedules.forward_step(
                forward_step, batches, self.model, len(micro_batches), None, reports,
                self.model.config, cp_group_size=1, current_microbatch=index,
            )  # fmt: skip
            if not forward_only:
                schedules.backward_step(None, output, None, self.model.config)
        totals, tokens = (torch.stack(column).sum() for column in zip(*reports, strict=True))
        return totals / tokens.clamp(min=1)
