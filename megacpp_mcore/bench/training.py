"""A model with what trains it, in a world of one: Megatron's optimizer, or the CPU lane's."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Training:
    """A model as it is trained. model: wrapped. backward: of a loss, and all that gradients need.
    update: clipping, the optimizer, gradients forgotten."""

    model: torch.nn.Module
    backward: Callable[[Tensor], None]
    update: Callable[[], None]


def on_gpu(bare: torch.nn.Module, args: Namespace, fused: bool) -> Training:
    """Megatron's own distributed data parallel and optimizer.

    fused: the recipe's optimizer.fused_update.
    """
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models import dist_utils
    from megatron.training.training import get_megatron_ddp_config, get_megatron_optimizer_config

    from megacpp_mcore.training.gpu import fused_update

    groups = ProcessGroupCollection.use_mpu_process_groups()
    [parallel] = dist_utils.prepare_existing_model_chunks_for_distributed_training(
        [bare], bare.config, groups, ddp_config=get_megatron_ddp_config(args)
    )
    config, overrides = get_megatron_optimizer_config(args)
    optimizer = get_megatron_optimizer(config, [parallel], config_overrides=overrides)
    fused_update.install(optimizer, fused)

    def backward(loss: Tensor) -> None:
        optimizer.scale_loss(loss).backward()
        finalize_model_grads([parallel], pg_collection=groups)

    def update() -> None:
        optimizer.step()
        parallel.zero_grad_buffer()
        optimizer.zero_grad()

    return Training(parallel, backward, update)


def on_cpu(bare: torch.nn.Module, args: Namespace) -> Training:
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
