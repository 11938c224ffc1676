"""`megacpp recipe new` and `megacpp recipe diff`: begin a recipe of your own, compare two."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megacpp_mcore.commands.parser import add_overrides
from megacpp_mcore.files import write_atomically
from megacpp_mcore.recipe import Recipe, load_recipe
from megacpp_mcore.recipe.changes import changed_keys
from megacpp_mcore.recipe.notes import facts
from megacpp_mcore.recipe.source import KEYS, RecipeError, read, split_override

NEW_EPILOG = """\
The file extends RECIPE: what it does not say is RECIPE's. It lists the keys that are changed first,
commented out with RECIPE's values; those given with --set are in force.

examples:
  megacpp recipe new mine.toml
  megacpp recipe new big.toml --extends nam56r --set schedule.train_iters=2000
"""
DIFF_EPILOG = """\
A receipt (.json) stands for the recipe that it is of.

exit status: 0 the same, 1 different, 2 refused.

examples:
  megacpp recipe diff nam56r nam56r-quarter
  megacpp recipe diff mine.toml runs/mine/receipt.json
"""
_FIRST = (
    "model.pattern", "model.depth", "model.hidden_size", "model.num_attention_heads",
    "model.vocab_size", "model.seq_length", "moe.num_experts", "moe.moe_ffn_hidden_size",
    "optimizer.lr", "schedule.train_iters", "schedule.micro_batch_size",
    "schedule.global_batch_size", "schedule.lr_warmup_iters", "schedule.eval_interval",
    "schedule.log_interval", "data.data_path", "data.split", "checkpoint.save_interval",
)  # fmt: skip


def add_new_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.toml", help="written; must not exist")
    parser.add_argument("--extends", default="cpu-base", metavar="RECIPE",
        help="a shipped name or a path (default: cpu-base)")  # fmt: skip
    add_overrides(parser, "a key of the new recipe; may be given again")


def new(args: argparse.Namespace) -> int:
    """Write the file and print what to do with it."""
    if args.file.suffix != ".toml":
        raise RecipeError(f"{args.file}: a recipe's file ends in .toml")
    if os.path.exists(args.file):
        raise RecipeError(f"{args.file} exists: name another file")
    recipe = load_recipe(args.extends, args.overrides)  # refuses what cannot be
    parent = args.extends
    if parent.endswith(".toml") or "/" in parent:
        parent = str(Path(parent).resolve())
    try:
        args.file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.file, _text(recipe, parent, args.extends, args.overrides))
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        raise RecipeError(f"cannot write {args.file}: {error}") from error
    try:
        if load_recipe(str(args.file)).to_dict() != recipe.to_dict():
            raise RecipeError(f"{args.file} does not say all of --set; write those keys by hand")
    except RecipeError:
        args.file.unlink()
        raise
    print(f"wrote {args.file}, which extends {args.extends}")
    lane = "" if recipe.launch.device == "cpu" else " --gpus N"
    print(f"next: megacpp recipe check {args.file} && megacpp train {args.file}{lane}")
    return 0


def _text(recipe: Recipe, parent: str, extends: str, overrides: Sequence[str]) -> str:
    notes = {fact.key: fact.note for fact in facts()}
    settings = read(extends, overrides)
    given = {key: value for key, value in settings.values.items() if settings.is_override(key)}
    unset = [key for key, value in map(split_override, overrides) if value == "null"]
    lines = [f'description = "what it is for"\nextends = {json.dumps(parent)}']
    if unset:
        lines.append(f"unset = {json.dumps(unset)}")
    lines.append(
        f"\n# Commented out: the keys that are changed first, as {recipe.name} has them.\n"
        "# Every key: megacpp recipe keys. What this file becomes: megacpp recipe show FILE."
    )
    tables: dict[str, list[str]] = {}
    for dotted in (key for key in KEYS if key in given or key in _FIRST):
        value = given.get(dotted, recipe.get(dotted))
        written = "" if value is None else json.dumps(value, ensure_ascii=False)
        note = f"  # {notes[dotted]}" if notes[dotted] else ""
        line = f"{'' if dotted in given else '# '}{KEYS[dotted].name} = {written}{note}"
        tables.setdefault(KEYS[dotted].section, []).append(line)
    for dotted in (key for key in given if key not in KEYS):  # entries of tables
        table, _, entry = dotted.rpartition(".")
        line = f"{entry} = {json.dumps(given[dotted], ensure_ascii=False)}"
        tables.setdefault(table, []).append(line)
    for table, entries in tables.items():
        lines.append("\n".join([f"\n[{table}]", *entries]))
    return "\n".join(lines) + "\n"


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="a recipe, or a run's receipt")
    parser.add_argument("--json", action="store_true", help='as JSON: {"key": [A, B]}')


def diff(args: argparse.Namespace) -> int:
    """Print every key that differs. Returns 1 if one does."""
    changed = changed_keys(_content(args.a), _content(args.b))
    if args.json:
        print(json.dumps(changed, indent=2))
        return 1 if changed else 0
    rows = [("key", "A", "B")]
    rows += [(key, *(json.dumps(value, ensure_ascii=False) for value in pair))
             for key, pair in changed.items()]  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for row in rows if changed else []:
        print(f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}")
    if not changed:
        print("the same")
    return 1 if changed else 0


def _content(name: str) -> dict[str, Any]:
    if not name.endswith(".json"):
        return load_recipe(name).to_dict()
    from megacpp_mcore import receipts

    recipe = receipts.read(name)["recipe"]
    if recipe is None:
        raise RecipeError(f"{name}: a receipt without a recipe")
    return recipe["content"]
