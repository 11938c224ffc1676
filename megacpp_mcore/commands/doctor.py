"""`megacpp doctor`: check this machine's software stack."""

import argparse
import dataclasses
import json
import textwrap
from typing import Any

_WIDTH = 100


def register(subparsers: Any) -> None:
    """Add `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine's stack: versions and known traps",
        description="Compare versions with the pinned stack, and look for every known trap; each "
        "finding has a remedy. Exit status 1 when something would make a run fail on this machine.",
    )
    parser.add_argument(
        "--recipe", help="also check the patches that this recipe needs (default: MEGACPP_RECIPE)"
    )
    parser.add_argument("--json", action="store_true", help="print the checks as a JSON list")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine this machine and print the checks. Returns 1 when a check fails."""
    from megacpp_mcore import stack
    from megacpp_mcore.recipe import load_recipe, patch_needs, recipe_from_environment
    from megacpp_mcore.stack import doctor, facts

    recipe = load_recipe(args.recipe) if args.recipe else recipe_from_environment()
    needs = None if recipe is None else patch_needs.needed(recipe)
    checks = doctor.examine(facts.gather(), needs)
    if args.json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    else:
        for check in checks:
            _print(check)
        counts = [
            f"{sum(check.status == status for check in checks)} {status}"
            for status in (stack.OK, stack.WARN, stack.FAIL, stack.NOT_APPLICABLE)
        ]
        print(", ".join(counts))
    return 1 if any(check.status == stack.FAIL for check in checks) else 0


def _print(check: Any) -> None:
    status = "-" if check.status == "not applicable" else check.status
    head = f"{status:<5} {check.name:<25} "
    print(textwrap.fill(check.found, _WIDTH, initial_indent=head, subsequent_indent=" " * 32))
    if check.remedy:
        print(textwrap.fill(check.remedy, _WIDTH, initial_indent=" " * 32 + "do: ",
                            subsequent_indent=" " * 36))  # fmt: skip
