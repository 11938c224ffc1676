"""`megacpp train`: train a recipe on this machine's CPU, or with --gpus on its GPUs."""

import argparse
from pathlib import Path
from typing import Any


def register(subparsers: Any) -> None:
    """Add `train`."""
    parser = subparsers.add_parser(
        "train",
        help="train a recipe here: on the CPU, or with --gpus on this machine's GPUs",
        description="Without --gpus: train a recipe whose launch.device is 'cpu' in one process, "
        "through Megatron's own arguments, model and data classes. With --gpus: train a recipe for "
        "GPUs in Megatron's own training loop, one process per GPU.",
    )
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a shipped recipe's name, or the path of a TOML file")
    add("--set", dest="overrides", metavar="A.B=C", action="append", default=[],
        help="override one key; may be given again")  # fmt: skip
    add("--gpus", type=int, metavar="N",
        help="train on N GPUs of this machine: torchrun with megacpp_mcore.pretrain and "
        "launch.nproc_per_node=N")  # fmt: skip
    add("--yardstick", action="store_true",
        help="with --gpus: train Megatron's own blocks of the same sizes instead of ours, Mamba-2 "
        "in place of M and R, to compare with")  # fmt: skip
    add("--steps", type=int, metavar="N",
        help="stop after N steps in total; the schedule is not changed")  # fmt: skip
    add("--out", metavar="DIR", help="folder of the run (default: runs/RECIPE)")
    add("--resume", action="store_true",
        help="resume from the newest complete checkpoint in DIR (with --gpus: in the recipe's "
        "checkpoint.load), or start if there is none")  # fmt: skip
    add("--resume-from", type=int, metavar="ITER",
        help="resume from the complete checkpoint of iteration ITER, not from the newest one; "
        "newer ones are renamed to superseded-...")  # fmt: skip
    add("--overwrite", action="store_true", help="replace the run that DIR holds")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, then print the result and draw its curves."""
    from megacpp_mcore.errors import MegacppError
    from megacpp_mcore.recipe import load_recipe
    from megacpp_mcore.stack import bridges

    if args.steps is not None and args.steps < 1:
        raise MegacppError(f"--steps {args.steps}: at least 1 is needed")
    resumes = args.resume or args.resume_from is not None
    if resumes and args.overwrite:
        raise MegacppError(
            "--resume and --resume-from continue the run in DIR, --overwrite removes it: give only "
            "one of them"
        )
    if args.resume_from is not None and args.resume_from < 1:
        raise MegacppError(f"--resume-from {args.resume_from}: an iteration is at least 1")
    if args.gpus is not None:
        from megacpp_mcore.training.gpu import launcher

        if args.steps is not None or args.overwrite:
            raise MegacppError(
                "--steps and --overwrite are for CPU runs: with --gpus, set schedule.train_iters=N "
                "and choose another --out"
            )
        return launcher.launch_ranks(
            args.recipe, args.overrides, args.gpus, args.out,
            yardstick=args.yardstick, resume=resumes, resume_from=args.resume_from,
        )  # fmt: skip
    if args.yardstick:
        raise MegacppError("--yardstick needs --gpus N: Megatron's own blocks run on GPUs only")
    recipe = load_recipe(args.recipe, args.overrides)
    out = Path(args.out or f"runs/{recipe.name}")

    bridges.before_megatron()
    from megacpp_mcore.training.cpu.train import train

    outcome = train(
        recipe, out, steps=args.steps, resume=args.resume, resume_from=args.resume_from,
        overwrite=args.overwrite,
    )  # fmt: skip
    _report(outcome.receipt, out)
    return outcome.exit_status


def _report(receipt: dict[str, Any], out: Path) -> None:
    from megacpp_mcore.receipts.plot import plot
    from megacpp_mcore.receipts.show import show

    plot(receipt, out / "curves.png")
    print(show(receipt, str(out / "receipt.json")))
    result = receipt["result"]
    if "unigram_entropy" in result and result["final_loss"] is not None:
        gain = result["unigram_entropy"] - result["final_loss"]
        print(
            f"\nfinal training loss {result['final_loss']:.4f} nats per token, {gain:.4f} below "
            f"the corpus's unigram entropy {result['unigram_entropy']:.4f} (bigram "
            f"{result['bigram_entropy']:.4f})"
        )
    print(f"curves  {out / 'curves.png'}")
