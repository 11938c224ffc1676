"""The plugin's settings of a layer: attached to Megatron's config, or read through MEGACPP_RECIPE.

Megatron passes every layer its `TransformerConfig`. Our own entry points attach our settings to it.
Megatron's stock `pretrain_hybrid.py` cannot, so there the settings come from the recipe that
MEGACPP_RECIPE names, which must agree with the config that Megatron parsed.
"""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.hybrid.block_settings import M2RNNSettings, Mamba3Settings, RecomputeSettings

_ATTRIBUTE = "megacpp_settings"

# (section, key) of a recipe -> field of Megatron's config. The check catches a command line made
# from one recipe with the environment of another.
_SHARED_FIELDS = {
    ("model", "depth"): "num_layers",
    ("model", "hidden_size"): "hidden_size",
    ("model", "num_attention_heads"): "num_attention_heads",
    ("moe", "num_experts"): "num_moe_experts",
    ("moe", "moe_router_topk"): "moe_router_topk",
    ("mamba3", "mamba_num_heads"): "mamba_num_heads",
    ("mamba3", "mamba_head_dim"): "mamba_head_dim",
    ("mamba3", "mamba_state_dim"): "mamba_state_dim",
    ("mamba3", "mamba_num_groups"): "mamba_num_groups",
}


class SettingsError(MegacppError):
    """No settings for our layers, or a recipe that disagrees with Megatron's command line."""


@dataclass(frozen=True)
class PluginSettings:
    """What our layers need beyond Megatron's config.

    backends: surface -> requested backend. optimizer: the recipe's optimizer.optimizer.
    """

    mamba3: Mamba3Settings = field(default_factory=Mamba3Settings)
    m2rnn: M2RNNSettings = field(default_factory=M2RNNSettings)
    recompute: RecomputeSettings = field(default_factory=RecomputeSettings)
    backends: Mapping[str, str] = field(default_factory=dict)
    optimizer: str = "adam"


def settings_of(recipe) -> PluginSettings:
    """What a Recipe says to our layers."""
    return PluginSettings(
        recipe.mamba3,
        recipe.m2rnn,
        recipe.recompute,
        recipe.backends,
        recipe.optimizer.optimizer,
    )


def attach(config, settings: PluginSettings):
    """Attach `settings` to a Megatron TransformerConfig, and return the config."""
    setattr(config, _ATTRIBUTE, settings)
    return config


def plugin_settings(config) -> PluginSettings:
    """The settings for layers built from `config`.

    Raises SettingsError when the config has no settings attached and MEGACPP_RECIPE is not set, or
    names a recipe that disagrees with `config`; MissingPatchError when the recipe needs a patch
    that is not applied.
    """
    attached = getattr(config, _ATTRIBUTE, None)
    if attached is not None:
        return attached
    from megacpp_mcore import dispatch
    from megacpp_mcore.recipe import patch_needs

    recipe = environment_recipe()
    if recipe is None:
        raise SettingsError(
            "no settings for megacpp's layers: MEGACPP_RECIPE is not set. Export it as "
            "`megacpp recipe args RECIPE --env` prints it, or call "
            "megacpp_mcore.layers.settings.attach(config, PluginSettings(...))"
        )
    _check_agreement(config, recipe)
    dispatch.check_read(recipe)
    patch_needs.check(recipe)
    settings = settings_of(recipe)
    attach(config, settings)
    return settings


def environment_recipe():
    """The Recipe that MEGACPP_RECIPE names, read once a process; None where it is not set.

    Raises RecipeError as `recipe_from_environment`.
    """
    from megacpp_mcore.recipe import ENVIRONMENT_VARIABLE

    return _recipe_named(os.environ.get(ENVIRONMENT_VARIABLE, ""))


@functools.cache
def _recipe_named(text: str):
    from megacpp_mcore import dispatch
    from megacpp_mcore.recipe import recipe_from_environment

    recipe = recipe_from_environment()
    if recipe is not None:
        dispatch.strict(recipe.launch.strict)
    return recipe


def _check_agreement(config, recipe) -> None:
    differing = []
    for (section, key), field_name in _SHARED_FIELDS.items():
        asked, parsed = getattr(getattr(recipe, section), key), getattr(config, field_name)
        if asked is not None and asked != parsed:
            differing.append(f"{section}.{key} is {asked} there, Megatron parsed {parsed}")
    if differing:
        raise SettingsError(
            f"MEGACPP_RECIPE names recipe {recipe.name}, which is not the one that Megatron's "
            f"command line was made from: {'; '.join(differing)}. Make both with one "
            "`megacpp recipe args RECIPE --env` call"
        )
