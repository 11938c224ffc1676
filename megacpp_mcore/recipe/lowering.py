"""Recipe -> Megatron's argument vector and environment.

Every key that a recipe sets is on the command line, also with its default value. Keys that it
leaves out are not: Megatron's defaults are the schema's. The plugin's own settings are passed with
the recipe; Megatron's stock pretrain_hybrid.py finds it by MEGACPP_RECIPE.
"""

from dataclasses import dataclass
from typing import Any

from megacpp_mcore.hybrid.letters import Spec, spec_of
from megacpp_mcore.recipe import ENVIRONMENT_VARIABLE, Recipe
from megacpp_mcore.recipe.fields import Flag, Key
from megacpp_mcore.recipe.source import KEYS


@dataclass(frozen=True)
class Expectation:
    """What Megatron's argument namespace must hold once the argv is parsed and validated.

    key: the recipe key the value comes from. name: the name in the namespace.
    """

    key: str
    name: str
    value: Any


@dataclass(frozen=True)
class Lowered:
    """argv: Megatron's arguments. environment: the variables that the launch must set."""

    argv: list[str]
    environment: dict[str, str]
    expected: tuple[Expectation, ...]


def lower(recipe: Recipe) -> Lowered:
    """The command line and environment of one run."""
    argv = _plan_words(recipe) + _recompute_words(recipe)
    expected = [*_plan_expectations(recipe), *_recompute_expectations(recipe)]
    if recipe.checkpoint.async_save:  # Megatron's default needs nvidia-resiliency-ext
        argv += ["--async-strategy", "mcore"]
        expected.append(Expectation("checkpoint.async_save", "async_strategy", "mcore"))
    for dotted, key in KEYS.items():
        value = recipe.get(dotted)
        if isinstance(key.lowers_to, Flag) and value is not None:
            argv += _words(key, value) if dotted in recipe.origins else []
            expected.append(Expectation(dotted, _namespace_name(recipe, key), value))
    return Lowered(argv, _environment(recipe), tuple(expected))


def _plan_words(recipe: Recipe) -> list[str]:
    pattern = recipe.plan.megatron_pattern
    words = ["--hybrid-layer-pattern", pattern, "--spec", *_spec(recipe)]
    if _has_mla(pattern):
        words.append("--multi-latent-attention")
    if "*" in pattern:
        words.append("--group-query-attention")
    return words


def _plan_expectations(recipe: Recipe) -> list[Expectation]:
    plan = recipe.plan
    return [
        Expectation("model.pattern", "hybrid_layer_pattern", plan.megatron_pattern),
        Expectation("model.depth", "num_layers", plan.depth),
        Expectation("model.pattern", "spec", tuple(_spec(recipe))),
        Expectation("attention.kind", "multi_latent_attention", _has_mla(plan.megatron_pattern)),
        Expectation("attention.kind", "group_query_attention", "*" in plan.megatron_pattern),
        Expectation("mtp.mtp_num_layers", "mtp_num_layers", recipe.mtp.mtp_num_layers or None),
        Expectation(
            "parallel.virtual_pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            plan.vpp if plan.vpp > 1 else None,
        ),
    ]


def _recompute_words(recipe: Recipe) -> list[str]:
    modules = recipe.recompute.megatron_modules
    if not modules:
        return []
    return ["--recompute-granularity", "selective", "--recompute-modules", *modules]


def _recompute_expectations(recipe: Recipe) -> list[Expectation]:
    modules = recipe.recompute.megatron_modules
    if not modules:
        return []
    return [
        Expectation("recompute", "recompute_granularity", "selective"),
        Expectation("recompute", "recompute_modules", modules),
    ]


def _spec(recipe: Recipe) -> Spec:
    # Ours even if no letter needs it: our spec chooses the layers' backends, Megatron's own spec
    # always takes Transformer Engine.
    letters = {layer.letter for layer in recipe.plan.layers}
    spec = spec_of(letters | {"M"}, recipe.plan.target)
    assert spec is not None
    return spec


def _has_mla(pattern: str) -> bool:
    return "+" in pattern or "D" in pattern


def _words(key: Key, value: Any) -> list[str]:
    assert isinstance(key.lowers_to, Flag) and key.flag is not None
    if key.lowers_to.given_when is not None:
        return [key.flag] if value == key.lowers_to.given_when else []
    values = value if isinstance(value, tuple) else (value,)
    return [key.flag, *map(str, values)]


def _namespace_name(recipe: Recipe, key: Key) -> str:
    # Megatron moves this one for its layer-wise optimizers.
    if (
        key.dotted == "parallel.use_distributed_optimizer"
        and recipe.optimizer.optimizer not in ("adam", "sgd")
        and recipe.parallel.use_distributed_optimizer
    ):
        return "use_layer_wise_distributed_optimizer"
    return key.name


def _environment(recipe: Recipe) -> dict[str, str]:
    """torchrun takes the PET_* names as the defaults of its own options."""
    return {
        ENVIRONMENT_VARIABLE: recipe.request,
        **recipe.launch.environment,
        "PET_NNODES": str(recipe.launch.nnodes),
        "PET_NPROC_PER_NODE": str(recipe.launch.nproc_per_node),
    }
