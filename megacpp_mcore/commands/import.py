"""`megacpp import`: an exported model as a checkpoint to continue training from."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from megacpp_mcore.commands.parser import add_overrides
from megacpp_mcore.errors import MegacppError

_EPILOG = """\
examples:
  megacpp import exported --recipe nam56r-tiny --out runs/more
  megacpp import exported --recipe nam56r-tiny --block 2=mamba3.safetensors --out runs/other-m

With a recipe for the CPU, go on with `megacpp train RECIPE --out RUN --resume`. With one for GPUs,
RUN gets a checkpoint with weights alone, which Megatron takes with checkpoint.load = RUN and
checkpoint.finetune = true. --block takes the state_dict of mamba-ssm's Mamba3 for an M, and of
lm-engine's M2RNN (around XMA's kernels) for an R, as a .safetensors file or one that torch.save
wrote; `megacpp export --blocks` writes such files.
"""


def register(subparsers: Any) -> None:
    """Add `import`."""
    parser = subparsers.add_parser(
        "import",
        help="make a checkpoint from an exported model, to continue its training",
        description="Make a checkpoint of iteration 0 from a folder that `megacpp export` wrote.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("folder", metavar="DIR", type=Path, help="a folder that `megacpp export` wrote")
    add("--recipe", metavar="RECIPE", required=True,
        help="of the run that goes on; its model must be the exported one")  # fmt: skip
    add_overrides(parser)
    add("--out", metavar="RUN", type=Path, required=True, help="a new folder")
    add("--block", dest="blocks", metavar="N=FILE", action="append", default=[],
        help="weights of layer N (from 0) of its own package; may be given again")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Import, and print the command that continues the training."""
    from megacpp_mcore.recipe import load_recipe
    from megacpp_mcore.stack import bridges

    blocks = dict(map(_block, args.blocks))
    recipe = load_recipe(args.recipe, args.overrides)
    bridges.before_megatron()
    from megacpp_mcore.inference.importing import import_model

    checkpoint = import_model(args.folder, recipe, args.out, blocks)
    print(f"wrote {checkpoint}")
    out = shlex.quote(str(args.out))
    if recipe.launch.device == "cpu":
        print(f"next  megacpp train {recipe.request} --out {out} --resume")
    else:
        print(
            f"next  megacpp train {recipe.request} --gpus N --resume --set "
            f"checkpoint.load={out} --set checkpoint.finetune=true --set checkpoint.save=NEW"
        )
    return 0


def _block(text: str) -> tuple[int, Path]:
    number, equals, file = text.partition("=")
    if not (equals and file and number.isdecimal()):
        raise MegacppError(f"--block {text}: expected N=FILE, N a layer's number from 0")
    return int(number), Path(file)
