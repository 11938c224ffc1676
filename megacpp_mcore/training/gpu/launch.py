"""What one process of a GPU run is told: the recipe, its environment, where the receipt goes.

The recipe travels beside Megatron's words in arguments of our own, because Megatron has no flag for
all of it. Nothing here imports torch: variables that CUDA reads as it starts are set before it.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.hybrid import letters
from megacpp_mcore.hybrid.letters import Spec
from megacpp_mcore.recipe import ENVIRONMENT_VARIABLE, Recipe, load_recipe, recipe_from_environment
from megacpp_mcore.recipe.lowering import Lowered, lower
from megacpp_mcore.recipe.source import shipped
from megacpp_mcore.training.environment import apply_environment

RECIPE, SET, OUT = "--megacpp-recipe", "--megacpp-set", "--megacpp-out"
YARDSTICK = "--megacpp-yardstick"
YARDSTICK_SPEC = Spec("megacpp_mcore.specs.yardstick", "yardstick_stack_spec")


class LaunchError(MegacppError):
    """The process was not started as a rank of the recipe's run."""


@dataclass(frozen=True)
class Launch:
    """argv: the words for Megatron. out: the run's folder, for receipt and compiled kernels.

    yardstick: Megatron's own blocks of the recipe's sizes instead of ours, Mamba-2 in the M slot.
    triton_cache_entries: what Triton's cache held as the process started; 0 for a cold start.
    """

    recipe: Recipe
    lowered: Lowered
    argv: list[str]
    out: Path
    environment: dict[str, dict[str, str]]
    yardstick: bool = False
    triton_cache_entries: int = 0

    @property
    def name(self) -> str:
        return f"{self.recipe.name}-yardstick" if self.yardstick else self.recipe.name


def recipe_words(recipe: Recipe) -> list[str]:
    """Our own arguments that name `recipe`; they stand before Megatron's words."""
    words = [RECIPE, recipe.source]
    for override in recipe.overrides:
        words += [SET, override]
    return words


def launch(argv: Sequence[str]) -> Launch:
    """Read our arguments out of `argv`, and set the recipe's environment in this process.

    Words that are a shipped recipe's as it stands need no other name for it; rank 0 says so. Raises
    LaunchError when no recipe or two are named, the recipe is for the CPU, or the world is not the
    one that torchrun made; RecipeError as `load_recipe`.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megacpp_mcore.pretrain",
        description="A rank of a run on GPUs; start it with torchrun. All other arguments are "
        "Megatron's own: `megacpp recipe args RECIPE --with-recipe` prints them with ours.",
        allow_abbrev=False,
    )
    parser.add_argument(RECIPE, dest="recipe", metavar="RECIPE", help="the recipe's name or file")
    parser.add_argument(SET, dest="overrides", metavar="A.B=C", action="append", default=[],
                        help="an override of the recipe; may be given again")  # fmt: skip
    parser.add_argument(OUT, dest="out", metavar="DIR",
                        help="folder for receipt.json (default: runs/RECIPE)")  # fmt: skip
    parser.add_argument(YARDSTICK, dest="yardstick", action="store_true",
                        help="train Megatron's own blocks instead, to compare with")  # fmt: skip
    own, words = parser.parse_known_args(argv)
    recipe = _recipe(own.recipe, own.overrides, words)
    _check_world(recipe, os.environ)
    lowered = lower(recipe)
    if not words:
        raise LaunchError(
            f"Megatron's words of recipe {recipe.name} are missing: pass the output of "
            f"`megacpp recipe args {recipe.request} --with-recipe`"
        )
    if own.yardstick:
        lowered, words = _on_megatrons_blocks(recipe, lowered, words)
    out = Path(own.out or f"runs/{recipe.name}")
    os.environ[ENVIRONMENT_VARIABLE] = recipe.request  # the layers and the spec read it
    environment = apply_environment(_cache_folders(out) | recipe.launch.environment)
    cached = Path(os.environ["TRITON_CACHE_DIR"])
    entries = len(os.listdir(cached)) if cached.is_dir() else 0
    return Launch(recipe, lowered, words, out, environment, own.yardstick, entries)


def _cache_folders(out: Path) -> dict[str, str]:
    """Where compiled kernels and the winners of searches stay: a run that goes on compiles nothing.

    Absolute, because Inductor's worker processes have other working directories.
    """
    cache = out.absolute() / "cache"
    return {
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TRITON_CACHE_AUTOTUNING": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
    }


def _on_megatrons_blocks(
    recipe: Recipe, lowered: Lowered, words: Sequence[str]
) -> tuple[Lowered, list[str]]:
    """The words and what is expected of them, with the yardstick's spec for ours."""
    used = {layer.letter for layer in recipe.plan.layers}
    for letter in used.intersection(letters.without_megatrons_block()):
        raise LaunchError(
            f"{YARDSTICK}: Megatron has no block like {letter}; make the words with M in its "
            "place, as `megacpp train RECIPE --gpus N --yardstick` does"
        )
    words = list(words)
    at = words.index("--spec") if "--spec" in words else len(words)
    words[at : at + 3] = ["--spec", *YARDSTICK_SPEC]
    expected = tuple(
        replace(e, value=tuple(YARDSTICK_SPEC)) if e.name == "spec" else e for e in lowered.expected
    )
    return replace(lowered, expected=expected), words


def _recipe(name: str | None, overrides: Sequence[str], words: Sequence[str]) -> Recipe:
    inherited = recipe_from_environment()
    if name is None:
        if overrides:
            raise LaunchError(f"{SET} {overrides[0]} changes a recipe, but {RECIPE} names none")
        if inherited is not None:
            return inherited
        found = shipped_recipe_of(words)
        if found is None:
            raise LaunchError(
                "no recipe: the words are no shipped recipe's as it stands. Pass those of `megacpp "
                f"recipe args RECIPE --with-recipe`, which begin with {RECIPE}, or export "
                f"{ENVIRONMENT_VARIABLE}"
            )
        if os.environ.get("RANK", "0") == "0":
            print(
                f"megacpp: no recipe is named; the words are those of {found.name} as it is "
                "shipped, which is trained",
                file=sys.stderr,
            )
        return found
    recipe = load_recipe(name, overrides)
    if inherited is not None and inherited.sha256 != recipe.sha256:
        raise LaunchError(
            f"{RECIPE} asks for {recipe.request!r} and {ENVIRONMENT_VARIABLE} for "
            f"{inherited.request!r}: unset the variable, or make both the same"
        )
    return recipe


def shipped_recipe_of(words: Sequence[str]) -> Recipe | None:
    """The one whose words these begin with; what follows is held to it as any other word is.

    Words do not hold all that a recipe says: `megacpp recipe args` prints these for no other one.
    """
    recipes = [(recipe, lower(recipe).argv) for recipe in map(load_recipe, shipped())]
    found = [recipe for recipe, argv in recipes if list(words[: len(argv)]) == argv]
    return found[0] if len(found) == 1 else None


def _check_world(recipe: Recipe, environment: Mapping[str, str]) -> None:
    if recipe.launch.device != "cuda":
        raise LaunchError(
            f'recipe {recipe.name} has launch.device = "{recipe.launch.device}": run it with '
            f"`megacpp train {recipe.name}`"
        )
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if absent := [name for name in names if name not in environment]:
        raise LaunchError(
            f"{', '.join(absent)} not set: start the ranks with `torchrun --nproc-per-node N -m "
            "megacpp_mcore.pretrain ...`"
        )
    world = environment["WORLD_SIZE"]
    if world != str(recipe.world_size):
        raise LaunchError(
            f"torchrun made {world} ranks, recipe {recipe.name} is for {recipe.launch.nnodes} x "
            f"{recipe.launch.nproc_per_node}: make the recipe's words with "
            f"`--set launch.nproc_per_node=N`"
        )


def check_agreement(launch: Launch, args: Any) -> None:
    """Refuse Megatron arguments that are not what the recipe asks for.

    args: Megatron's validated namespace. Raises LaunchError naming every value that differs.
    """
    from megacpp_mcore.recipe.check import compare

    differing = [row for row in compare(launch.lowered, args) if not row.ok]
    if differing:
        listed = "; ".join(
            f"{row.key} is {row.requested!r}, Megatron has {row.name} = {row.got!r}"
            for row in differing
        )
        raise LaunchError(
            f"Megatron's words are not those of recipe {launch.recipe.name}: {listed}. Make them "
            f"with `megacpp recipe args {launch.recipe.request} --with-recipe`, and change a value "
            "there"
        )
