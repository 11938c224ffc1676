"""Packed documents as Megatron hands them to a layer."""

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megacpp_mcore.errors import MegacppError


class PackedDocumentsError(MegacppError):
    """packed_seq_params in a form that our layers do not take."""


def document_offsets(packed: PackedSeqParams | None) -> Tensor | None:
    """(documents + 1,) where packed documents start in the row; None for whole rows.

    Padding counts with the document before it: where there is any, its offsets are Megatron's
    padded ones. The last may lie before the end of the row. Raises PackedDocumentsError for another
    layout than thd, or without offsets.
    """
    if packed is None:
        return None
    padded = packed.cu_seqlens_q_padded
    offsets = packed.cu_seqlens_q if padded is None else padded
    if packed.qkv_format != "thd" or offsets is None:
        raise PackedDocumentsError(
            f"packed_seq_params has qkv_format {packed.qkv_format!r} and cu_seqlens_q "
            f"{'missing' if offsets is None else 'given'}; packed documents are 'thd' with "
            "cu_seqlens_q"
        )
    return offsets
