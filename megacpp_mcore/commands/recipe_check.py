"""`megacpp recipe check`: would this recipe train, and does Megatron read it correctly."""

import argparse
import json
import sys
from typing import Any

from megacpp_mcore.recipe import load_recipe
from megacpp_mcore.recipe.check import Report

EPILOG = """\
First what the run itself would refuse: keys that the lane does not support, packages, patches,
backends, a dataset of another vocabulary. Then Megatron's own parser and validation read the
lowered command line, in a process of their own, and every value is compared with the recipe's.
Their answer is kept in the user's cache folder, by the command line and the versions, so that a
second check takes a moment.

exit status: 0 the recipe would train, 2 it would not, with the reason on stderr.

examples:
  megacpp recipe check nam56r --set parallel.expert_model_parallel_size=4
  megacpp recipe check my.toml -v
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", help="print every value")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    parser.add_argument("--no-cache", action="store_true", help="ask Megatron anew")


def run(args: argparse.Namespace) -> int:
    """Check every recipe. Returns 0, or 2 when one would not train."""
    from megacpp_mcore.recipe.check import check
    from megacpp_mcore.training import ready

    recipes = [load_recipe(name, args.overrides) for name in args.recipe]
    verdicts = [ready.verdict(recipe) for recipe in recipes]
    asked = [r for r, (refusals, _) in zip(recipes, verdicts, strict=True) if not refusals]
    answers = iter(check(asked, cached=not args.no_cache) if asked else [])
    reports = [None if refusals else next(answers) for refusals, _ in verdicts]
    if args.json:
        rows = zip(recipes, reports, verdicts, strict=True)
        print(json.dumps([_document(r.name, report, *said) for r, report, said in rows], indent=2))
    else:
        for report, (refusals, notes) in zip(reports, verdicts, strict=True):
            for note in notes:
                print(f"note: {note}")
            for refusal in refusals:
                print(f"megacpp: {refusal}", file=sys.stderr)
            if report is not None:
                _print(report, args.verbose)
    return 0 if all(report is not None and report.ok for report in reports) else 2


def _document(
    name: str, report: Report | None, refusals: list[str], notes: list[str]
) -> dict[str, Any]:
    document = {
        "recipe": name, "ok": report is not None and report.ok, "refused": refusals,
        "notes": notes, "megatron": None, "refused_by_megatron": None, "values": [],
    }  # fmt: skip
    if report is not None:
        values = [vars(row) | {"ok": row.ok} for row in report.rows]
        document |= {"megatron": report.megatron_version, "refused_by_megatron": report.refused,
                     "values": values}  # fmt: skip
    return document


def _print(report: Report, verbose: bool) -> None:
    for row in _table(report, verbose):
        print(row)
    verdict = f"every value as asked ({len(report.rows)} values)"
    if report.refused:
        verdict = f"refused: {report.refused}"
    elif report.differences:
        keys = ", ".join(row.key for row in report.differences)
        verdict = f"{len(report.differences)} of {len(report.rows)} values differ: {keys}"
    print(
        f"{report.recipe}, Megatron {report.megatron_version}: {verdict}",
        file=sys.stdout if report.ok else sys.stderr,
    )


def _table(report: Report, verbose: bool) -> list[str]:
    """The values that differ; with verbose all of them."""
    shown = report.rows if verbose else report.differences
    if not shown:
        return []
    rows = [("key", "Megatron's name", "requested", "Megatron got", "")]
    for row in shown:
        values = (json.dumps(row.requested), json.dumps(row.got))
        rows.append((row.key, row.name, *values, "ok" if row.ok else "DIFFERS"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip()
        for row in rows
    ]
