"""`megacpp translate`: what a source pattern becomes in Megatron, or why it cannot."""

import argparse
import json
import shlex
import textwrap
from collections.abc import Iterable
from itertools import zip_longest

from megacpp_mcore.hybrid import letters
from megacpp_mcore.hybrid.pattern import ATTENTION, TARGETS, translate
from megacpp_mcore.hybrid.plan import HybridPlan, Layer

_EPILOG = """\
letters: {letters}; | separates pipeline segments.
A pattern without | is tiled to the depth; with | its segments must add up to it.
Quote a pattern with | for the shell.

examples:
  megacpp translate AEMEAEMEAEMR --depth 52
  megacpp translate AEMEAEMEAEMR --depth 52 --attention mla --dsa-ranks 5,9,13
  megacpp translate AEMEAEMEAEMR --depth 48 --pp 4 --mtp-depths 1 --mtp-pattern AE
  megacpp translate 'AEME|AEMEAEMR' --pp 2
"""
_NATIVE_SPEC = "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"


def register(subparsers) -> None:
    parser = subparsers.add_parser(
        "translate",
        help="translate a source pattern to Megatron's",
        description="Show what a source pattern becomes in Megatron, or why it cannot.",
        epilog=_EPILOG.format(letters=", ".join(f"{e.letter} {e.title}" for e in letters.known())),
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("pattern", metavar="PATTERN", help="source pattern, upper or lower case")
    add("--depth", type=int, metavar="N", help="layers of the main decoder (default: one pattern)")
    add("--attention", default="mla", metavar="|".join(ATTENTION), help="what A is (default: mla)")
    add(
        "--dsa-ranks",
        type=_ranks,
        default=(),
        metavar="1,2,3",
        help="with mla: the A layers, counted from 1, that are DSA instead",
    )
    add("--mtp-depths", type=int, default=0, metavar="K", help="multi-token prediction depths")
    add("--mtp-pattern", default="", metavar="AE", help="source letters of each MTP depth")
    add("--pp", type=int, metavar="P", help="pipeline stages (default: one per segment, else 1)")
    add("--vpp", type=int, metavar="V", help="virtual stages per pipeline stage")
    add(
        "--target",
        default=TARGETS[0],
        metavar="|".join(TARGETS),
        help="nam56r: with this plugin (default); native: what plain Megatron can run",
    )
    add("--mamba2", action="store_true", help="with native: accept Megatron's Mamba-2 for M")
    add("--json", action="store_true", help="print the whole plan as JSON")
    parser.set_defaults(run=_run)


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers with commas, such as 1,2,3"
        ) from None


def _run(args: argparse.Namespace) -> int:
    plan = translate(
        args.pattern,
        depth=args.depth,
        attention=args.attention,
        dsa_ranks=args.dsa_ranks,
        mtp_depths=args.mtp_depths,
        mtp_pattern=args.mtp_pattern,
        pp=args.pp,
        vpp=args.vpp,
        target=args.target,
        mamba2=args.mamba2,
    )
    print(json.dumps(plan.to_dict(), indent=2) if args.json else "\n".join(_report(plan)))
    return 0


def _report(plan: HybridPlan) -> Iterable[str]:
    """The plan as text. The letters of the source and Megatron patterns are aligned."""
    ranks = f" with DSA at A ranks {', '.join(map(str, plan.dsa_ranks))}" if plan.dsa_ranks else ""
    yield f"source    {plan.source_pattern}"
    yield f"Megatron  {plan.megatron_pattern}"
    yield (
        f"          {plan.depth} layers, attention {plan.attention}{ranks}, "
        f"PP {plan.pp} x VPP {plan.vpp}, target {plan.target}"
    )
    yield ""
    yield from _counts(plan)
    yield ""
    if len(plan.segments) > 1:
        yield from _segments(plan)
        yield ""
    yield from _layer_lines(plan)
    yield ""
    yield f"needs     --hybrid-layer-pattern {shlex.quote(plan.megatron_pattern)}"
    if plan.requires.spec:
        yield f"          --spec {' '.join(plan.requires.spec)}"
    else:
        yield f"          no spec of ours; Megatron's own serves: --spec {_NATIVE_SPEC}"
    yield f"          patches: {', '.join(plan.requires.patches) or 'none'}"
    for note in plan.notes:
        yield textwrap.fill(f"note      {note}", width=100, subsequent_indent=" " * 10)


def _counts(plan: HybridPlan) -> Iterable[str]:
    """One line for each pair of letter and symbol in the plan, and the module that serves it."""
    kinds: dict[tuple[str, str, str], list[Layer]] = {}
    for layer in plan.layers:
        kinds.setdefault((layer.letter, layer.symbol, layer.module), []).append(layer)
    yield f"count     {'main':>5}{'  MTP' if plan.mtp else ''}  served by"
    for (letter, symbol, module), layers in sorted(kinds.items()):
        mtp = sum(layer.mtp_depth is not None for layer in layers)
        shown = f"{mtp:5}" if plan.mtp else ""
        yield f"  {letter} -> {symbol}  {len(layers) - mtp:5}{shown}  {module}"


def _segments(plan: HybridPlan) -> Iterable[str]:
    yield "stage  virtual  layers"
    for segment in plan.segments:
        span = f"{segment.first_layer}-{segment.last_layer}"
        yield f"{segment.stage:5}  {segment.virtual_stage:7}  {span:9}  {segment.megatron_pattern}"


def _layer_lines(plan: HybridPlan) -> Iterable[str]:
    """A heading and one line per layer, in two columns if there are more than 20 layers."""
    rows = [("layer", "src", "sym", "served by", "rank", "stage")]
    for layer in plan.layers:
        mtp = "" if layer.mtp_depth is None else f"mtp{layer.mtp_depth}:"
        virtual = "" if plan.vpp == 1 else f".{layer.virtual_stage}"
        rows.append(
            (
                f"{mtp}{layer.number}",
                layer.letter,
                layer.symbol,
                layer.module.rpartition(".")[2],
                str(layer.a_rank or ""),
                f"{layer.stage}{virtual}",
            )
        )
    first = max(len(row[0]) for row in rows)
    fourth = max(len(row[3]) for row in rows)
    heading, *lines = (
        f"{number:>{first}}  {letter:3}  {symbol:3}  {module:{fourth}}  {rank:>4}  {stage:>5}"
        for number, letter, symbol, module, rank, stage in rows
    )
    if len(lines) <= 20:
        yield from (heading, *lines)
        return
    half = -(-len(lines) // 2)
    yield f"{heading}    {heading}"
    for left, right in zip_longest(lines[:half], lines[half:], fillvalue=""):
        yield f"{left}    {right}".rstrip()
