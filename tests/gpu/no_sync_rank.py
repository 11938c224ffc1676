"""A rank of a run whose steps may not wait for the GPU: from the fourth on, a synchronisation in
the forward and backward pass, in the optimizer's step or between them raises RuntimeError.

    torchrun --standalone --nproc-per-node N tests/gpu/no_sync_rank.py ARGUMENTS

ARGUMENTS: those of `megacpp recipe args RECIPE --with-recipe`.
"""

import functools
import sys
from collections.abc import Callable

from megacpp_mcore.training.gpu.rank_setup import launch

ALLOWED_STEPS = 3  # kernels are compiled, algorithms chosen and graphs captured


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
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return call


def main() -> None:
    launched = launch(sys.argv[1:])  # before torch is imported: it sets the environment
    from megatron.core.rerun_state_machine import RerunStateMachine

    from megacpp_mcore.training.gpu.loop import wrapped
    from megacpp_mcore.training.gpu.train import train

    def setup(call, given):
        model, optimizer, scheduler = call()
        optimizer.step = guarded(optimizer.step)
        return model, optimizer, scheduler

    between = "should_run_forward_backward"  # before the forward pass, and after the backward pass
    setattr(RerunStateMachine, between, guarded(getattr(RerunStateMachine, between)))
    with wrapped(
        {
            "setup_model_and_optimizer": (setup, ()),
            "get_forward_backward_func": (lambda call, given: guarded(call()), ()),
        }
    ):
        train(launched)


if __name__ == "__main__":
    main()
