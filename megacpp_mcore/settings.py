"""The settings of the two blocks Megatron does not know, as the layers receive them.

Sizes that Megatron has a field for (`mamba_num_heads`, `mamba_head_dim`, `mamba_state_dim`,
`mamba_num_groups`) stay in Megatron's `TransformerConfig`; only what it has no field for is here.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Mamba3Settings:
    """The M block: Mamba-3 (math: `megacpp_mcore.kernels.mamba3`)."""

    variant: Literal["siso", "mimo"] = "siso"
    mimo_rank: int = 4  # R; read only when variant is "mimo"
    rope_fraction: float = 0.5  # share of the state that is rotated
    decay: Literal["softplus", "rational"] = "softplus"  # A = -softplus(x), or -(1+x | 1/(1-x))
    decay_floor: float = 1e-4  # -A is at least this
    dt_min: float = 1e-3  # dt_bias is drawn so that dt starts log-uniform in [dt_min, dt_max]
    dt_max: float = 1e-1
    dt_init_floor: float = 1e-4
    chunk_size: int = 64  # steps a chunk of the chunked scan


@dataclass(frozen=True)
class M2RNNSettings:
    """The R block: M2RNN (math: `megacpp_mcore.kernels.m2rnn`)."""

    k_head_dim: int = 64  # K: rows of the state
    v_head_dim: int = 16  # V: columns of the state
    num_heads: int | None = None  # None: hidden_size // (k_head_dim + v_head_dim)
    conv_kernel: int = 4
    chunk_size: int = 64  # steps between the states the backward pass starts from
    grad_clamp: float | None = None  # limit of the state's gradient at each step (XMA's is 1)
    dt_min: float = 1e-3
    dt_max: float = 1e-1
    dt_init_floor: float = 1e-4
