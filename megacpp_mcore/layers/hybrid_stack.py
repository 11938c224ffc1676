"""The stack spec: which module implements each symbol of a hybrid pattern.

`stack_spec` returns what Megatron's `HybridModel(hybrid_stack_spec=...)` takes. The linears
determine the spec's structure, so dispatch chooses them when the spec is made. Norms, experts,
attention cores and scans depend on the model's config: they are chosen layer by layer.
`StackSpec` is what `--spec` names; the spec is made from it when a model is built, not when it is
imported.
"""

import importlib
from collections.abc import Callable, Mapping

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from megacpp_mcore import dispatch
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.hybrid import letters as table
from megacpp_mcore.hybrid.letters.letter import STACK_FIELDS, Slot
from megacpp_mcore.layers import hooked_arguments, loss
from megacpp_mcore.layers.blocks import StackParts, mlp_layer
from megacpp_mcore.layers.precision import cast_weights_in_every_micro_batch
from megacpp_mcore.layers.settings import environment_recipe, plugin_settings
from megacpp_mcore.patching import applied
from megacpp_mcore.stack import bridges, optimizer_bridges, unpickling
from megacpp_mcore.surfaces import linear
from megacpp_mcore.surfaces.support import TE
from megacpp_mcore.surfaces.workload import Workload, current_device

# In the slots that no other letter is asked for: A E M R.
_DEFAULT = "".join(entry.letter for entry in table.SHIPPED if entry.spec is None)


class MegacppStack(HybridStack):
    """Megatron's HybridStack, which checks our settings and builds the spec's final norm.

    Upstream hard-codes TENorm. With the patch final-norm-from-spec the norm is one of the
    submodules, and final_norm is None. MTP's inner stack has no final norm, so upstream's own class
    is used there.
    """

    def __init__(self, config, submodules, final_norm=None, post_layer_norm=True, **kwargs) -> None:
        bridges.install()
        optimizer_bridges.install()
        unpickling.install()
        if config.expert_model_parallel_size > 1:
            bridges.uncompiled_swiglu_for_few_rows()
        # Fail here, with the reason, rather than in one of the layers.
        requests = plugin_settings(config).backends
        loss.check_requested_heads(config)
        hooked_arguments.refuse_of_this_process()
        dispatch.decide("linear", linear.workload(current_device(), config), requests)
        cast_weights_in_every_micro_batch(config)
        upstream_builds_it = post_layer_norm and final_norm is None
        super().__init__(config, submodules, post_layer_norm=upstream_builds_it, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm and final_norm is not None:
            self.final_norm = final_norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )


class StackSpec(ModuleSpec):
    """A spec for Megatron's `--spec MODULE NAME`, which takes an object by name and calls nothing.

    make: backends -> the ModuleSpec of a stack, as `stack_spec` makes it. Our own model config
    takes `of(backends)`. Stock Megatron reads `params` and `submodules` as it builds the model;
    the backends are then those of the recipe in MEGACPP_RECIPE, where it is set.
    """

    module = MegacppStack

    def __init__(self, make: Callable[[Mapping[str, str] | None], ModuleSpec]) -> None:
        self.metainfo: dict = {}
        self._make = make

    def of(self, backends: Mapping[str, str] | None) -> ModuleSpec:
        """The spec for these backends (surface -> requested). Raises DispatchError."""
        return self._make(backends)

    @property
    def params(self) -> dict:
        return self._of_environment().params

    @property
    def submodules(self) -> HybridStackSubmodules:
        return self._of_environment().submodules

    def _of_environment(self) -> ModuleSpec:
        recipe = environment_recipe()
        return self.of(recipe.backends if recipe else None)


class StackSpecError(MegacppError):
    """No stack spec is possible for these letters; the message names the letter and the reason."""


def stack_spec(backends: Mapping[str, str] | None = None, letters: str = "") -> ModuleSpec:
    """The spec of a hybrid stack of A, E, M and R, with `letters` in the slots that they use.

    backends: surface -> requested backend (a recipe's `[backends]`). letters: further ones from
    `hybrid.letters`, such as D, or registered ones. Raises DispatchError when a named backend
    cannot be used, LetterError for an unknown letter, StackSpecError when two of `letters` need the
    same slot or the function that makes a letter's layer does not exist.
    """
    if two := table.collision(letters):
        one, other, symbol = two
        raise StackSpecError(
            f"{one.letter} and {other.letter} both need Megatron's {symbol} slot, of which a stack "
            "has one; use only one of them"
        )
    any_config = Workload.of(current_device(), "any")
    linears = dispatch.decide("linear", any_config, backends).load()()
    norms_inside = linears.is_te and dispatch.requested("norm", backends) in (dispatch.AUTO, TE)
    parts = StackParts(linears, norms_inside)
    slots = {s.symbol: s for letter in _DEFAULT + letters for s in table.get(letter).slots}
    layers = {STACK_FIELDS[symbol]: _function(slot) for symbol, slot in slots.items()}
    layers = {"mlp_layer": mlp_layer} | layers
    submodules = HybridStackSubmodules(
        **{field: layer(parts) for field, layer in layers.items()}, mtp_block_spec=_mtp_block(parts)
    )
    if "final-norm-from-spec" in applied("megatron-core"):
        submodules.final_norm = parts.norm
        return ModuleSpec(module=MegacppStack, submodules=submodules)
    return ModuleSpec(module=MegacppStack, params={"final_norm": parts.norm}, submodules=submodules)


def _function(slot: Slot) -> Callable[[StackParts], ModuleSpec]:
    """The function that makes the spec of the slot's layer."""
    module, _, name = slot.layer.rpartition(".")
    function = getattr(importlib.import_module(module), name, None)
    if function is None:
        raise StackSpecError(f"{slot.layer}, the function for {slot.module}, does not exist")
    return function


def _mtp_block(parts: StackParts) -> ModuleSpec:
    layer = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=parts.norm,
            hnorm=parts.norm,
            eh_proj=parts.linears.column,
            mtp_model_layer=None,  # HybridModel builds the inner stack from the pattern
            layer_norm=parts.norm,
        ),
    )
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
    )
