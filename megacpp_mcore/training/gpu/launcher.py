"""`megacpp train --gpus N`: start this machine's ranks, each running megacpp_mcore.pretrain."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megacpp_mcore import dispatch, receipts
from megacpp_mcore.host.gpus import visible
from megacpp_mcore.hybrid import letters
from megacpp_mcore.recipe import Recipe, load_recipe, patch_needs
from megacpp_mcore.recipe.lowering import lower
from megacpp_mcore.recipe.rules import cuda_graphs
from megacpp_mcore.training.gpu import precompile
from megacpp_mcore.training.gpu.rank_setup import (
    AFTER,
    OUT,
    PROFILE,
    YARDSTICK,
    LaunchError,
    check_profile,
    recipe_argv,
)
from megacpp_mcore.training.gpu.resume import TRACKER, check_same_run, go_back, newest
from megacpp_mcore.training.gpu.torchrun import run_ranks
from megacpp_mcore.training.kernels import compile_all
from megacpp_mcore.training.packages import check_packages

_REFUSED = 2  # exit status of a rank that has printed why it refuses to start


def launch_ranks(
    name_or_path: str, overrides: Sequence[str], gpus: int, out: str | None, *,
    yardstick: bool = False, resume: bool = False, resume_from: int | None = None,
    as_json: bool = False, profile: int | None = None,
) -> int:  # fmt: skip
    """Train a recipe on `gpus` GPUs of this machine. Returns the first failed rank's exit status.

    yardstick: train Megatron's own blocks instead of ours, with the same sizes, data, arguments and
    loop; Mamba-2 replaces M and R, which Megatron does not have. resume: resume from the last
    complete checkpoint in checkpoint.load, or start if there is none. resume_from: resume from the
    one of this iteration. as_json: what the ranks print goes to stderr, and the receipt, if they
    have written one, to stdout when they have ended. profile: list the kernels of this step in the
    receipt.

    Raises LaunchError when the run has no step `profile`, the machine has fewer GPUs, the recipe is
    for several machines, or the folder it loads from holds a checkpoint and `resume` is false;
    ResumeError where `out` has the receipt of a run that the recipe cannot resume;
    RecipeError as `load_recipe`; MissingPackageError and MissingPatchError; DispatchError and
    KernelBuildError where the kernels of the recipe cannot be compiled: all before any rank is
    started. The ranks run the checks that need imports of the packages, before they build
    anything.
    """
    if gpus < 1:
        raise LaunchError(f"--gpus {gpus}: at least 1 is needed")
    overrides = [*overrides, f"launch.nproc_per_node={gpus}"]
    recipe = load_recipe(name_or_path, overrides)
    if yardstick:
        if cuda_graphs.was_auto(recipe):
            print("megacpp: the yardstick's steps are not captured: Megatron's experts read their "
                  "counts on the host", file=sys.stderr)  # fmt: skip
        recipe = load_recipe(name_or_path, [*overrides, *_for_the_yardstick(recipe)])
    check_profile(recipe, profile)
    folder = Path(out or f"runs/{recipe.name}{'-yardstick' * yardstick}")
    resumes = resume or resume_from is not None
    _check(recipe, gpus, resumes)
    if resumes and newest(recipe.checkpoint.load):
        check_same_run(recipe, folder / "receipt.json")
    if not yardstick:  # which reads none
        dispatch.check_read(recipe)
    check_packages(recipe, yardstick=yardstick)
    patch_needs.check(recipe)
    own = [*recipe_argv(recipe), OUT, str(folder), *([YARDSTICK] if yardstick else [])]
    if profile is not None:
        own += [PROFILE, str(profile)]
    receipt = folder / "receipt.json"
    before = _version(receipt)
    with contextlib.ExitStack() as stack:
        if not yardstick:
            compiling = stack.enter_context(precompile.beside(recipe, gpus, folder))
            compile_all(recipe)
            own += [AFTER, ",".join(map(str, compiling))] if compiling else []
        if resume_from is not None:
            verify = recipe.checkpoint.verify_checksums
            for line in go_back(recipe.checkpoint.load, resume_from, verify=verify):
                print(f"megacpp: {line}", file=sys.stderr)
        if as_json:
            stack.enter_context(_stdout_to_stderr())
        outcome = run_ranks("megacpp_mcore.pretrain", own + lower(recipe).argv, gpus)
    if outcome.reason is not None and outcome.status != _REFUSED:
        reason = outcome.reason.removesuffix(".")
        print(f"megacpp: {reason}. {_resume_hint(recipe)}", file=sys.stderr)
        _mark_failed(receipt, outcome.reason)
    if as_json and _version(receipt) != before:
        print(json.dumps(receipts.read(receipt), indent=2))
    return outcome.status


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Let processes that are started here print to stderr."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _version(path: Path) -> tuple[int, int] | None:
    """Differs after every write of a file; None while there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _for_the_yardstick(recipe: Recipe) -> list[str]:
    """Overrides: M in the place of every letter of which Megatron has no block, and no captured
    step if the recipe leaves that to us, as Megatron's experts read their counts on the host."""
    eager = [f"{cuda_graphs.IMPL}=none"] if cuda_graphs.was_auto(recipe) else []
    table = str.maketrans(dict.fromkeys(letters.without_megatrons_block(), "M"))
    patterns = {"model.pattern": recipe.model.pattern, "mtp.pattern": recipe.mtp.pattern}
    return eager + [
        f"{key}={pattern.upper().translate(table)}" for key, pattern in patterns.items()
    ]


def _mark_failed(path: Path, reason: str) -> None:
    """Record the failure for a rank that was killed before it could update its receipt."""
    if not path.exists():
        return
    receipt = receipts.read(path)
    if receipt["result"]["status"] == "running":
        receipt["result"] |= {"status": "failed", "reason": reason}
        receipts.write(path, receipt)


def _resume_hint(recipe: Recipe) -> str:
    if checkpoint := newest(recipe.checkpoint.load):
        return f"The last complete checkpoint is {checkpoint}: resume from it with --resume"
    return "There is no complete checkpoint to resume from"


def _check(recipe: Recipe, gpus: int, resume: bool) -> None:
    if recipe.launch.device != "cuda":
        raise LaunchError(
            f'recipe {recipe.name} has launch.device = "{recipe.launch.device}": train it without '
            "--gpus"
        )
    if recipe.launch.nnodes != 1:
        raise LaunchError(
            f"recipe {recipe.name} is for launch.nnodes = {recipe.launch.nnodes} machines: start "
            "torchrun on each with the output of `megacpp recipe args`"
        )
    if (found := len(visible())) < gpus:
        raise LaunchError(
            f"--gpus {gpus}: CUDA shows {found} GPUs on this machine; use at most that many"
        )
    load = recipe.checkpoint.load
    if resume and not load:
        raise LaunchError("--resume: set checkpoint.load in the recipe to a folder of checkpoints")
    # A run killed right after its first save has a complete checkpoint, but no tracker.
    held = load and ((Path(load) / TRACKER).is_file() or newest(load))
    if held and not resume:
        raise LaunchError(
            f"{load} holds a checkpoint, from which Megatron would resume: give --resume, or "
            "set checkpoint.load and checkpoint.save to another folder"
        )
