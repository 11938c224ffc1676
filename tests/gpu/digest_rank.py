"""A rank of a run that writes `digests` of its gradients and weights, a line of JSON a step.

    torchrun --standalone --nproc-per-node 1 tests/gpu/digest_rank.py FILE ARGUMENTS

ARGUMENTS: those of `megacpp recipe args RECIPE --with-recipe`.
"""

import functools
import itertools
import json
import sys
from pathlib import Path

from megacpp_mcore.training.gpu.rank_setup import launch


def main(file: str, *arguments: str) -> None:
    launched = launch(list(arguments))  # before torch is imported: it sets the environment
    import digests

    from megacpp_mcore.training.gpu.loop import wrapped
    from megacpp_mcore.training.gpu.train import train

    def setup(call, given):
        model, optimizer, scheduler = call()
        named = {n: p for chunk in model for n, p in chunk.named_parameters()}
        step, steps = optimizer.step, itertools.count(1)

        @functools.wraps(step)
        def watched(*args, **kwargs):
            gradients = digests.of({name: p.main_grad for name, p in named.items()})
            done = step(*args, **kwargs)
            found = {"step": next(steps), "gradients": gradients, "weights": digests.of(named)}
            with Path(file).open("a") as lines:
                print(json.dumps(found), file=lines)
            return done

        optimizer.step = watched
        return model, optimizer, scheduler

    with wrapped({"setup_model_and_optimizer": (setup, ())}):
        train(launched)


if __name__ == "__main__":
    main(*sys.argv[1:])
