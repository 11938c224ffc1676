"""How the M2RNN mixer's weights are laid out over tensor-parallel ranks."""

from dataclasses import dataclass

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.settings import M2RNNSettings


class M2RNNMixerError(MegacppError):
    """A config, parallel layout or call that the M2RNN mixer cannot serve."""


@dataclass(frozen=True)
class M2RNNLayout:
    """Sizes of the mixer: `heads` of the whole model, the rest of one rank.

    conv: channels of each part that goes through the convolution. in_proj: rows of each part.
    """

    tp: int
    heads: int
    local_heads: int
    k_dim: int
    v_dim: int
    conv: dict[str, int]
    in_proj: dict[str, int]

    @classmethod
    def of(cls, config, settings: M2RNNSettings, tp: int) -> "M2RNNLayout":
        """Raises M2RNNMixerError for sizes that the mixer cannot serve."""
        if config.context_parallel_size > 1:
            raise M2RNNMixerError(
                f"context_parallel_size is {config.context_parallel_size}: the M2RNN mixer needs "
                "the whole sequence on each rank; use 1, and tensor or sequence parallelism instead"
            )
        k_dim, v_dim, heads = settings.k_head_dim, settings.v_head_dim, settings.num_heads
        if heads is None and k_dim + v_dim > 0:
            heads = config.hidden_size // (k_dim + v_dim)
        sizes = {"num_heads": heads, "k_head_dim": k_dim, "v_head_dim": v_dim}
        sizes |= {"conv_kernel": settings.conv_kernel, "chunk_size": settings.chunk_size}
        for name, size in sizes.items():
            if size is None or size < 1:
                raise M2RNNMixerError(
                    f"m2rnn.{name} is {size} at hidden_size {config.hidden_size}; it must be at "
                    "least 1 (num_heads, when not set, is hidden_size // (k_head_dim + v_head_dim))"
                )
        for what, size in (("m2rnn heads", heads), ("channels of m2rnn.k_head_dim", k_dim)):
            if size % tp:
                raise M2RNNMixerError(
                    f"{size} {what} do not divide over {tp} tensor-parallel ranks; make both the "
                    "heads and k_head_dim a multiple of tensor_model_parallel_size"
                )
        values = heads // tp * v_dim
        conv = {"query": k_dim // tp, "key": k_dim // tp, "value": values}
        in_proj = conv | {"gate": values, "decay": heads // tp}
        return cls(tp, heads, heads // tp, k_dim, v_dim, conv, in_proj)

    @property
    def channels(self) -> int:
        """V of every head of the whole model: the width of the norm."""
        return self.heads * self.v_dim
