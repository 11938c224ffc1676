"""`--against upstream`: what a block comes from, of its own package, in the block's place.

M is mamba-ssm's whole module, in_proj to out_proj, with its own launches and its own autotuning; it
takes [b, s, h], so the transposes are part of it. R is XMA's recurrence: XMA's module has no gate
and no norm, so it lies between our operations in plain torch, as lm-engine has it between its own.
E comes from no package; in its place are Liger's fused experts, by their own
autotuning, between our router and the sum with the shared expert. Norm in front and residual behind
are the block's.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from megacpp_mcore.bench import BenchError
from megacpp_mcore.inference.export import block_of
from megacpp_mcore.inference.names import Names
from megacpp_mcore.inference.upstream import block_sizes, from_upstream, to_upstream
from megacpp_mcore.kernels.documents import bounds_to_end
from megacpp_mcore.recipe import Recipe
from megacpp_mcore.stack import bridges
from megacpp_mcore.surfaces.support import Broken, import_reason

NAME = "upstream"
_KIND = "mamba3"
_MIMO_ROWS = 64  # tokens of a chunk times the rank, as upstream's module recommends


@dataclass(frozen=True)
class Upstream:
    """distribution: of the package. name: what is taken from its `module`. put: puts that into the
    model of a recipe, whose only layer is the block."""

    distribution: str
    module: str
    name: str
    what: str
    put: Callable[[Recipe, torch.nn.Module, Any], "Block"]

    def load(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)

    def entry(self) -> dict[str, Any]:
        """What the receipt says of it under `backends`."""
        try:
            version = metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            version = "of no installed distribution"
        return {
            "surface": "layer", "requested": NAME, "observed": NAME,
            "reason": f"{self.distribution} {version}: {self.what}",
            "implementation": f"{self.module}:{self.name}",
        }  # fmt: skip


def of(recipe: Recipe) -> Upstream:
    """What the recipe's only layer comes from.

    Raises BenchError for a layer that comes from no package, and for a package that is not
    installed or cannot be imported.
    """
    letter = recipe.plan.layers[0].letter
    if letter not in _UPSTREAM:
        raise BenchError(f"--against {NAME}: layer {letter} is from no package; E, M and R are")
    found = _UPSTREAM[letter]
    bridges.before_megatron()
    bridges.import_ops_only(found.module.partition(".")[0])
    if reason := import_reason(found.module):
        absent = "" if isinstance(reason, Broken) else f"{found.distribution} is not installed: "
        raise BenchError(f"--against {NAME}: {absent}{reason}")
    return found


class Block:
    """A block whose parameters are ours."""

    def __init__(self, own: Mapping[str, Tensor]) -> None:
        """own: the parameters of the layer as we have it, by name."""
        self.own = own

    def take(self) -> None:
        """The values of `own` have changed."""

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the last backward pass, by the names of `own`."""
        return {name: p.grad for name, p in self.own.items() if p.grad is not None}


class _Mamba3(Block):
    """mamba-ssm's module, with our weights as `megacpp export --blocks` writes them; its gradients
    come back as `megacpp import --block` reads weights, which is linear."""

    def __init__(self, recipe: Recipe, model: torch.nn.Module, module: Any) -> None:
        super().__init__(dict(model.decoder.named_parameters()))
        self.prefix, mixer = _mixer(model.decoder)
        self.sizes = block_sizes(recipe, model.config)
        self.names = Names(model)
        weights = self._theirs()
        weight, chunk_size = mixer.in_proj.weight, recipe.mamba3.chunk_size
        sizes, hidden = self.sizes[_KIND], self.sizes["hidden_size"]
        if sizes["mimo"]:
            chunk_size = _MIMO_ROWS // sizes["rank"]
        self.module = module(
            hidden, d_state=sizes["state_dim"], headdim=sizes["head_dim"], ngroups=sizes["groups"],
            expand=Fraction(sizes["heads"] * sizes["head_dim"], hidden),
            rope_fraction=recipe.mamba3.rope_fraction, A_floor=sizes["decay_floor"],
            is_mimo=sizes["mimo"], mimo_rank=sizes["rank"], chunk_size=chunk_size,
            device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        self.module.load_state_dict(weights)
        setattr(*_place(model.decoder, self.prefix), _Transposed(self.module))

    def _theirs(self) -> dict[str, Tensor]:
        return to_upstream(self.sizes, _KIND, block_of(self.names.exported(), 0, _KIND))

    def take(self) -> None:
        self.module.load_state_dict(self._theirs())

    def gradients(self) -> dict[str, Tensor]:
        named = self.module.named_parameters()
        theirs = {name: p.grad for name, p in named if p.grad is not None}
        converted = from_upstream(self.sizes, _KIND, theirs)
        block = {f"layers.0.{_KIND}.{name}": x for name, x in converted.items()}
        state = self.names.own(self.names.exported() | block)
        inside = {name.removeprefix("decoder."): x for name, x in state.items()}
        return super().gradients() | {n: inside[n] for n in self.own if n.startswith(self.prefix)}


class _Transposed(torch.nn.Module):
    """A mixer of Megatron's MambaLayer around a module of [b, s, h]."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, hidden_states: Tensor, inference_context=None, packed_seq_params=None
    ) -> tuple[Tensor, None]:
        """hidden_states [s, b, h] -> (output [s, b, h], None)."""
        from megacpp_mcore.layers.documents import document_offsets

        own_candidates(hidden_states)
        bounds = document_offsets(packed_seq_params)
        if bounds is not None:
            bounds = bounds_to_end(bounds, hidden_states.shape[0]).to(torch.int32)
        return self.module(hidden_states.transpose(0, 1), cu_seqlens=bounds).transpose(0, 1), None


def own_candidates(hidden_states: Tensor) -> None:
    """Let mamba-ssm's kernels choose among their own candidates, as they do for its users: our
    backend, in the same process, gives them those of `mamba_ssm_configs`."""
    if hidden_states.is_cuda:
        from megacpp_mcore.kernels.mamba3.mamba_ssm_ops import unpin

        unpin()


class _M2RNN(Block):
    """XMA's recurrence between our operations in plain torch."""

    def __init__(self, recipe: Recipe, model: torch.nn.Module, recurrence: Any) -> None:
        super().__init__(dict(model.decoder.named_parameters()))
        if recipe.data.dataloader_inter_document_masking:
            raise BenchError(f"--against {NAME}: XMA's recurrence is compared on whole rows only")
        _, mixer = _mixer(model.decoder)
        mixer.fused, mixer.m2rnn = None, _Recurrence(recurrence)


@dataclass(frozen=True)
class _Recurrence:
    """XMA's function with the interface of `megacpp_mcore.kernels.m2rnn.m2rnn`.

    Weight and decay are in the model's dtype, as lm-engine hands them on.
    """

    function: Callable[..., tuple[Tensor, Tensor]]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, W: Tensor, f: Tensor, *, grad_clamp, **others
    ) -> tuple[Tensor, Tensor]:
        return self.function(
            query=q, key=k, value=v, weight=W.to(v.dtype), forget_input=f.to(v.dtype),
            gradient_clipping=grad_clamp,
        )  # fmt: skip


class _Experts(Block):
    """Liger's fused experts on our weights, where experts take tokens in their order."""

    def __init__(self, recipe: Recipe, model: torch.nn.Module, function: Any) -> None:
        from megacpp_mcore.kernels.moe_experts.readers import Readers
        from megacpp_mcore.kernels.moe_experts.routing import Sorted
        from megacpp_mcore.layers.moe import MegacppMoELayer

        super().__init__(dict(model.decoder.named_parameters()))
        layer = next(m for m in model.decoder.modules() if isinstance(m, MegacppMoELayer))
        if not layer.routed_inside or not layer.config.gated_linear_unit:
            raise BenchError(
                f"--against {NAME}: Liger's experts are SwiGLU on weights that are one tensor, as "
                "fused_moe's where every expert is local; these are not"
            )
        experts = layer.experts
        # Autograd sums the gradients of the tokens' readers, as nothing of ours does it there.
        experts.readers = lambda tokens, gate: Readers(tokens, tokens, tokens, Sorted())

        def readers_of_norm(norm, tokens, gate):
            normed, residual = norm(tokens)
            return experts.readers(normed, gate), residual

        experts.readers_of_norm = readers_of_norm
        experts.routed = _RoutedByLiger(function, experts._weights, layer.config.moe_router_topk)


@dataclass(frozen=True)
class _RoutedByLiger:
    """Liger's function with the interface of `megacpp_mcore.layers.experts.FusedExperts.routed`.

    It takes the numbers of each token's experts where our router hands on a map.
    """

    function: Any
    weights: Callable[[], tuple[Tensor, Tensor]]
    topk: int

    def __call__(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor, *addends: Tensor | None
    ) -> Tensor:
        """addends: the shared expert's output, the residual, then what the sum of ours needs."""
        index = routing_map.to(torch.uint8).topk(self.topk, dim=-1, sorted=False).indices
        chosen = probs.gather(-1, index)
        y = self.function.apply(tokens, *self.weights(), index.to(torch.int32), chosen)
        for addend in addends[:2]:
            y = y if addend is None else y + addend
        return y


def _mixer(decoder: torch.nn.Module) -> tuple[str, torch.nn.Module]:
    """The decoder's only mixer, and its name with a point behind it."""
    from megacpp_mcore.layers.mixer import RecurrentMixer

    name, mixer = next(
        found for found in decoder.named_modules() if isinstance(found[1], RecurrentMixer)
    )
    return f"{name}.", mixer


def _place(decoder: torch.nn.Module, prefix: str) -> tuple[torch.nn.Module, str]:
    parent, _, name = prefix.removesuffix(".").rpartition(".")
    return decoder.get_submodule(parent), name


def put(upstream: Upstream, recipe: Recipe, model: torch.nn.Module) -> Block:
    """Put `upstream` into the model, with the same weights. Raises what building it raises."""
    return upstream.put(recipe, model, upstream.load())


_UPSTREAM = {
    "E": Upstream(
        "liger-kernel", "liger_kernel.ops.fused_moe", "LigerFusedMoEFunction",
        "its fused experts between our router and our shared expert, by its own autotuning",
        _Experts,
    ),
    "M": Upstream(
        "mamba-ssm", "mamba_ssm.modules.mamba3", "Mamba3",
        "the module between norm and residual, by its own autotuning", _Mamba3,
    ),
    "R": Upstream(
        "accelerated-model-architectures", "xma.layers.m2rnn", "m2rnn",
        "the recurrence between our operations in plain torch", _M2RNN,
    ),
}  # fmt: skip
