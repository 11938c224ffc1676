"""Which backends of linear_cross_entropy can serve a problem: their `supports`, for `surfaces`.

Imports neither torch nor any optional package before it is asked.
"""

import importlib.metadata

from megacpp_mcore.stack import release
from megacpp_mcore.surfaces.backend import Problem, import_reason

LIGER_NONE_IS_RIGHT = "0.8.2"  # before: the gradients of all tokens times that of the first


def chunked_loss(problem: Problem) -> str | None:
    """The `supports` of our chunks of logits with a Triton kernel."""
    if problem.device != "cuda":
        return f"a Triton kernel, the problem is on {problem.device}"
    if problem.dtype not in ("bfloat16", "float32"):
        return (
            f"it takes bfloat16 and float32, not {problem.dtype}: in float16 the gradients of "
            "unlikely classes would be rounded to 0"
        )
    return import_reason("triton")


def liger_loss(problem: Problem) -> str | None:
    """The `supports` of Liger's fused linear cross entropy, losses of single tokens."""
    if reason := _one_gpu("Liger's kernels", problem):
        return reason
    if reason := import_reason("liger_kernel.ops.fused_linear_cross_entropy"):
        return reason
    version = importlib.metadata.version("liger-kernel")
    if release(version) < release(LIGER_NONE_IS_RIGHT):
        return (
            f"liger-kernel {version} multiplies the gradients of all tokens by the first one's; "
            f"{LIGER_NONE_IS_RIGHT} is the first that is right"
        )
    return None


def cce_loss(problem: Problem) -> str | None:
    """The `supports` of Cut Cross Entropy, without its filter."""
    if reason := _one_gpu("Cut Cross Entropy's kernels", problem):
        return reason
    if problem.dtype not in ("bfloat16", "float16"):
        return f"Cut Cross Entropy takes bfloat16 and float16, not {problem.dtype}"
    return import_reason("cut_cross_entropy")


def _one_gpu(name: str, problem: Problem) -> str | None:
    if problem.device != "cuda":
        return f"{name} run on cuda only, the problem is on {problem.device}"
    ranks = problem.size("tensor_model_parallel_size", 1)
    return f"tensor_model_parallel_size {ranks}: it sees one rank's part" if ranks > 1 else None
