"""A recipe: one training run as typed data.

    recipe file -> load_recipe -> Recipe (keys and combinations checked, the layer plan made)
    -> megacpp_mcore.recipe.lowering -> Megatron's argv and environment

Our own entry points hand the Recipe on. In Megatron's stock pretrain_hybrid.py, which cannot,
`recipe_from_environment` gives the layers the same recipe back.
"""

import dataclasses
import json
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megacpp_mcore import dispatch
from megacpp_mcore.files import content_sha256
from megacpp_mcore.hybrid.block_settings import M2RNNSettings, RecomputeSettings
from megacpp_mcore.hybrid.pattern import PatternError, translate
from megacpp_mcore.hybrid.plan import HybridPlan
from megacpp_mcore.recipe import rules, schema
from megacpp_mcore.recipe.fields import Target
from megacpp_mcore.recipe.source import BACKENDS, KEYS, RecipeError, Settings, locate, read

ENVIRONMENT_VARIABLE = "MEGACPP_RECIPE"
_PIPELINE = "parallel.pipeline_model_parallel_size"


@dataclass(frozen=True)
class Recipe:
    """One run. Sections: `megacpp_mcore.recipe.schema`. backends: surface -> backend's name.

    source: the shipped name or the file's absolute path; with `overrides` it loads the recipe
    again. origins: where a key's value came from; keys at their default are not in it.
    """

    name: str
    model: schema.Model
    attention: schema.Attention
    moe: schema.MoE
    mamba3: schema.Mamba3
    m2rnn: M2RNNSettings
    mtp: schema.MTP
    parallel: schema.Parallel
    recompute: RecomputeSettings
    precision: schema.Precision
    optimizer: schema.Optimizer
    schedule: schema.Schedule
    data: schema.Data
    checkpoint: schema.Checkpoint
    launch: schema.Launch
    backends: dict[str, str]
    plan: HybridPlan
    description: str = field(compare=False)
    source: str = field(compare=False)
    overrides: tuple[str, ...] = field(compare=False)
    origins: dict[str, str] = field(compare=False, repr=False)

    def get(self, dotted: str) -> Any:
        """The value of `section.key`; of a surface's backend, None where none is named."""
        section, _, name = dotted.partition(".")
        if section == BACKENDS:
            return self.backends.get(name)
        return getattr(getattr(self, section), name)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Every key of every section, as JSON can hold it (tuples are lists); "auto" names no
        backend."""
        sections = {name: getattr(self, name) for name in schema.SECTIONS}
        content = {name: dataclasses.asdict(section) for name, section in sections.items()}
        named = {surface: name for surface, name in self.backends.items() if name != dispatch.AUTO}
        return json.loads(json.dumps({**content, BACKENDS: named}))

    @property
    def sha256(self) -> str:
        """Hash of the resolved content: neither the file's name nor the order of keys matters."""
        return content_sha256(self.to_dict())

    @property
    def request(self) -> str:
        """The recipe and its overrides as command-line arguments, quoted."""
        words = [self.source]
        for override in self.overrides:
            words += ["--set", override]
        return shlex.join(words)

    @property
    def world_size(self) -> int:
        return self.launch.nnodes * self.launch.nproc_per_node

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the vocabulary as Megatron pads it."""
        unit = self.model.make_vocab_size_divisible_by * self.parallel.tensor_model_parallel_size
        return math.ceil(self.model.vocab_size / unit) * unit

    @property
    def data_parallel_size(self) -> int:
        p = self.parallel
        return self.world_size // (
            p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size
        )


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a shipped recipe by name, or a .toml file by path, with `a.b=value` overrides.

    Raises RecipeError naming the file, the key, the value and what is allowed.
    """
    source, _ = locate(name_or_path)
    settings = read(name_or_path, overrides)
    name = os.path.basename(source).removesuffix(".toml")
    if (
        "model.max_position_embeddings" not in settings.values
        and "model.seq_length" in settings.values
    ):
        seq_length = settings.values["model.seq_length"]
        settings.put("model.max_position_embeddings", seq_length, "as model.seq_length")
    sections = _sections(settings, name)
    recipe = Recipe(
        name=name,
        **sections,
        plan=_plan(name, sections, settings),
        description=settings.description,
        source=source,
        overrides=tuple(overrides),
        origins=dict(settings.origins),
    )
    recipe, refusals = rules.completed(recipe)
    refused = [refusal.text(recipe) for refusal in refusals]
    if len(refused) == 1:
        raise RecipeError(f"recipe {name}: {refused[0]}")
    if refused:
        listed = "".join(f"\n  {line}" for line in refused)
        raise RecipeError(f"recipe {name}: {len(refused)} keys cannot be as asked:{listed}")
    return recipe


def recipe_from_environment() -> Recipe | None:
    """The recipe that MEGACPP_RECIPE names, `NAME_OR_PATH [--set a.b=value ...]`; None if unset.

    Raises RecipeError as `load_recipe` does, and when the variable has another form.
    """
    text = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    if not text:
        return None
    usage = f"{ENVIRONMENT_VARIABLE}={text!r}: expected NAME_OR_PATH [--set SECTION.KEY=VALUE ...]"
    try:
        name, *words = shlex.split(text)
    except ValueError as error:
        raise RecipeError(f"{usage}: {error}") from error
    overrides = []
    while words:
        word = words.pop(0)
        if word == "--set" and words:
            overrides.append(words.pop(0))
        elif word.startswith("--set="):
            overrides.append(word.removeprefix("--set="))
        else:
            raise RecipeError(f"{usage}; cannot read {word!r}")
    return load_recipe(name, overrides)


def _sections(settings: Settings, name: str) -> dict[str, Any]:
    """Section objects from flat values. Raises RecipeError for missing keys."""
    arguments: dict[str, dict[str, Any]] = {section: {} for section in schema.SECTIONS}
    backends: dict[str, str] = {}
    for dotted, value in settings.values.items():
        section, _, key = dotted.partition(".")
        table, _, entry = key.partition(".")
        if section == BACKENDS:
            backends[key] = value
        elif entry:
            arguments[section].setdefault(table, {})[entry] = value
        else:
            arguments[section][key] = value
    missing = [key for key, found in KEYS.items() if found.required and key not in settings.values]
    if missing:
        raise RecipeError(f"recipe {name}: missing keys, without a default: {', '.join(missing)}")
    sections = {section: cls(**arguments[section]) for section, cls in schema.SECTIONS.items()}
    return {**sections, BACKENDS: backends}


def _plan(name: str, sections: dict[str, Any], settings: Settings) -> HybridPlan:
    model, attention, mtp = sections["model"], sections["attention"], sections["mtp"]
    try:
        return translate(
            model.pattern,
            depth=model.depth,
            attention=attention.kind,
            dsa_ranks=attention.dsa_ranks,
            mtp_depths=mtp.mtp_num_layers,
            mtp_pattern=mtp.pattern,
            pp=sections["parallel"].pipeline_model_parallel_size,
            vpp=sections["parallel"].virtual_pipeline_model_parallel_size,
        )
    except PatternError as error:
        asked = ", ".join(
            f"{dotted} = {value!r} ({settings.origins[dotted]})"
            for dotted, value in settings.values.items()
            if dotted == _PIPELINE or (dotted in KEYS and KEYS[dotted].lowers_to is Target.PLAN)
        )
        raise RecipeError(f"recipe {name}: no layer plan from {asked}: {error}") from error
