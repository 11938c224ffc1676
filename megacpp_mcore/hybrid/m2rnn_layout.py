"""How the M2RNN mixer's weights are laid out over tensor-parallel ranks."""

from dataclasses import dataclass

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.hybrid.block_settings import M2RNNSettings
from megacpp_mcore.hybrid.row_padding import row_padding


class M2RNNMixerError(MegacppError):
    """A config, parallel layout or call that the M2RNN mixer does not support."""


@dataclass(frozen=True)
class M2RNNLayout:
    """Sizes of the mixer. `heads` counts the whole model; other sizes are per rank.

    conv: channels of each part that the convolution sees. in_proj: rows of each part. padding: rows
    of zeros after them (`row_padding`).
    """

    tp: int
    heads: int
    local_heads: int
    k_dim: int
    v_dim: int
    conv: dict[str, int]
    in_proj: dict[str, int]
    padding: int

    @classmethod
    def of(cls, config, settings: M2RNNSettings, tp: int) -> "M2RNNLayout":
        """Raises M2RNNMixerError for sizes that the mixer does not support."""
        if config.context_parallel_size > 1:
            raise M2RNNMixerError(
                f"context_parallel_size is {config.context_parallel_size}: the M2RNN mixer needs "
                "the whole sequence on each rank; use 1, and tensor or sequence parallelism instead"
            )
        k_dim, v_dim = settings.k_head_dim, settings.v_head_dim
        sizes = {"k_head_dim": k_dim, "v_head_dim": v_dim}
        sizes |= {"conv_kernel": settings.conv_kernel, "chunk_size": settings.chunk_size}
        heads = settings.heads(config.hidden_size) if min(sizes.values()) > 0 else None
        for name, size in {**sizes, "num_heads": heads}.items():
            if size is None or size < 1:
                raise M2RNNMixerError(
                    f"m2rnn.{name} is {size} at hidden_size {config.hidden_size}; it must be at "
                    "least 1 (num_heads defaults to hidden_size // (k_head_dim + v_head_dim))"
                )
        for what, size in (("m2rnn heads", heads), ("channels of m2rnn.k_head_dim", k_dim)):
            if size % tp:
                raise M2RNNMixerError(
                    f"{size} {what} do not divide over {tp} tensor-parallel ranks; make the number "
                    "of heads and k_head_dim multiples of tensor_model_parallel_size"
                )
        values = heads // tp * v_dim
        conv = {"query": k_dim // tp, "key": k_dim // tp, "value": values}
        in_proj = conv | {"gate": values, "decay": heads // tp}
        padding = row_padding(in_proj.values())
        return cls(tp, heads, heads // tp, k_dim, v_dim, conv, in_proj, padding)

    @property
    def channels(self) -> int:
        """heads * v_dim of the whole model: the width of the norm."""
        return self.heads * self.v_dim


# lm-engine's name -> ours, for parameters with the same values (D differs in shape).
_LM_ENGINE_NAMES = {
    "conv1d.weight": "conv1d_weight",
    "conv1d.bias": "conv1d_bias",
    "state_weight": "W",
    "decay_gate.A_log": "A_log",
    "decay_gate.dt_bias": "dt_bias",
    "D": "D",
    "g_norm.weight": "norm_weight",
    "output_projection.weight": "out_proj.weight",
}
_LM_ENGINE_IN_PROJ = "input_projection.weight"


def from_lm_engine(layout: M2RNNLayout, weights: dict) -> dict:
    """Convert weights of lm-engine's M2RNN (the layer around XMA's kernels) to this mixer's.

    weights: `state_dict()` of lm-engine's module, configured with one head of q and of k, H heads
    of v, gate, decay and state weight, a convolution with a bias, the residual D, an RMS norm and
    no other bias. layout: of the whole model (tp 1); reshard through a checkpoint. lm-engine's
    projection rows are [q, k, v, f, g], ours are [q, k, v, g, f]; besides, only D's shape differs.
    Raises M2RNNMixerError for other names or shapes.
    """
    expected = _lm_engine_shapes(layout, weights.get(_LM_ENGINE_IN_PROJ))
    _check_weights("lm-engine's M2RNN", weights, expected)
    *qkv, decay, gate = weights[_LM_ENGINE_IN_PROJ].split(_lm_engine_rows(layout))
    own = {ours: weights[theirs] for theirs, ours in _LM_ENGINE_NAMES.items()}
    own["D"] = own["D"].flatten()
    padding = gate.new_zeros(layout.padding, gate.shape[-1])
    return {"in_proj.weight": _concatenated(*qkv, gate, decay, padding)} | own


def to_lm_engine(layout: M2RNNLayout, weights: dict) -> dict:
    """The inverse of `from_lm_engine`: `state_dict()` of a mixer built without parallelism.

    Megatron's `_extra_state` entries, which hold no weight, are left out. Raises M2RNNMixerError
    for other names or shapes.
    """
    weights = {name: x for name, x in weights.items() if not name.endswith("._extra_state")}
    theirs = _lm_engine_shapes(layout, weights.get("in_proj.weight"))
    expected = {ours: theirs[name] for name, ours in _LM_ENGINE_NAMES.items()}
    rows, columns = theirs[_LM_ENGINE_IN_PROJ]
    expected |= {"in_proj.weight": (rows + layout.padding, columns), "D": (layout.channels,)}
    _check_weights("the M2RNN mixer", weights, expected)
    parts = [*layout.in_proj.values(), layout.padding]
    *qkv, gate, decay, _ = weights["in_proj.weight"].split(parts)
    converted = {name: weights[ours] for name, ours in _LM_ENGINE_NAMES.items()}
    converted["D"] = converted["D"].view(layout.heads, layout.v_dim)
    return {_LM_ENGINE_IN_PROJ: _concatenated(*qkv, decay, gate)} | converted


def _lm_engine_rows(layout: M2RNNLayout) -> list[int]:
    sizes = layout.in_proj
    return [sizes[name] for name in ("query", "key", "value", "decay", "gate")]


def _lm_engine_shapes(layout: M2RNNLayout, in_proj) -> dict[str, tuple[int, ...]]:
    """Shapes by lm-engine's names; hidden_size and the kernel size are not checked."""
    if layout.tp != 1:
        raise M2RNNMixerError(
            f"the layout is of one of {layout.tp} tensor-parallel ranks, but lm-engine's weights "
            "are whole: convert with tensor_model_parallel_size 1, and reshard through a checkpoint"
        )
    hidden = in_proj.shape[-1] if in_proj is not None else None
    heads, channels, conv = layout.heads, layout.channels, sum(layout.conv.values())
    return {
        _LM_ENGINE_IN_PROJ: (sum(layout.in_proj.values()), hidden),
        "conv1d.weight": (conv, 1, None),
        "conv1d.bias": (conv,),
        "state_weight": (heads, layout.v_dim, layout.v_dim),
        "decay_gate.A_log": (heads,),
        "decay_gate.dt_bias": (heads,),
        "D": (heads, layout.v_dim),
        "g_norm.weight": (channels,),
        "output_projection.weight": (hidden, channels),
    }


def _check_weights(whose: str, weights: dict, expected: dict[str, tuple]) -> None:
    """expected: name -> shape, with None for any size."""
    if weights.keys() != expected.keys():
        raise M2RNNMixerError(
            f"weights of {whose}: missing {sorted(expected.keys() - weights.keys())}, not known "
            f"{sorted(weights.keys() - expected.keys())}; it must have each of {sorted(expected)}"
        )
    for name, shape in expected.items():
        actual = tuple(weights[name].shape)
        same = len(actual) == len(shape) and all(
            size in (None, own) for own, size in zip(actual, shape, strict=True)
        )
        if not same:
            raise M2RNNMixerError(f"{name} of {whose} is {actual}; it must be {shape} (None: any)")


def _concatenated(*parts):
    import torch

    return torch.cat(parts)
