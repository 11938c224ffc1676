"""The surfaces of the model, and the backends of each in order of preference.

A new backend is one entry here and one row in `megacpp_mcore.catalog_rows`; dispatch itself knows
neither. An optional package is imported by the `supports` of its own backend and nowhere else.
"""

from megacpp_mcore import problems
from megacpp_mcore.backend import REFERENCE, Backend, Problem, Surface, always, import_reason


def transformer_engine(problem: Problem) -> str | None:
    """The `supports` of Transformer Engine's modules."""
    if problem.device != "cuda":
        return f"Transformer Engine runs on cuda only, the problem is on {problem.device}"
    return import_reason("transformer_engine.pytorch")


TE_ATTENTION_CUDNN = 92200  # TE 2.17.1 is compiled against it


def te_attention(problem: Problem) -> str | None:
    """The `supports` of TE's fused attention, whose backward pass needs a newer cuDNN than torch's.

    TE checks the cuDNN version when it is compiled only; with torch 2.11's own 9.19 the forward
    pass works and the backward pass raises CUDNN_STATUS_BAD_PARAM.
    """
    if reason := transformer_engine(problem):
        return reason
    import torch

    version = torch.backends.cudnn.version()
    if version is None or version < TE_ATTENTION_CUDNN:
        return (
            f"cuDNN {version} at run time; TE 2.17.1's fused attention needs {TE_ATTENTION_CUDNN} "
            "or newer"
        )
    return None


def torch_attention(problem: Problem) -> str | None:
    """The `supports` of attention in plain torch, which sees the tokens of its own rank only."""
    ranks = problem.size("context_parallel_size", 1)
    return f"context_parallel_size {ranks}: it sees one rank's tokens only" if ranks > 1 else None


_PARTS = "megacpp_mcore.layers.parts"
_ATTENTION = "megacpp_mcore.layers.core_attention"
_TE_EXTENSION = "megatron.core.extensions.transformer_engine"

_SURFACES = (
    Surface(
        "linear",
        (
            Backend("te", f"{_PARTS}:te_linears", transformer_engine),
            Backend(REFERENCE, f"{_PARTS}:megatron_linears", always),
        ),
        problems.stack_part_of,
    ),
    Surface(
        "norm",
        (
            Backend("te", f"{_PARTS}:te_norm", transformer_engine),
            Backend(REFERENCE, f"{_PARTS}:torch_norm", always),
        ),
        problems.stack_part_of,
    ),
    Surface(
        "moe_experts",
        (
            Backend("te", f"{_PARTS}:te_experts", transformer_engine),
            Backend(REFERENCE, f"{_PARTS}:sequential_experts", always),
        ),
        problems.stack_part_of,
    ),
    Surface(
        "core_attention",
        (
            Backend("te", f"{_TE_EXTENSION}:TEDotProductAttention", te_attention),
            Backend("sdpa", f"{_ATTENTION}:SDPACoreAttention", torch_attention),
            Backend(REFERENCE, f"{_ATTENTION}:ReferenceCoreAttention", torch_attention),
        ),
        problems.core_attention_of,
    ),
    Surface(
        "mamba3_scan",
        (Backend(REFERENCE, "megacpp_mcore.kernels.mamba3:mamba3_scan", always),),
        problems.mamba3_scan_of,
    ),
    Surface(
        "m2rnn",
        (Backend(REFERENCE, "megacpp_mcore.kernels.m2rnn:m2rnn", always),),
        problems.m2rnn_of,
    ),
)

REGISTRY: dict[str, Surface] = {surface.name: surface for surface in _SURFACES}
