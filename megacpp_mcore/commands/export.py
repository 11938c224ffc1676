"""`megacpp export`: a trained model as safetensors, with a loader in plain torch."""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

_EPILOG = """\
examples:
  megacpp export runs/nam56r-tiny --out exported
  megacpp export runs/nam56r-tiny --iteration 100 --blocks --out exported

The folder has model.safetensors, config.json and nam56r.py, which needs torch alone:
  python -c 'import nam56r, torch; print(nam56r.load(".")(torch.tensor([[256]]))[0].shape)'
With --blocks also blocks/layer-N.mamba-ssm.safetensors (the state_dict of mamba-ssm's Mamba3) of
every M, and blocks/layer-N.xma.safetensors (of lm-engine's M2RNN, around XMA's kernels) of every R.
`megacpp import` is the way back.
"""


def register(subparsers: Any) -> None:
    """Add `export`."""
    parser = subparsers.add_parser(
        "export",
        help="write a trained model as safetensors, with a loader in plain torch",
        description="Write the model of a checkpoint as safetensors with documented names, and a "
        "loader of one file that computes the same logits.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("run_folder", metavar="RUN", type=Path, help="the --out folder of `megacpp train`")
    add("--out", metavar="DIR", type=Path, required=True, help="a new folder")
    add("--iteration", type=int, metavar="N", help="checkpoint of step N (default: the newest)")
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json to take along")
    add("--blocks", action="store_true",
        help="also every M and R as mamba-ssm's Mamba3 and XMA's M2RNN have it")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export, and say what was written."""
    from megacpp_mcore.inference.trained import trained

    source = trained(args.run_folder, args.iteration)
    from megacpp_mcore.inference import export  # imports torch

    config = export.export(source, args.out, args.tokenizer, blocks=args.blocks)
    size = sum(path.stat().st_size for path in args.out.rglob("*.safetensors"))
    print(
        f"wrote {args.out}: {len(config['layers'])} layers of iteration {config['iteration']}, "
        f"{config['dtype']}, {size / 2**20:.1f} MiB"
    )
    print(f"back      {_back(source.name, config, args.out)}")
    return 0


def _back(name: str, config: dict[str, Any], out: Path) -> str:
    """The command that imports it again, with the keys of the model that were set for the run."""
    from megacpp_mcore.inference.export import other_keys
    from megacpp_mcore.recipe import load_recipe
    from megacpp_mcore.recipe.source import shipped

    recipe, overrides = f"{name}.toml", {}
    if name in shipped():
        recipe, overrides = name, other_keys(config, load_recipe(name).to_dict())
    words = ["megacpp", "import", str(out), "--recipe", recipe]
    for key, value in overrides.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return shlex.join([*words, "--out", "NEW-RUN"])
