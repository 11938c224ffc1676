"""`megacpp bench`: time the backends of a surface, one layer, or a whole model."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megacpp_mcore.commands.parser import add_overrides

_EPILOG = """\
examples:
  megacpp bench core_attention --recipe nam56r --receipt attention.json
  megacpp bench moe_experts --against te            the chosen backend against te
  megacpp bench model --recipe nam56r --layers 13   forward, forward + backward, step
  megacpp bench layer A --against mla_rope=megatron one layer, another backend inside it
  megacpp bench layer M --against upstream          mamba-ssm's own Mamba3 in the layer's place
  megacpp bench model --against linear_cross_entropy=megatron
                                                    two models compared, alternating
  megacpp bench model --set precision.fp8=hybrid --set precision.fp8_recipe=tensorwise \\
      --against precision.fp8=null                  FP8 against bf16, the same weights
  megacpp report compare before.json after.json

Exit status 1 when a backend failed or was wrong; it then has a reason instead of times.
"""


def register(subparsers: Any) -> None:
    """Add `bench`."""
    parser = subparsers.add_parser(
        "bench",
        help="time the backends of a surface, one layer, or a whole model",
        description="Time every usable backend of SURFACE, alternating, on one micro batch of a "
        "recipe, after comparing each with the reference; or, for `layer`, one layer of the "
        "recipe; or, for `model`, the recipe's model. In one process, on this machine's GPU if it "
        "has one, else on its CPU.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("surface", metavar="SURFACE", help="a surface of `megacpp catalog`, `layer` or `model`")
    add("layer", metavar="LAYER", nargs="?", help="of `layer`: a block letter, + (MLA) or * (GQA)")
    add("--recipe", metavar="RECIPE",
        help="recipe with the sizes (default: MEGACPP_RECIPE; nam56r, on a CPU "
        "nam56r-tiny)")  # fmt: skip
    add_overrides(parser)
    add("--against", metavar="BACKEND", nargs="+", default=[],
        help="time only these and the chosen one; the first is the baseline. For `layer` and "
        "`model`: SURFACE=BACKEND,... each, or keys of the recipe's precision and recompute, "
        "such as precision.fp8=null. For `layer` M and R also `upstream`: what they come from, of "
        "its own package; for E, Liger's fused experts")  # fmt: skip
    add("--variant", metavar="NAME",
        help="of linear_cross_entropy: weighted (a training step's sum of losses, the default), "
        "per_token (losses that take any gradient) or mean (equal weights, to compare with Liger's "
        "own mean)")  # fmt: skip
    add("--layers", type=int, metavar="N", help="of `model`: its first N layers")
    add("--no-optimizer", action="store_true", help="of `model`: time no optimizer step")
    add("--receipt", type=Path, metavar="FILE", help="write the bench receipt here")
    add("--json", action="store_true", help="print the bench receipt")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark, print its receipt as a page, and write it."""
    from megacpp_mcore import receipts
    from megacpp_mcore.receipts.show import show

    _check_options(args)
    if args.receipt:
        _check_origin(args.receipt)
    receipt, wrong = _bench(args, _recipe(args))
    if args.receipt:
        receipts.write(args.receipt, receipt)
    print(json.dumps(receipt, indent=2) if args.json
          else show(receipt, str(args.receipt or "not written")))  # fmt: skip
    for reason in wrong:
        print(f"megacpp: {args.surface}: {reason}", file=sys.stderr)
    return 1 if wrong else 0


def _check_origin(path: Path) -> None:
    """A receipt that is to be committed names code that can be found again."""
    from megacpp_mcore.bench import BenchError
    from megacpp_mcore.receipts.lane import code, is_traceable

    if "examples" in path.resolve().parts and not is_traceable(code()):
        raise BenchError(
            f"--receipt {path}: a receipt in examples/ must name code that can be found again, and "
            "megacpp_mcore/ has changes here that no commit has; run it from a clean checkout, or "
            "from an installed wheel, or write the receipt elsewhere"
        )


def _bench(args: argparse.Namespace, recipe: Any) -> tuple[dict[str, Any], list[str]]:
    from megacpp_mcore.bench import runner
    from megacpp_mcore.bench.layer import LayerTarget
    from megacpp_mcore.bench.model import ModelTarget
    from megacpp_mcore.bench.operator import OperatorTarget

    if args.surface == "model":
        return runner.run(ModelTarget(recipe, args.against, optimizer=not args.no_optimizer))
    if args.surface == "layer":
        return runner.run(LayerTarget(recipe, args.against))
    return runner.run(OperatorTarget(args.surface, recipe, args.against, args.variant))


def _recipe(args: argparse.Namespace) -> Any:
    from megacpp_mcore import bench, dispatch
    from megacpp_mcore.recipe import load_recipe, recipe_from_environment
    from megacpp_mcore.recipe.source import BACKENDS
    from megacpp_mcore.surfaces.registry import REGISTRY
    from megacpp_mcore.surfaces.workload import current_device

    name, own = args.recipe, []
    if name is None and (named := recipe_from_environment()):
        name, own = named.source, [*named.overrides]
    name = name or ("nam56r" if current_device() == "cuda" else "nam56r-tiny")
    overrides = args.overrides + ([f"model.depth={args.layers}"] if args.layers else [])
    if args.layer:
        from megacpp_mcore.bench.layer import layer_overrides

        overrides = layer_overrides(args.layer) + overrides
    recipe = bench.load_for_bench(name, [*own, *overrides])
    # A recipe may name backends of layers that are not benched; a word of this command may not.
    named_here = _surfaces_named(args.overrides)
    if args.surface not in ("layer", "model") and (others := named_here - {args.surface}):
        raise bench.BenchError(
            f"--set {BACKENDS}.{min(others)}: `megacpp bench {args.surface}` builds no other "
            "surface; leave it out, or bench a layer or the model"
        )
    dispatch.check_read(recipe, named_here)
    dispatch.check_read(load_recipe(name, [*own, *args.overrides]), {*REGISTRY} - named_here)
    return recipe


def _surfaces_named(overrides: Sequence[str]) -> set[str]:
    from megacpp_mcore.recipe.source import BACKENDS, split_override

    keys = (split_override(word)[0].split(".") for word in overrides)
    return {key[1] for key in keys if key[0] == BACKENDS and len(key) > 1}


def _check_options(args: argparse.Namespace) -> None:
    from megacpp_mcore.bench import BenchError

    is_model = args.surface == "model"
    if (args.surface == "layer") != (args.layer is not None):
        raise BenchError("`megacpp bench layer`, and no other bench, takes the name of a layer: "
                         "a block letter, + or *")  # fmt: skip
    if args.variant is not None and args.surface in ("layer", "model"):
        raise BenchError("--variant is for a surface, not for `layer` or `model`")
    if not is_model and (args.layers is not None or args.no_optimizer):
        raise BenchError("--layers and --no-optimizer are for `megacpp bench model`")
    if args.layers is not None and args.layers < 1:
        raise BenchError(f"--layers {args.layers}: at least 1 is needed")
