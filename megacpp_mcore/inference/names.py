"""Names of an exported model's tensors, and their conversion from Megatron's and back.

docs/inference.md lists the names. Besides names, three things differ: rows that only pad an in_proj
are left out, q, k and v of grouped attention are three tensors, and the experts of a layer are one.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacpp_mcore.inference.recipe import InferenceError

# Megatron's name -> ours, by parts: layers first, then what is in a layer.
_PLACES = (
    (r"embedding\.word_embeddings\.(?=weight)", "embedding."),
    (r"output_layer\.(?=weight)", "lm_head."),
    (r"decoder\.final_norm\.", "final_norm."),
    (r"decoder\.layers\.(\d+)\.", r"layers.\1."),
    (r"mtp\.layers\.(\d+)\.enorm\.", r"mtp.\1.embedding_norm."),
    (r"mtp\.layers\.(\d+)\.hnorm\.", r"mtp.\1.hidden_norm."),
    (r"mtp\.layers\.(\d+)\.eh_proj\.", r"mtp.\1.projection."),
    (r"mtp\.layers\.(\d+)\.final_layernorm\.", r"mtp.\1.final_norm."),
    (r"mtp\.layers\.(\d+)\.mtp_model_layer\.layers\.(\d+)\.", r"mtp.\1.layers.\2."),
)
_IN_LAYER = (
    (r"(?:input_layernorm|pre_mlp_layernorm|norm)\.(?=weight)", "norm."),
    (r"self_attention\.linear_proj\.", "{attention}.out."),
    (r"self_attention\.linear_(q|kv)_(down|up)_proj\.", r"{attention}.\1_\2."),
    (r"self_attention\.linear_q_proj\.", "{attention}.q."),
    (r"self_attention\.linear_qkv\.", "{attention}.qkv."),
    (r"self_attention\.(q|k|kv)_layernorm\.", r"{attention}.\1_norm."),
    (r"self_attention\.conv1d_(weight|bias)", r"m2rnn.conv.\1"),
    (r"self_attention\.norm_weight", "m2rnn.norm.weight"),
    (r"self_attention\.(in_proj|out_proj)\.", r"m2rnn.\1."),
    (r"self_attention\.(W|A_log|dt_bias|D)", r"m2rnn.\1"),
    (r"mixer\.", "mamba3."),
    (r"mlp\.router\.expert_bias", "moe.router.bias"),
    (r"mlp\.router\.", "moe.router."),
    (r"mlp\.experts\.local_experts\.(\d+)\.linear_fc1\.weight", r"moe.experts.up#\1"),
    (r"mlp\.experts\.local_experts\.(\d+)\.linear_fc2\.weight", r"moe.experts.down#\1"),
    (r"mlp\.shared_experts\.linear_fc1\.", "moe.shared.up."),
    (r"mlp\.shared_experts\.linear_fc2\.", "moe.shared.down."),
    (r"mlp\.shared_experts\.gate_weight", "moe.shared_gate.weight"),
    (r"mlp\.linear_fc1\.", "mlp.up."),
    (r"mlp\.linear_fc2\.", "mlp.down."),
)


def exported_name(own: str, attention: str) -> str:
    """Ours for Megatron's name; with "#E" at the end for the part of expert E.

    attention: "attention" (MLA) or "gqa". Raises InferenceError for a name that is not known.
    """
    for pattern, place in _PLACES:
        if not (match := re.match(pattern, own)):
            continue
        start, rest = match.expand(place), own[match.end() :]
        if ".layers." not in f".{start}":
            return start + rest
        for inner, name in _IN_LAYER:
            if found := re.match(inner, rest):
                there = found.expand(name).replace("{attention}", attention)
                return start + there + rest[found.end() :]
    raise InferenceError(f"the model's {own} has no name outside Megatron: it cannot be exported")


@dataclass(frozen=True)
class _QKV:
    """Rows of Megatron's linear_qkv: of each group its queries, then a key and a value."""

    groups: int
    per_group: int  # heads of a group
    dim: int

    def apart(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = weight.unflatten(0, (self.groups, self.per_group + 2, self.dim))
        q, k, v = rows.split((self.per_group, 1, 1), dim=1)
        return q.flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2)

    def together(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (x.unflatten(0, (self.groups, -1, self.dim)) for x in (q, k, v))
        return torch.cat(tuple(parts), dim=1).flatten(0, 2)


class Names:
    """The tensors of one model, built without parallelism: Megatron's state dict and ours."""

    def __init__(self, model: Any) -> None:
        from megacpp_mcore.layers.mixer import RecurrentMixer

        config = model.config
        self._attention = "attention" if config.multi_latent_attention else "gqa"
        self._padding = {
            f"{name}.{weight}": rows
            for name, module in model.named_modules()
            if isinstance(module, RecurrentMixer)
            for weight, rows in module.padding.items()
        }
        groups = config.num_query_groups or config.num_attention_heads
        self._qkv = _QKV(groups, config.num_attention_heads // groups, config.kv_channels)
        self._own = {
            key: value
            for key, value in model.state_dict().items()
            if isinstance(value, Tensor) and not key.endswith("_extra_state")
        }

    def exported(self) -> dict[str, Tensor]:
        """The model's tensors by our names."""
        found: dict[str, Any] = {}
        for own, name, expert in self._listed():
            tensor = self._own[own]
            if padding := self._padding.get(own):
                tensor = tensor[:-padding]
            if expert is not None:
                found.setdefault(name, {})[expert] = tensor
            elif name.endswith(".qkv.weight"):
                for part, x in zip("qkv", self._qkv.apart(tensor), strict=True):
                    found[name.replace(".qkv.", f".{part}.")] = x
            else:
                found[name] = tensor
        return {
            name: torch.stack([x[e] for e in sorted(x)]) if isinstance(x, dict) else x
            for name, x in found.items()
        }

    def own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse: Megatron's state dict. Raises InferenceError, which names what is missing,
        not known, or of another shape."""
        expected = {name: x.shape for name, x in self.exported().items()}
        if tensors.keys() != expected.keys():
            raise InferenceError(
                f"the tensors are not the recipe's model: missing "
                f"{_some(expected.keys() - tensors.keys())}; not known "
                f"{_some(tensors.keys() - expected.keys())}"
            )
        for name, shape in expected.items():
            if tensors[name].shape != shape:
                raise InferenceError(
                    f"{name} is {tuple(tensors[name].shape)}; the recipe's model has {tuple(shape)}"
                )
        state = {}
        for own, name, expert in self._listed():
            if name.endswith(".qkv.weight"):
                parts = (tensors[name.replace(".qkv.", f".{part}.")] for part in "qkv")
                tensor = self._qkv.together(*parts)
            else:
                tensor = tensors[name] if expert is None else tensors[name][expert]
            if padding := self._padding.get(own):
                tensor = torch.cat((tensor, tensor.new_zeros(padding, *tensor.shape[1:])))
            state[own] = tensor.to(self._own[own].dtype)
        return state

    def _listed(self) -> Iterator[tuple[str, str, int | None]]:
        """(Megatron's name, ours, the expert or None) of every tensor."""
        for own in self._own:
            name, _, expert = exported_name(own, self._attention).partition("#")
            yield own, name, int(expert) if expert else None


def _some(names: set[str]) -> str:
    listed = sorted(names)
    return (
        f"{', '.join(listed[:3])}{' ...' * (len(listed) > 3)} ({len(listed)})" if names else "none"
    )
