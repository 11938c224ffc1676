"""`megacpp catalog`: which backend serves each surface on this machine, and why others do not."""

import argparse
import itertools
import json
import textwrap
from typing import Any

_WIDTH = 100
_DETAILS = (
    ("removes", "removes"),
    ("layout", "layout"),
    ("dtypes", "dtypes"),
    ("fallback", "fallback"),
    ("tests", "tests"),
    ("skips", "skips"),
    ("figures", "measured"),
    ("receipt", "receipt"),
    ("no_receipt", "no receipt"),
    ("before", "comes before"),
    ("exit_when", "leaves when"),
)


def register(subparsers: Any) -> None:
    """Add `catalog`."""
    parser = subparsers.add_parser(
        "catalog",
        help="which backend serves each surface here, and why the others do not",
        description="The kernel catalog on this machine, for the layers of a recipe. "
        "Exit status 1 when no backend can serve a surface of the recipe as requested.",
    )
    parser.add_argument("--surface", metavar="S", help="show only this surface, with all details")
    parser.add_argument(
        "--problem", metavar="RECIPE",
        help="recipe with the sizes (default: MEGACPP_RECIPE, else nam56r)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print all details as a JSON list")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the catalog. Returns 0 if every surface of the recipe is served, else 1."""
    from megacpp_mcore import catalog
    from megacpp_mcore.recipe import load_recipe, recipe_from_environment
    from megacpp_mcore.surfaces.workload import current_device

    if args.problem:
        recipe = load_recipe(args.problem)
    else:
        recipe = recipe_from_environment() or load_recipe("nam56r")
    device = current_device()
    rows = catalog.here_and_now(recipe, device, args.surface)
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        print(f"{recipe.name} on {device}")
        for surface, group in itertools.groupby(rows, lambda row: row["surface"]):
            _print_surface(surface, list(group), in_full=args.surface is not None)
    asked = {row["surface"] for row in rows if row["problem"] is not None}
    return 0 if asked == {row["surface"] for row in rows if row["serves"]} else 1


def _print_surface(surface: str, rows: list[dict[str, Any]], in_full: bool) -> None:
    problem, requested = rows[0]["problem"], rows[0]["requested"]
    unserved = problem is not None and not any(row["serves"] for row in rows)
    print(f"\n{surface}{f': NOTHING SERVES, {requested} is requested' if unserved else ''}")
    if in_full and problem is not None:
        sizes = " ".join(f"{name}={value}" for name, value in problem.items())
        print(f"  {requested} requested for {sizes}")
    for row in rows:
        mark = "serves" if row["serves"] else "-"
        head = f"  {mark:<6}  {row['backend']:<16} {row['role']:<12} "
        reason = row["reason"]
        if row["serves"] and requested == "auto":
            reason = "the first that can"  # the other rows have their own reasons
        print(textwrap.fill(reason, _WIDTH, initial_indent=head, subsequent_indent=" " * 38))
        if in_full:
            _print_details(row)


def _print_details(row: dict[str, Any]) -> None:
    print(f"    {'blocks':<12} {row['blocks'] or 'none: the head'}")
    for key, title in _DETAILS:
        value = row[key]
        if isinstance(value, tuple | list):
            value = ("; " if key == "figures" else ", ").join(value)
        if isinstance(value, dict):
            value = "; ".join(f"{name}: {why}" for name, why in value.items())
        if value:
            print(textwrap.fill(value, _WIDTH, initial_indent=f"    {title:<12} ",
                                subsequent_indent=" " * 17))  # fmt: skip
