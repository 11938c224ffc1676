"""Megatron's arguments, process groups and model for a recipe's argv, in a single process.

The CPU lane follows the same path as a GPU run: the argv that `megacpp recipe args` prints,
Megatron's own parser and validation, its config and model builder, and our spec by name.
"""

import contextlib
import io
import logging
import os
import random
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence

import numpy
import torch

from megacpp_mcore.recipe import Recipe
from megacpp_mcore.recipe.check import megatrons_refusals
from megacpp_mcore.stack import bridges


def megatron_args(argv: Sequence[str]) -> Namespace:
    """Megatron's parsed and validated arguments for `argv`, as the only rank of a world of one.

    The variables of a rank that are set already are kept. Raises MegatronRefusal.
    """
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(name, value)
    bridges.before_megatron()
    with quiet(), bridges.pretend_h200(), _argv(argv), megatrons_refusals():
        from megatron.training.argument_utils import core_transformer_config_from_args
        from megatron.training.arguments import parse_args, validate_args

        args = parse_args()
        validate_args(args)
        core_transformer_config_from_args(args)  # validates, too
    return args


def build_model(args: Namespace, recipe: Recipe) -> torch.nn.Module:
    """Megatron's HybridModel for `args`, which are the recipe's, by Megatron's own builder.

    On the CPU with use_cpu_initialization, else on this process's GPU. Needs the process groups of
    `single_process`. The stack spec is the one that `--spec` names; raises StackSpecError when
    Megatron could not import it and would use its own.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megacpp_mcore.training.gpu.model import MegacppModelBuilder, model_config

    with quiet():
        builder = MegacppModelBuilder(model_config(args, recipe))
        model = builder.build_model(
            ProcessGroupCollection.use_mpu_process_groups(), pre_process=True, post_process=True
        )
    return model if args.use_cpu_initialization else model.cuda()


@contextlib.contextmanager
def single_process(seed: int, device: str = "cpu") -> Iterator[None]:
    """Megatron's process groups for a world of one rank, seeded, and destroyed at the end.

    Uses gloo for "cpu", with one group in the place of all, and NCCL for "cuda", with Megatron's
    CUDA random states.
    """
    from megatron.core import parallel_state, tensor_parallel

    bridges.install()
    _reset_loss_trackers()
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(
        backend, store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        with _one_group() if device == "cpu" else contextlib.nullcontext():
            parallel_state.initialize_model_parallel()
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        if device == "cuda":
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def _one_group() -> Iterator[None]:
    """Megatron's groups of one rank are one: gloo starts three threads for each of the thirty."""
    from megatron.core import parallel_state

    create = parallel_state.create_group
    groups: dict[tuple[int, ...], torch.distributed.ProcessGroup] = {}

    def create_once(ranks: Sequence[int], **options) -> torch.distributed.ProcessGroup:
        key = tuple(ranks)
        if key not in groups:
            groups[key] = create(ranks, **options)
        return groups[key]

    parallel_state.create_group = create_once
    try:
        yield
    finally:
        parallel_state.create_group = create


def _reset_loss_trackers() -> None:
    """Reset Megatron's process-wide logs and scales of MTP and MoE losses, sized for one model."""
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import (
        MTPLossAutoScaler,
        MTPLossLoggingHelper,
    )

    MTPLossLoggingHelper.tracker.clear()
    destroy_moe_metrics_tracker()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress Megatron's listing of its arguments and its warnings about absent CUDA packages."""
    logging.getLogger("megatron").setLevel(logging.WARNING)
    # StringIO, which is never closed: a logging handler created inside keeps the stream
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _argv(argv: Sequence[str]) -> Iterator[None]:
    """Set sys.argv, which Megatron's parser reads."""
    saved = sys.argv
    sys.argv = [sys.argv[0], *argv]
    try:
        yield
    finally:
        sys.argv = saved
