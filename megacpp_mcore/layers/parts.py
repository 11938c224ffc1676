"""Building blocks of stack specs, one function per backend of the surfaces' registry."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Linears:
    """Linear classes of one backend.

    duplicated: with the whole weight on every tensor-parallel rank. is_te: Transformer Engine's,
    which can fuse a norm.
    """

    column: type
    row: type
    duplicated: type
    is_te: bool


def te_linears() -> Linears:
    """Transformer Engine's."""
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TELinear,
        TERowParallelLinear,
    )

    return Linears(TEColumnParallelLinear, TERowParallelLinear, TELinear, is_te=True)


def megatron_linears() -> Linears:
    """Megatron's own, in plain torch. Duplicated is its column-parallel class, which gathers."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    return Linears(ColumnParallelLinear, RowParallelLinear, ColumnParallelLinear, is_te=False)


def te_experts(*args, **kwargs):
    """Transformer Engine's grouped GEMM over the local experts."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider().grouped_mlp_modules(True)(*args, **kwargs)


def sequential_experts(*args, **kwargs):
    """One MLP per expert, run one after another."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return SequentialMLP(*args, submodules=mlp, **kwargs)
