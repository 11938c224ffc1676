"""Triton launches a kernel on the current device, whichever its tensors are on."""

import contextlib

import torch
from torch import Tensor


def device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """Makes x's GPU the current one; nothing for a tensor on a CPU, in Triton's interpreter."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
