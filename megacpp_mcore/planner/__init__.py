"""Which layout of a recipe fits a number of GPUs, and which is the fastest, from sizes alone.

    activations  bytes that each layer keeps for its backward pass
    memory       all bytes on a GPU
    rates        what an H200 was measured to do: h200.json, made of receipts by `calibrate`
    step         predicted time of a step, from `rates`
    search       every layout that the recipe's own rules admit, ranked

Nothing here imports torch.
"""

from megacpp_mcore.errors import MegacppError


class PlanError(MegacppError):
    """A question that no layout answers, or a model that the planner does not know."""
