"""How one rank of a GPU run starts: its recipe, environment, folder and Megatron arguments.

Megatron has no flag for some parts of a recipe, so the recipe is passed in arguments of our own
before Megatron's. Nothing here imports torch: CUDA reads its environment variables at start-up, so
they must be set earlier.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.files import cache_folder
from megacpp_mcore.hybrid import letters
from megacpp_mcore.hybrid.letters import Spec
from megacpp_mcore.recipe import ENVIRONMENT_VARIABLE, Recipe, load_recipe, recipe_from_environment
from megacpp_mcore.recipe.lowering import Lowered, lower
from megacpp_mcore.recipe.source import shipped
from megacpp_mcore.training.environment import apply_environment

RECIPE, SET, OUT = "--megacpp-recipe", "--megacpp-set", "--megacpp-out"
YARDSTICK, PROFILE = "--megacpp-yardstick", "--megacpp-profile"
AFTER = "--megacpp-after"
YARDSTICK_SPEC = Spec("megacpp_mcore.specs.yardstick", "yardstick_stack_spec")


class LaunchError(MegacppError):
    """This process's arguments or environment are not those of a rank of the recipe's run."""


@dataclass(frozen=True)
class Launch:
    """How one rank was started.

    argv: Megatron's arguments. out: the run's folder, for the receipt.
    yardstick: train Megatron's own blocks of the recipe's sizes, with Mamba-2 in the M slot.
    profile: the step whose kernels the receipt lists.
    after: processes of the launcher that compile kernels; the rank builds nothing before they end.
    """

    recipe: Recipe
    lowered: Lowered
    argv: list[str]
    out: Path
    environment: dict[str, dict[str, str]]
    yardstick: bool = False
    profile: int | None = None
    after: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.recipe.name}-yardstick" if self.yardstick else self.recipe.name


def recipe_argv(recipe: Recipe) -> list[str]:
    """Our own arguments that name `recipe`; they precede Megatron's."""
    argv = [RECIPE, recipe.source]
    for override in recipe.overrides:
        argv += [SET, override]
    return argv


def launch(argv: Sequence[str]) -> Launch:
    """Parse our arguments out of `argv`, and set the recipe's environment in this process.

    If no recipe is named, one is inferred when Megatron's arguments equal those of an unmodified
    shipped recipe; rank 0 reports it. Raises LaunchError when no recipe or two different ones are
    named, when the recipe is for the CPU, or when its world size is not torchrun's; RecipeError as
    `load_recipe`.
    """
    parser = parser_of(
        "megacpp_mcore.pretrain",
        "A rank of a run on GPUs; start it with torchrun. All other arguments are Megatron's own: "
        "`megacpp recipe args RECIPE --with-recipe` prints them with ours.",
    )
    parser.add_argument(YARDSTICK, dest="yardstick", action="store_true",
                        help="train Megatron's own blocks instead, to compare with")  # fmt: skip
    parser.add_argument(PROFILE, dest="profile", type=int, metavar="STEP",
                        help="list the kernels of this step in the receipt")  # fmt: skip
    parser.add_argument(AFTER, dest="after", type=_process_ids, default=(), metavar="PID,...",
                        help="build nothing before these processes end")  # fmt: skip
    own, megatron_argv = parser.parse_known_args(argv)
    recipe = _recipe(own.recipe, own.overrides, megatron_argv)
    _check_world(recipe, os.environ)
    check_profile(recipe, own.profile)
    lowered = lower(recipe)
    if not megatron_argv:
        raise LaunchError(
            f"Megatron's arguments for recipe {recipe.name} are missing: pass the output of "
            f"`megacpp recipe args {recipe.request} --with-recipe`"
        )
    if own.yardstick:
        lowered, megatron_argv = _with_yardstick_spec(recipe, lowered, megatron_argv)
    out = Path(own.out or f"runs/{recipe.name}")
    environment = apply_environment(environment_of(recipe, out))
    return Launch(
        recipe, lowered, megatron_argv, out, environment, own.yardstick, own.profile, own.after
    )


def _process_ids(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def check_profile(recipe: Recipe, step: int | None, done: int = 0) -> None:
    """Refuse to profile a step that a run of `recipe` does not do. done: the steps before it, where
    it is resumed. Raises LaunchError."""
    last = recipe.schedule.train_iters
    if step is not None and not done < step <= last:
        raise LaunchError(
            f"step {step} cannot be profiled: the run's steps are {done + 1} to {last} "
            "(schedule.train_iters)"
        )


def parser_of(module: str, description: str) -> argparse.ArgumentParser:
    """Of the arguments that `recipe_argv` makes, and of the run's folder."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, allow_abbrev=False
    )
    parser.add_argument(RECIPE, dest="recipe", metavar="RECIPE", help="the recipe's name or file")
    parser.add_argument(SET, dest="overrides", metavar="A.B=C", action="append", default=[],
                        help="an override of the recipe; may be given again")  # fmt: skip
    parser.add_argument(OUT, dest="out", metavar="DIR",
                        help="folder for receipt.json (default: runs/RECIPE)")  # fmt: skip
    return parser


def environment_of(recipe: Recipe, out: Path, *, say: bool = True) -> dict[str, str]:
    """What a process of a run sets, before torch, where the user has not: the kernel caches and the
    recipe's own. out: the run's folder. say: whether rank 0 says that the caches are in it."""
    return _kernel_caches(out, say) | recipe.launch.environment


def _kernel_caches(out: Path, say: bool) -> dict[str, str]:
    """Caches of compiled kernels and autotuning results, shared by all runs of this user, as the
    compilers' keys have the sources, the versions and the GPU's architecture; in the run's folder
    where the user's cannot be written to.

    Absolute paths, because Inductor's worker processes have other working directories.
    """
    cache = cache_folder().absolute()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):  # os.access knows no full or squashed file system
            pass
    except OSError as error:
        users, cache = cache, out.absolute() / "cache"
        if say and os.environ.get("RANK", "0") == "0":
            print(
                f"megacpp: compiled kernels are kept in {cache}: {users} cannot be written to "
                f"({error.strerror})",
                file=sys.stderr,
            )
    return {
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TRITON_CACHE_AUTOTUNING": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(cache / "flash_attention"),
    }


def _with_yardstick_spec(
    recipe: Recipe, lowered: Lowered, argv: Sequence[str]
) -> tuple[Lowered, list[str]]:
    """The arguments, and their expected values, with the yardstick's spec instead of ours."""
    used = {layer.letter for layer in recipe.plan.layers}
    for letter in used.intersection(letters.without_megatrons_block()):
        raise LaunchError(
            f"{YARDSTICK}: Megatron has no block like {letter}; make the arguments with M in its "
            "place, as `megacpp train RECIPE --gpus N --yardstick` does"
        )
    if recipe.launch.cuda_graph_impl == "full_iteration":
        raise LaunchError(
            f"{YARDSTICK}: Megatron's experts read the tokens of each expert on the host, which a "
            "captured step does not have; set launch.cuda_graph_impl=none"
        )
    argv = list(argv)
    at = argv.index("--spec") if "--spec" in argv else len(argv)
    argv[at : at + 3] = ["--spec", *YARDSTICK_SPEC]
    expected = tuple(
        replace(e, value=tuple(YARDSTICK_SPEC)) if e.name == "spec" else e for e in lowered.expected
    )
    return replace(lowered, expected=expected), argv


def _recipe(name: str | None, overrides: Sequence[str], argv: Sequence[str]) -> Recipe:
    inherited = recipe_from_environment()
    if name is None:
        if overrides:
            raise LaunchError(f"{SET} {overrides[0]} changes a recipe, but {RECIPE} names none")
        if inherited is not None:
            return inherited
        found = shipped_recipe_of(argv)
        if found is None:
            raise LaunchError(
                "no recipe is named, and the arguments are not those of an unmodified shipped "
                f"recipe. Pass the output of `megacpp recipe args RECIPE --with-recipe`, which "
                f"begins with {RECIPE}, or export {ENVIRONMENT_VARIABLE}"
            )
        if os.environ.get("RANK", "0") == "0":
            print(
                "megacpp: no recipe is named; the arguments are those of the shipped recipe "
                f"{found.name}, which is trained",
                file=sys.stderr,
            )
        return found
    recipe = load_recipe(name, overrides)
    if inherited is not None and inherited.sha256 != recipe.sha256:
        raise LaunchError(
            f"{RECIPE} asks for {recipe.request!r} and {ENVIRONMENT_VARIABLE} for "
            f"{inherited.request!r}: unset the variable, or set both to the same recipe"
        )
    return recipe


def shipped_recipe_of(argv: Sequence[str]) -> Recipe | None:
    """The shipped recipe whose Megatron arguments `argv` begins with, or None.

    Arguments after those are checked against the recipe like any others. Arguments do not carry all
    of a recipe; `megacpp recipe args` refuses to print the same ones for a different recipe.
    """
    recipes = [(recipe, lower(recipe).argv) for recipe in map(load_recipe, shipped())]
    found = [recipe for recipe, its_argv in recipes if list(argv[: len(its_argv)]) == its_argv]
    return found[0] if len(found) == 1 else None


def _check_world(recipe: Recipe, environment: Mapping[str, str]) -> None:
    if recipe.launch.device != "cuda":
        raise LaunchError(
            f'recipe {recipe.name} has launch.device = "{recipe.launch.device}": run it with '
            f"`megacpp train {recipe.request}`"
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
            f"torchrun started {world} ranks, recipe {recipe.name} is for {recipe.launch.nnodes} x "
            f"{recipe.launch.nproc_per_node}: make the recipe's arguments with "
            f"`--set launch.nproc_per_node=N`"
        )


def check_agreement(launch: Launch, args: Any) -> None:
    """Refuse Megatron arguments whose values are not the recipe's.

    args: Megatron's validated namespace. Raises LaunchError, which names every differing value.
    """
    from megacpp_mcore.recipe.check import compare

    differing = [row for row in compare(launch.lowered, args) if not row.ok]
    if differing:
        listed = "; ".join(
            f"{row.key} is {row.requested!r}, Megatron has {row.name} = {row.got!r}"
            for row in differing
        )
        raise LaunchError(
            f"Megatron's arguments are not those of recipe {launch.recipe.name}: {listed}. Make "
            f"them with `megacpp recipe args {launch.recipe.request} --with-recipe`, and change a "
            "value with --set there"
        )
