"""Convert weights of single blocks to the layout of the packages they come from, and back.

M is `Mamba3` of mamba-ssm 2.3 (mamba_ssm/modules/mamba3.py), R the M2RNN layer of lm-engine around
XMA's kernels. Both are given as those modules' `state_dict()`.
"""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megacpp_mcore.hybrid.block_settings import M2RNNSettings
from megacpp_mcore.hybrid.m2rnn_layout import M2RNNLayout, from_lm_engine, to_lm_engine
from megacpp_mcore.hybrid.mamba3_layout import in_proj_rows
from megacpp_mcore.inference.recipe import InferenceError
from megacpp_mcore.inference.safetensors import read_safetensors, refuse_special

PACKAGES = {"mamba3": "mamba-ssm", "m2rnn": "xma"}
_CONV = {"conv.weight": "conv1d_weight", "conv.bias": "conv1d_bias", "norm.weight": "norm_weight"}


def block_sizes(recipe: Any, config: Any) -> dict[str, Any]:
    """Sizes of the M and R blocks of a recipe's model, as an export's config has them.

    config: Megatron's of the model.
    """
    return {
        "hidden_size": recipe.model.hidden_size,
        "mamba3": {
            "mimo": recipe.mamba3.variant == "mimo", "rank": recipe.mamba3.rank,
            "heads": config.mamba_num_heads, "head_dim": config.mamba_head_dim,
            "state_dim": config.mamba_state_dim, "groups": config.mamba_num_groups,
            "angles": recipe.mamba3.angles(config.mamba_state_dim),
            "decay": recipe.mamba3.decay, "decay_floor": recipe.mamba3.decay_floor,
        },
        "m2rnn": {
            "heads": recipe.m2rnn.heads(recipe.model.hidden_size), "k_dim": recipe.m2rnn.k_head_dim,
            "v_dim": recipe.m2rnn.v_head_dim, "kernel": recipe.m2rnn.conv_kernel,
        },
    }  # fmt: skip


def to_upstream(config: Mapping[str, Any], kind: str, block: Mapping[str, Tensor]) -> dict:
    """block: an exported layer's tensors behind `layers.N.KIND.`. config: of the export.

    Raises InferenceError for a setting that the package's module does not have.
    """
    if kind == "mamba3":
        return _to_mamba_ssm(config["mamba3"], block)
    layout = _layout(config)
    own = {_CONV.get(name, name): tensor for name, tensor in block.items()}
    padding = own["in_proj.weight"].new_zeros(layout.padding, config["hidden_size"])
    own["in_proj.weight"] = torch.cat((own["in_proj.weight"], padding))
    return to_lm_engine(layout, own)


def from_upstream(config: Mapping[str, Any], kind: str, weights: Mapping[str, Tensor]) -> dict:
    """The inverse. Raises InferenceError, or M2RNNMixerError, for other names or shapes."""
    if kind == "mamba3":
        return _from_mamba_ssm(config["mamba3"], config["hidden_size"], weights)
    layout = _layout(config)
    own = from_lm_engine(layout, dict(weights))
    rows = own["in_proj.weight"].shape[0] - layout.padding
    own["in_proj.weight"] = own["in_proj.weight"][:rows]
    names = {ours: name for name, ours in _CONV.items()}
    return {names.get(name, name): tensor for name, tensor in own.items()}


def read_weights(path: Path) -> dict[str, Tensor]:
    """A state dict from a .safetensors file, or from one that torch wrote.

    Raises InferenceError for a file that is neither, or that holds anything but tensors.
    """
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    from megacpp_mcore.stack import unpickling

    try:
        refuse_special(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip, OSError, RuntimeError: a damaged file raises any
        why = unpickling.why(error)
        raise InferenceError(f"{path} is not a file of weights: {why}") from error
    if not isinstance(found, Mapping) or not all(isinstance(x, Tensor) for x in found.values()):
        raise InferenceError(f"{path} is not a state_dict: it must have a tensor for each name")
    return dict(found)


def _to_mamba_ssm(c: Mapping[str, Any], block: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if c["decay"] != "softplus":
        raise InferenceError(f"mamba3.decay is {c['decay']!r}; mamba-ssm's Mamba3 has 'softplus'")
    if 2 * c["angles"] not in (c["state_dim"], c["state_dim"] // 2):
        raise InferenceError("mamba3.rope_fraction: mamba-ssm's Mamba3 has 0.5 and 1.0")
    theirs = dict(block)
    theirs["in_proj.weight"] = _in_order(c, block["in_proj.weight"], ("groups", "rank"))
    if not c["mimo"]:
        theirs |= {name: block[name].unsqueeze(1) for name in ("B_bias", "C_bias")}
    return theirs


def _from_mamba_ssm(
    c: Mapping[str, Any], hidden: int, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    expected = _mamba_ssm_shapes(c, hidden)
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if found != expected:
        differing = sorted(found.items() ^ expected.items())
        raise InferenceError(
            f"these are not the weights of a mamba-ssm Mamba3 of the model's sizes: {differing}"
        )
    own = dict(weights)
    own["in_proj.weight"] = _in_order(c, weights["in_proj.weight"], ("rank", "groups"))
    if not c["mimo"]:
        own |= {name: weights[name].squeeze(1) for name in ("B_bias", "C_bias")}
    return own


def _in_order(c: Mapping[str, Any], weight: Tensor, order: tuple[str, str]) -> Tensor:
    """in_proj with the rows of B and C, now by `order` and state, by the reverse of it."""
    z, x, B, C, *after = weight.split(_mamba3_rows(c))
    B, C = (
        part.unflatten(0, (c[order[0]], c[order[1]], c["state_dim"])).transpose(0, 1).flatten(0, 2)
        for part in (B, C)
    )
    return torch.cat((z, x, B, C, *after))


def _mamba3_rows(c: Mapping[str, Any]) -> tuple[int, ...]:
    sizes = ("heads", "head_dim", "state_dim", "groups", "rank", "angles")
    return in_proj_rows(**{name: c[name] for name in sizes})


def _mamba_ssm_shapes(c: Mapping[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    heads, inner, rank = c["heads"], c["heads"] * c["head_dim"], c["rank"]
    shapes = {
        "in_proj.weight": (sum(_mamba3_rows(c)), hidden), "dt_bias": (heads,), "D": (heads,),
        "B_bias": (heads, rank, c["state_dim"]), "C_bias": (heads, rank, c["state_dim"]),
        "B_norm.weight": (c["state_dim"],), "C_norm.weight": (c["state_dim"],),
        "out_proj.weight": (hidden, inner),
    }  # fmt: skip
    if c["mimo"]:
        mimo = (heads, rank, c["head_dim"])
        shapes |= dict.fromkeys(("mimo_x", "mimo_z", "mimo_o"), mimo)
    return shapes


def _layout(config: Mapping[str, Any]) -> M2RNNLayout:
    """The layout of an export's R block, on one rank."""
    r = config["m2rnn"]
    settings = M2RNNSettings(
        k_head_dim=r["k_dim"], v_head_dim=r["v_dim"], num_heads=r["heads"], conv_kernel=r["kernel"]
    )
    sizes = SimpleNamespace(hidden_size=config["hidden_size"], context_parallel_size=1, fp8=None)
    return M2RNNLayout.of(sizes, settings, 1)
