"""The parts that stack specs are put together from, one function a backend of dispatch.REGISTRY."""

from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Linears:
    """Linear classes of one backend.

    duplicated: weights whole on every tensor-parallel rank. is_te: they are Transformer Engine's,
    which can hold a norm inside.
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
    """Megatron's own, in plain torch. It has no duplicated one: column-parallel and gathered is it."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    return Linears(ColumnParallelLinear, RowParallelLinear, ColumnParallelLinear, is_te=False)


def te_norm() -> type:
    """Transformer Engine's RMSNorm or LayerNorm, as the config says."""
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def torch_norm() -> type:
    """torch's RMSNorm or LayerNorm, as the config says."""
    from megacpp_mcore.layers.norm import TorchNorm

    return TorchNorm


def te_experts():
    """Transformer Engine's grouped GEMM over the local experts."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider().grouped_mlp_modules(True)


def sequential_experts():
    """One MLP after another."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return partial(SequentialMLP, submodules=mlp)
