"""One micro batch in Megatron's loop: reading it, the forward step, and the masked loss."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_model_config,
)
from megatron.training import get_args, get_timers
from megatron.training.utils import is_first_or_last_pipeline_stage

from megacpp_mcore.training.cpu.step import loss_func
from megacpp_mcore.training.gpu.packed import WORK, Documents, documents_of, shared

Batch = dict[str, torch.Tensor | Documents | None]
_ROWS = ("tokens", "labels", "loss_mask", "position_ids")
_KEYS = (*_ROWS, "attention_mask")


def get_batch(
    data_iterator: Iterator[dict[str, Any]] | None, config, vp_stage: int | None = None
) -> Batch:
    """This rank's part of the next micro batch; every value is None on a rank that needs none.

    The first tensor-parallel rank reads the batch and broadcasts it; under context parallelism each
    rank has a part of the sequence. tokens, labels, position_ids [b, s] int64, loss_mask [b, s]
    float32; with packed documents b is 1, and `documents` has them.
    """
    args = get_args()
    packed = args.dataloader_inter_document_masking
    with_mtp = mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout, mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False, vp_stage=vp_stage,
    )  # fmt: skip
    has_tokens = is_first_or_last_pipeline_stage(vp_stage) or with_mtp
    nothing = dict.fromkeys((*_KEYS, "documents"))
    if not (has_tokens or packed):
        return nothing
    reads = mpu.get_tensor_model_parallel_rank() == 0
    sample = next(data_iterator) if reads else {}
    found = _documents(sample if reads else None) if packed else None
    if not has_tokens:  # a middle pipeline stage needs only the offsets
        return nothing | {"documents": found}
    rows = _rows(sample, with_mtp)
    if packed:
        rows |= {key: rows[key].reshape(1, -1) for key in _ROWS if rows[key] is not None}
    rows = get_batch_on_this_cp_rank(
        rows,
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        use_per_sequence_balancing=packed,
    )
    return rows | {"documents": found}


def _documents(sample: dict[str, Any] | None) -> Documents:
    """The packed documents, with their offsets on the device. sample: None on a rank that the first
    tensor-parallel one tells them."""
    read = None if sample is None else documents_of(sample)
    return shared(read, mpu.get_tensor_model_parallel_group()).to(torch.cuda.current_device())


def _rows(sample: dict[str, Any], with_mtp: bool) -> Batch:
    """The rows of every tensor-parallel rank. sample: empty where another rank reads it."""
    args = get_args()
    return get_batch_on_this_tp_rank(
        _to_device(sample),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=with_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )


def _to_device(sample: dict[str, Any]) -> Batch:
    device = torch.cuda.current_device()
    moved = {key: sample[key].to(device, non_blocking=True) for key in _KEYS if key in sample}
    return dict.fromkeys(_KEYS) | moved


def packed_documents(batch: Batch) -> PackedSeqParams | None:
    """The batch's packed documents as the layers take them; None for whole rows."""
    documents = batch["documents"]
    if documents is None:
        return None
    WORK.add(documents)  # Megatron counts attention's work by document
    return documents.params(tokens_per_sample=get_args().seq_length)


def checked_loss(loss_mask: torch.Tensor, total: torch.Tensor) -> tuple:
    """Megatron's loss_func: (sum of the masked losses, tokens counted, what to report).

    total: that sum, in nats, from the model. MTP adds the gradients of its losses separately. With
    Megatron's check_for_nan_in_loss_and_grad, a sum that is not finite ends the run.
    """
    total, tokens, _ = loss_func(loss_mask, total)
    if get_args().check_for_nan_in_loss_and_grad:
        for rejected, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=total,
                rejection_func=rejected,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,  # the forward pass is deterministic
                fatal=True,
            )
    report = torch.cat([total.detach().clone().view(1), tokens.view(1).to(total.dtype)])
    return total, tokens, {"lm loss": report}


def forward_step(data_iterator: Iterator[dict[str, Any]] | None, model: torch.nn.Module) -> tuple:
    """Megatron's forward_step_func: the summed loss of the next micro batch, and its loss_func.

    On other pipeline stages than the last, hidden states instead of the loss.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    batch = get_batch(data_iterator, get_model_config(model), vp_stage)
    documents = packed_documents(batch)
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        packed_seq_params=documents,
        loss_mask=batch["loss_mask"],
        loss_weights=batch["loss_mask"],
    )
    return output, partial(checked_loss, batch["loss_mask"])
