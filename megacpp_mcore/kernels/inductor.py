"""Functions of tensors under torch.compile, as an operator's backend `inductor` has them."""

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as one graph forward and one backward, shared by all layers that call it.

    Sizes: compiled for the first that it meets, and once more, for any length of an axis, when that
    axis has another. A part that no graph can hold is an error, as is meeting more than torch's
    `recompile_limit` of unlike kinds of arguments: nothing goes on uncompiled unsaid.
    """
    return functools.wraps(function)(torch.compile(function, fullgraph=True))


def reason() -> str | None:
    """Why torch.compile makes no kernels for this machine's GPU in this process, or None."""
    if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return (
            "torch.compile is switched off in this process; unset TORCH_COMPILE_DISABLE and "
            "TORCHDYNAMO_DISABLE"
        )
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        return "no C compiler, which Triton launches a kernel with; install gcc, or set CC"
    return None
