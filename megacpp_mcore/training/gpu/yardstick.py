"""The forward step of the yardstick, Megatron's own HybridModel with full logits."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megacpp_mcore.training.gpu.batch import checked_loss, get_batch, packed_documents


def forward_step(data_iterator: Iterator[dict[str, Any]] | None, model: torch.nn.Module) -> tuple:
    """As `batch.forward_step`, for a model whose output is the loss of every token, [b, s]."""
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    batch = get_batch(data_iterator, get_model_config(model), vp_stage)
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        packed_seq_params=packed_documents(batch),
        loss_mask=batch["loss_mask"],
    )
    return losses, partial(_masked_loss, batch["loss_mask"])


def _masked_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple:
    return checked_loss(loss_mask, (losses.float() * loss_mask).sum())
