"""The case class of every surface that can be benched and admitted."""

import importlib

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels.case import Case

_CASES = {
    "norm": "megacpp_mcore.kernels.norm.case:NormCase",
    "moe_experts": "megacpp_mcore.kernels.moe_experts.case:MoeExpertsCase",
    "core_attention": "megacpp_mcore.kernels.core_attention.case:CoreAttentionCase",
    "rope_qk": "megacpp_mcore.kernels.rope_qk.case:RopeQKCase",
    "mla_rope": "megacpp_mcore.kernels.mla_rope.case:MLARopeCase",
    "mamba3_scan": "megacpp_mcore.kernels.mamba3.case:Mamba3ScanCase",
    "mamba3_prep": "megacpp_mcore.kernels.mamba3_prep.case:Mamba3PrepCase",
    "m2rnn": "megacpp_mcore.kernels.m2rnn.case:M2RNNCase",
    "m2rnn_prep": "megacpp_mcore.kernels.m2rnn_prep.case:M2RNNPrepCase",
    "linear_cross_entropy": (
        "megacpp_mcore.kernels.linear_cross_entropy.case:LinearCrossEntropyCase"
    ),
    "residual": "megacpp_mcore.kernels.residual.case:ResidualCase",
}
SURFACES = tuple(_CASES)


class CaseError(MegacppError):
    """A surface that has no case."""


def case_class(surface: str) -> type[Case]:
    """The surface's case class. Raises CaseError naming the surfaces that have one."""
    if surface not in _CASES:
        raise CaseError(f"surface {surface!r} has no case; choose {', '.join(_CASES)}")
    module, name = _CASES[surface].split(":")
    return getattr(importlib.import_module(module), name)
