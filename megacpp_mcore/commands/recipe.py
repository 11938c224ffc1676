"""`megacpp recipe`: list, show and begin recipes, their keys, and Megatron's command line."""

import argparse
import dataclasses
import json
import shlex
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from megacpp_mcore.commands import recipe_check, recipe_new, recipe_plan
from megacpp_mcore.commands.parser import add_overrides
from megacpp_mcore.hybrid.flops import count
from megacpp_mcore.recipe import Recipe, load_recipe
from megacpp_mcore.recipe.fields import Target
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.recipe.notes import facts
from megacpp_mcore.recipe.schema import SECTIONS
from megacpp_mcore.recipe.source import KEYS, RecipeError, shipped

_ARGS_EPILOG = """\
By default only Megatron's arguments are printed, but Megatron has no flag for some recipe keys.
Pass the whole recipe in one of two ways:
  --env          for Megatron-LM's pretrain_hybrid.py: also exports MEGACPP_RECIPE
  --with-recipe  for `python -m megacpp_mcore.pretrain`: puts --megacpp-recipe before the arguments
megacpp_mcore.pretrain also recognises the bare arguments of a shipped recipe without --set. If a
changed recipe has the same arguments as a shipped one, one of the two options is required.

formats:
  shell  one line, quoted: to copy and paste, and for $(...) if no argument needs quotes
         (a pattern with * or | does; a note on stderr says so)
  lines  one argument per line, unquoted: for `mapfile -t`, and for $(...)
  json   {"argv": [...]}, with --env also {"environment": {...}}

examples:
  torchrun --nproc-per-node 8 -m megacpp_mcore.pretrain \\
    $(megacpp recipe args nam56r --with-recipe)

  eval "$(megacpp recipe args nam56r --env)"
  torchrun pretrain_hybrid.py "${MEGATRON_ARGS[@]}"

  megacpp recipe args nam56r --format lines
  megacpp recipe args nam56r --set schedule.lr_decay_style=WSD --set schedule.lr_wsd_decay_iters=500
"""


_KEYS_EPILOG = """\
examples:
  megacpp recipe keys
  megacpp recipe keys schedule
"""
_WIDTH = 110


def register(subparsers: Any) -> None:
    """Add `recipe` with its own commands."""
    recipe = subparsers.add_parser("recipe", help="list, show, check, plan and lower recipes")
    commands = recipe.add_subparsers(title="commands", metavar="COMMAND", required=True)

    listed = commands.add_parser("list", help="the shipped recipes")
    listed.add_argument("--json", action="store_true", help="as a JSON list")
    listed.set_defaults(run=_list)

    keys = commands.add_parser(
        "keys",
        help="every key of a recipe: what it takes, its default, where it goes",
        description="Every key of a recipe, or those of SECTION: what it takes, its default, where "
        "it goes, and a note on what is ours. What a Megatron flag means is in Megatron's --help.",
        epilog=_KEYS_EPILOG,
    )
    keys.add_argument("section", metavar="SECTION", nargs="?", choices=[*SECTIONS],
        help=f"one of {', '.join(SECTIONS)}")  # fmt: skip
    keys.add_argument("--json", action="store_true", help="as a JSON list")
    keys.set_defaults(run=_keys)

    text = "the resolved recipe, and what each key is lowered to"
    show = _add_with_recipe(commands, "show", _show, text)
    show.add_argument("--all", action="store_true", help="also the keys with default values")
    show.add_argument(
        "--json", action="store_true", help="every key, name, sha256 and cost as JSON"
    )

    text = "would it train, and does Megatron's own parser read it as it is meant"
    checked = _add_with_recipe(
        commands, "check", recipe_check.run, text, recipe_check.EPILOG, many=True
    )
    recipe_check.add_arguments(checked)

    text = "begin a recipe of your own, from a shipped one"
    new = _add(commands, "new", recipe_new.new, text, recipe_new.NEW_EPILOG)
    recipe_new.add_new_arguments(new)

    text = "the keys in which two recipes differ"
    diff = _add(commands, "diff", recipe_new.diff, text, recipe_new.DIFF_EPILOG)
    recipe_new.add_diff_arguments(diff)

    text = "the fastest layouts on a number of GPUs, with memory and step"
    planned = _add_with_recipe(commands, "plan", recipe_plan.run, text, recipe_plan.EPILOG)
    recipe_plan.add_arguments(planned)

    args = _add_with_recipe(commands, "args", _args, "Megatron's command line", _ARGS_EPILOG)
    args.add_argument("--format", choices=("shell", "lines", "json"), default="shell")
    carrier = args.add_mutually_exclusive_group()
    carrier.add_argument(
        "--env",
        action="store_true",
        help="also the environment; in the shell format as exports, with argv in MEGATRON_ARGS",
    )
    carrier.add_argument(
        "--with-recipe",
        action="store_true",
        help="put --megacpp-recipe first, for `python -m megacpp_mcore.pretrain`",
    )


def _add(commands: Any, name: str, run: Any, text: str, epilog: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=text, description=text, epilog=epilog, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


def _add_with_recipe(
    commands: Any, name: str, run: Any, text: str, epilog: str = "", *, many: bool = False
) -> argparse.ArgumentParser:
    parser = _add(commands, name, run, text, epilog)
    parser.add_argument(
        "recipe",
        nargs="+" if many else None,
        metavar="RECIPE",
        help="a shipped recipe's name, or the path of a .toml file",
    )
    add_overrides(parser, "override one key, or unset it with null; may be given again")
    return parser


def _list(args: argparse.Namespace) -> int:
    recipes = [load_recipe(name) for name in shipped()]
    if args.json:
        rows = [{"name": r.name, "description": r.description, "sha256": r.sha256} for r in recipes]
        print(json.dumps(rows, indent=2))
        return 0
    width = max(len(recipe.name) for recipe in recipes)
    for recipe in recipes:
        print(f"{recipe.name:{width}}  {recipe.description}")
    return 0


def _keys(args: argparse.Namespace) -> int:
    known = [f for f in facts() if args.section in (None, f.key.partition(".")[0])]
    if args.json:
        print(json.dumps([dataclasses.asdict(fact) for fact in known], indent=2))
        return 0
    width = max(len(fact.key) for fact in known)
    for fact in known:
        default = "required" if fact.required else f"default {fact.default or 'unset'}"
        words = [f"{fact.takes}; {default}; {fact.goes_to}", *([fact.note] if fact.note else [])]
        print(textwrap.fill(
            ". ".join(words), _WIDTH, initial_indent=f"{fact.key:<{width}}  ",
            subsequent_indent=" " * (width + 2), break_on_hyphens=False,
        ))  # fmt: skip
    return 0


def _show(args: argparse.Namespace) -> int:
    recipe = load_recipe(args.recipe, args.overrides)
    if args.json:
        cost = count(recipe)
        about = {
            "name": recipe.name,
            "sha256": recipe.sha256,
            "description": recipe.description,
            "parameters": cost.parameters,
            "active_parameters": cost.active,
            "flops_per_token": {"forward": cost.forward, "training": cost.training},
        }
        print(json.dumps({**about, "recipe": recipe.to_dict()}, indent=2))
    else:
        print("\n".join(_toml(recipe, everything=args.all)))
    return 0


def _toml(recipe: Recipe, everything: bool) -> Iterator[str]:
    """The recipe as a TOML file that loads to the same values, with each key's target."""
    yield f"# {recipe.name}  sha256 {recipe.sha256}"
    yield f"# {recipe.plan.megatron_pattern}"
    cost = count(recipe)
    yield (
        f"# {cost.parameters:,} parameters, {cost.active:,} of them active; a token costs "
        f"{cost.forward / 1e9:.4g} GFLOP forward, {cost.training / 1e9:.4g} with its gradients"
    )
    if recipe.description:
        yield f"description = {json.dumps(recipe.description, ensure_ascii=False)}"
    section, tables = "", []
    for dotted, key in KEYS.items():
        value = recipe.get(dotted)
        if isinstance(value, dict):
            tables.append((dotted, value))
        elif value is not None and (everything or dotted in recipe.origins):
            if key.section != section:
                section = key.section
                yield f"\n[{section}]"
            goes = key.lowers_to.value if isinstance(key.lowers_to, Target) else key.flag
            origin = recipe.origins.get(dotted, "default").rpartition("/")[2]
            line = f"{key.name} = {json.dumps(value, ensure_ascii=False)}"
            yield f"{line:<56} # {goes} ({origin})"
    for name, table in [*tables, ("backends", recipe.backends)]:
        if table:
            yield f"\n[{name}]"
            yield from (f"{entry} = {json.dumps(text)}" for entry, text in table.items())


def _args(args: argparse.Namespace) -> int:
    from megacpp_mcore.training.gpu.rank_setup import recipe_argv

    recipe = load_recipe(args.recipe, args.overrides)
    lowered = lower(recipe)
    if not (args.env or args.with_recipe):
        _check_bare_argv(recipe, lowered.argv)
    environment = lowered.environment if args.env else {}
    argv = [*recipe_argv(recipe), *lowered.argv] if args.with_recipe else lowered.argv
    if args.format == "json":
        print(json.dumps({"argv": argv} | ({"environment": environment} if args.env else {})))
    elif args.format == "lines":
        print("\n".join(_lines(argv, environment)))
    else:
        _print_shell(argv, environment)
    return 0


def _check_bare_argv(recipe: Recipe, argv: list[str]) -> None:
    """Refuse arguments from which megacpp_mcore.pretrain would infer another, shipped recipe."""
    from megacpp_mcore.training.gpu.rank_setup import shipped_recipe_of

    known = shipped_recipe_of(argv)
    if known is not None and known.sha256 != recipe.sha256:
        raise RecipeError(
            f"the arguments of {recipe.request} are the same as those of the shipped recipe "
            f"{known.name}: Megatron has no flag for the keys that differ, so they would be lost. "
            "Add --with-recipe, for `python -m megacpp_mcore.pretrain`, or --env, for "
            "Megatron-LM's pretrain_hybrid.py"
        )


def _lines(argv: list[str], environment: dict[str, str]) -> list[str]:
    lines = [*(f"{name}={value}" for name, value in environment.items()), *argv]
    for line in lines:
        if "\n" in line:
            raise RecipeError(f"{line!r} has a line break; use --format json")
    return lines


def _print_shell(argv: list[str], environment: dict[str, str]) -> None:
    for name, value in environment.items():
        print(f"export {name}={shlex.quote(value)}")
    if environment:
        print(f"MEGATRON_ARGS=({shlex.join(argv)})")
        return
    print(shlex.join(argv))
    quoted = [argument for argument in argv if shlex.quote(argument) != argument]
    if quoted:
        print(
            f"megacpp: quoted for the shell: {', '.join(quoted)}. $(...) does not remove quotes: "
            "use eval, --env, or --format lines",
            file=sys.stderr,
        )
