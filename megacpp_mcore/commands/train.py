"""`megacpp train`: train a recipe on this machine's CPU, or with --gpus on its GPUs."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from megacpp_mcore import dispatch
from megacpp_mcore.commands.parser import add_overrides
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.recipe import Recipe, load_recipe


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
    add_overrides(parser)
    add("--gpus", type=int, metavar="N",
        help="train on N GPUs of this machine: torchrun with megacpp_mcore.pretrain and "
        "launch.nproc_per_node=N")  # fmt: skip
    add("--yardstick", action="store_true",
        help="with --gpus: train Megatron's own blocks of the same sizes instead of ours, Mamba-2 "
        "in place of M and R, to compare with")  # fmt: skip
    add("--profile", type=int, metavar="STEP",
        help="with --gpus: list the kernels of this step in the receipt, with their launches and "
        "times; it is slower than the others")  # fmt: skip
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
    add("-v", "--verbose", action="store_true",
        help="say why each backend was chosen, as MEGACPP_VERBOSE=1 does; the receipt says it "
        "always")  # fmt: skip
    add("--json", action="store_true", help="print the receipt as JSON to stdout when the run "
        "ends, all else to stderr")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, then print the result and write its page."""
    resumes = args.resume or args.resume_from is not None
    _check_options(args, resumes)
    if args.verbose:
        os.environ[dispatch.VERBOSE] = "1"  # the ranks', too
    if args.gpus is not None:
        from megacpp_mcore.training.gpu import launcher

        return launcher.launch_ranks(
            args.recipe, args.overrides, args.gpus, args.out,
            yardstick=args.yardstick, resume=resumes, resume_from=args.resume_from,
            as_json=args.json, profile=args.profile,
        )  # fmt: skip
    recipe = load_recipe(args.recipe, args.overrides)
    out = Path(args.out or f"runs/{recipe.name}")
    _refuse_early(recipe, out, args)
    if args.resume and (done := _finished(recipe, out, args.steps)):
        from megacpp_mcore.receipts import read

        print(json.dumps(read(out / "receipt.json"), indent=2) if args.json else done)
        return 0

    from megacpp_mcore.stack import bridges  # imports torch

    bridges.before_megatron()
    from megacpp_mcore.training.cpu.train import train

    outcome = train(
        recipe, out, steps=args.steps, resume=args.resume, resume_from=args.resume_from,
        overwrite=args.overwrite,
    )  # fmt: skip
    if outcome.receipt["result"]["status"] != "interrupted":  # that was told in one line
        _report(outcome.receipt, out, verbose=args.verbose, as_json=args.json)
    elif args.json:
        print(json.dumps(outcome.receipt, indent=2))
    return outcome.exit_status


def _check_options(args: argparse.Namespace, resumes: bool) -> None:
    if args.steps is not None and args.steps < 1:
        raise MegacppError(f"--steps {args.steps}: at least 1 is needed")
    if resumes and args.overwrite:
        raise MegacppError(
            "--resume and --resume-from continue the run in DIR, --overwrite removes it: give only "
            "one of them"
        )
    if args.resume_from is not None and args.resume_from < 0:
        raise MegacppError(f"--resume-from {args.resume_from}: an iteration is at least 0")
    if args.gpus is not None and (args.steps is not None or args.overwrite):
        raise MegacppError(
            "--steps and --overwrite are for CPU runs: with --gpus, set schedule.train_iters=N and "
            "choose another --out"
        )
    if args.gpus is None and args.yardstick:
        raise MegacppError("--yardstick needs --gpus N: Megatron's own blocks run on GPUs only")
    if args.gpus is None and args.profile is not None:
        raise MegacppError("--profile needs --gpus N: it lists the kernels of a GPU")


def _refuse_early(recipe: Recipe, out: Path, args: argparse.Namespace) -> None:
    """What a run on the CPU would refuse after importing torch and Megatron, before that."""
    from megacpp_mcore.recipe import patch_needs
    from megacpp_mcore.training.cpu import support
    from megacpp_mcore.training.data.blend import check_data
    from megacpp_mcore.training.packages import check_packages
    from megacpp_mcore.training.run_folder import RunFolder

    support.check(recipe, args.steps)
    check_packages(recipe)
    patch_needs.check(recipe)
    resumes = args.resume or args.resume_from is not None
    if not (resumes or args.overwrite):
        RunFolder(out).refuse_a_run()
    check_data(recipe)


def _finished(recipe: Recipe, out: Path, steps: int | None) -> str | None:
    """What to say where the run in `out` has nothing left to train, else None."""
    from megacpp_mcore.receipts import read
    from megacpp_mcore.training.checkpoints import folder
    from megacpp_mcore.training.run_folder import RunFolder

    run = RunFolder(out)
    saved = folder.complete(run.checkpoints)
    last = steps or recipe.schedule.train_iters
    if not saved or saved[-1] < last or not os.path.exists(run.receipt):
        return None
    result = read(run.receipt)["result"]
    if result["status"] != "complete" or result["steps"] < last:
        return None
    longer = "--set schedule.train_iters=N"
    if saved[-1] < recipe.schedule.train_iters:
        longer = f"--steps N (the schedule has {recipe.schedule.train_iters}), or {longer}"
    return (
        f"the run in {out} is complete at step {saved[-1]}: nothing is left to train. To extend "
        f"it, resume with {longer}; to see it, megacpp report show {run.receipt}"
    )


def _report(
    receipt: dict[str, Any], out: Path, *, verbose: bool, as_json: bool = False
) -> None:  # fmt: skip
    from megacpp_mcore.receipts.html import PAGE, page, write_page
    from megacpp_mcore.receipts.show import show, training_loss

    write_page(page([(str(out), receipt)]), out / PAGE)
    if as_json:
        print(json.dumps(receipt, indent=2))
        return
    print(show(receipt, str(out / "receipt.json"), verbose=verbose))
    if line := training_loss(receipt):
        print(f"\n{line}")
    print(f"page  {out / PAGE}")
