"""Mamba-3's kernels under non-reentrant checkpointing: 0 the same gradients, 1 it is refused.

MIMO's are TileLang's: without it SISO's alone, which is said.
"""

from importlib.util import find_spec

import torch
from _mamba3 import inputs, mimo, run, siso
from torch.utils.checkpoint import CheckpointError, checkpoint


def gradients(function, tensors, recompute):
    y = checkpoint(function, **tensors, use_reentrant=False) if recompute else function(**tensors)
    return torch.autograd.grad(y.float().square().sum(), tensors["V"])[0]


def main():
    kinds = [("SISO", siso, 0), ("MIMO", mimo, 4)]
    if find_spec("tilelang") is None:
        kinds.pop()
    seen = {}
    for name, function, rank in kinds:
        tensors = inputs(1, rank)
        plain = gradients(function, tensors, recompute=False)
        try:
            again = gradients(function, tensors, recompute=True)
        except CheckpointError as error:
            seen[name] = str(error).splitlines()[0]
            continue
        # Sums with atomics, of which the order is another: a few epsilons of the norm.
        far = float((again.float() - plain.float()).norm() / plain.float().norm())
        if not far <= 4 * torch.finfo(torch.bfloat16).eps:
            raise AssertionError(f"{name}: the recomputed gradient is {far:.1e} from the plain one")
    names = " and ".join(name for name, _, _ in kinds)
    print(seen or f"{names}: the gradients of a plain backward pass")
    return int(bool(seen))


run(main)
