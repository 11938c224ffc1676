"""A rank of a run whose steps may not wait for the GPU: from the fifth on, a synchronisation in
Megatron's step (forward, backward, reduction, optimizer, and what its loop asks behind them) or in
its log raises RuntimeError. In the seventh, calls of the CUDA runtime that wait are counted.

    torchrun --standalone --nproc-per-node N tests/gpu/no_sync_rank.py ARGUMENTS

ARGUMENTS: those of `megacpp recipe args RECIPE --with-recipe`, and of launch.log_interval a number
that no guarded step has: a log is of values. Writes OUT/waits-RANK.json: the calls in the step, and
in a read that was made to be counted.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from synchronisations import waits_inside

from megacpp_mcore.training.gpu.rank_setup import launch

ALLOWED_STEPS = 4  # kernels are compiled, algorithms chosen and, in the last, a graph captured
COUNTED_STEP = 7
STEP, READ = "a step to be counted", "a read to be counted"


def guarded(function: Callable) -> Callable:
    """`function`, which may not synchronise after ALLOWED_STEPS calls."""
    import torch

    calls = 0

    @functools.wraps(function)
    def call(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls <= ALLOWED_STEPS:
            return function(*args, **kwargs)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return call


def counted(function: Callable, path: Path) -> Callable:
    """`function`, whose call COUNTED_STEP is profiled, and its waits written to `path`."""
    calls = 0

    @functools.wraps(function)
    def call(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls != COUNTED_STEP:
            return function(*args, **kwargs)
        done, found = profiled(lambda: function(*args, **kwargs))
        path.write_text(json.dumps(found))
        return done

    return call


def profiled(step: Callable[[], Any]) -> tuple[Any, dict[str, dict[str, int]]]:
    """What `step` returns, and the waits in it and in a read after it."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(STEP):
            done = step()
        with record_function(READ):
            torch.ones(1, device="cuda").item()
    events = list(profiler.events())
    return done, {"step": waits_inside(events, STEP), "read": waits_inside(events, READ)}


def main() -> None:
    launched = launch(sys.argv[1:])  # before torch is imported: it sets the environment
    launched.out.mkdir(parents=True, exist_ok=True)
    path = launched.out / f"waits-{os.environ['RANK']}.json"

    from megatron.training import training

    from megacpp_mcore.training.gpu.train import train

    # Inside what the run itself wraps, which reads a step's results after it.
    training.train_step = counted(guarded(training.train_step), path)
    training.training_log = guarded(training.training_log)
    train(launched)


if __name__ == "__main__":
    main()
