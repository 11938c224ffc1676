"""The settings of what Megatron does not know, as the layers receive them.

Sizes that Megatron has a field for (`mamba_num_heads`, `mamba_head_dim`, `mamba_state_dim`,
`mamba_num_groups`) stay in Megatron's `TransformerConfig`; only what it has no field for is here.
"""

from dataclasses import dataclass
from typing import Any, Literal


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

    @property
    def rank(self) -> int:
        """R of the scan: mimo_rank, 1 for SISO."""
        return self.mimo_rank if self.variant == "mimo" else 1

    def angles(self, state_dim: int) -> int:
        """Pairs of a state of state_dim that RoPE rotates."""
        return int(state_dim * self.rope_fraction) // 2


@dataclass(frozen=True)
class M2RNNSettings:
    """The R block: M2RNN (math: `megacpp_mcore.kernels.m2rnn`)."""

    k_head_dim: int = 64  # K: rows of the state
    v_head_dim: int = 16  # V: columns of the state
    num_heads: int | None = None  # None: as `heads` says
    conv_kernel: int = 4
    # Steps between the states the backward pass starts from. The CUDA kernels take 16 or 32 in
    # 16-bit models (float32: 48 and 64, too); with others `auto` takes the reference, and says so.
    chunk_size: int = 32
    grad_clamp: float | None = None  # limit of the state's gradient at each step (XMA's is 1)
    # approximate: forward in 16-bit models the GPU's own instruction, within 2^-16 of the value on
    # Hopper (tested; what PTX promises of any GPU is 2^-11)
    tanh: Literal["approximate", "exact"] = "approximate"
    dt_min: float = 1e-3
    dt_max: float = 1e-1
    dt_init_floor: float = 1e-4

    def heads(self, hidden_size: int) -> int:
        """num_heads, or else as many as hidden_size has room for K + V of each; may be 0."""
        if self.num_heads is not None:
            return self.num_heads
        return hidden_size // (self.k_head_dim + self.v_head_dim)


# What Megatron recomputes of [recompute], as one of its --recompute-modules.
MEGATRON_RECOMPUTES = {
    ("attention", "core_attn"): "core_attn",
    ("attention", "up_proj"): "mla_up_proj",
    ("moe", "act"): "moe_act",
    ("moe", "shared_experts"): "shared_experts",
    ("moe", "layer"): "moe",
    ("layernorm", True): "layernorm",
}


@dataclass(frozen=True)
class RecomputeSettings:
    """What the backward pass recomputes instead of keeping it, by block; nothing by default.

    Our own layers recompute what is not in MEGATRON_RECOMPUTES.
    """

    # core_attn: saves nothing with the fused kernels, which keep no scores. up_proj: MLA's up
    # projections, with RoPE
    attention: tuple[Literal["core_attn", "up_proj"], ...] = ()
    # act: the experts' activation. experts: the routed experts, without their communication.
    # layer: router, communication and all experts
    moe: tuple[Literal["act", "experts", "shared_experts", "layer"], ...] = ()
    mamba3: Literal["core", "mixer"] | None = None  # core: all between the mixer's projections
    m2rnn: Literal["core", "mixer"] | None = None
    layernorm: bool = False  # the norm before an A, E or R

    def asked(self, block: str) -> tuple[Any, ...]:
        """The parts of one block to recompute, as a tuple."""
        value = getattr(self, block)
        return value if isinstance(value, tuple) else (value,) if value else ()

    @property
    def megatron_modules(self) -> tuple[str, ...]:
        """The values of --recompute-modules."""
        return tuple(
            module
            for (block, part), module in MEGATRON_RECOMPUTES.items()
            if part in self.asked(block)
        )
