"""A model in a world of one: what it is called with, and what trains it, Megatron's optimizer or
the CPU lane's. For `megacpp bench`, and for what is compiled before a run's ranks start."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacpp_mcore.kernels.documents import BENCHED_DOCUMENTS, document_bounds, packed_seq_params
from megacpp_mcore.recipe import Recipe


def in_half_precision(model: torch.nn.Module, args: Namespace) -> torch.nn.Module:
    """The model as Megatron trains it in bf16: its parameters cast, and wrapped."""
    if not args.bf16:
        return model
    from megatron.core.transformer.module import Float16Module

    return Float16Module(model.config, model)


def layers_alone(model: torch.nn.Module) -> torch.nn.Module:
    """The decoder of a HybridModel, from which the final norm is taken."""
    decoder = model.decoder
    decoder.post_layer_norm = False
    decoder.final_norm = None
    return decoder


def hidden_shape(recipe: Recipe, args: Namespace) -> tuple[int, int, int]:
    """Of what goes into a layer: [s, b, h], of packed documents [s * b, 1, h]."""
    seq, batch = args.seq_length, args.micro_batch_size
    rows = (seq * batch, 1) if _is_packed(recipe) else (seq, batch)
    return (*rows, args.hidden_size)


def decoder_arguments(
    model: torch.nn.Module, recipe: Recipe, args: Namespace, device: str
) -> dict[str, Any]:
    """What a decoder is called with beside hidden states and the mask: a HybridModel's rotary
    embedding, and documents where the recipe packs them."""
    others = packed_documents(recipe, args, device)
    if model.position_embedding_type == "rope" and not model.config.multi_latent_attention:
        table = model.rotary_pos_emb(args.seq_length, packed_seq=_is_packed(recipe))
        others["rotary_pos_emb"] = table
    return others


def packed_documents(recipe: Recipe, args: Namespace, device: str) -> dict[str, Any]:
    """packed_seq_params of made-up documents, of all rows in one; nothing for whole rows."""
    if not _is_packed(recipe):
        return {}
    bounds = document_bounds(args.micro_batch_size, args.seq_length, BENCHED_DOCUMENTS)
    documents = packed_seq_params(bounds, device, tokens_per_sample=args.seq_length)
    return {"packed_seq_params": documents}


def _is_packed(recipe: Recipe) -> bool:
    return recipe.data.dataloader_inter_document_masking


def random_batches(
    recipe: Recipe, args: Namespace, device: str, count: int
) -> list[dict[str, Any]]:
    """Random tokens, each the label of the one before it."""
    generator = torch.Generator().manual_seed(recipe.schedule.seed)
    shape = (count, args.micro_batch_size, args.seq_length + 1)
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
