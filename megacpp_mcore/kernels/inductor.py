"""torch.compile for the backends named `inductor`."""

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as one graph forward and one backward, shared by all layers that call it.

    It is compiled for the first sizes it meets, and again with a dynamic axis when the length of an
    axis changes. Nothing falls back to eager mode silently: a graph break is an error, and so are
    more recompilations than torch's `recompile_limit`.
    """
    return functools.wraps(function)(torch.compile(function, fullgraph=True))


def reason() -> str | None:
    """Why torch.compile cannot build kernels for this machine's GPU in this process, or None."""
    if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return (
            "torch.compile is switched off in this process; unset TORCH_COMPILE_DISABLE and "
            "TORCHDYNAMO_DISABLE"
        )
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        return "no C compiler, which Triton launches a kernel with; install gcc, or set CC"
    return None
