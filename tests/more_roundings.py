"""Right results with the roundings of kernels in bf16, by the definition on the CPU.

A gate judged by the definition alone would be held to roundings that a kernel cannot keep: here the
operands of products, and the gradients that lie between two kernels, are bf16 as theirs are.
"""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megacpp_mcore.kernels.m2rnn.reference import over_documents
from megacpp_mcore.kernels.m2rnn_core import reference as m2rnn_core
from megacpp_mcore.kernels.mamba3 import reference as mamba3


class _Bf16(torch.autograd.Function):
    """Identity that rounds a value to bf16, and its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.bfloat16().to(x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.bfloat16().to(gradient.dtype)


bf16 = _Bf16.apply


def _m2rnn(q, k, v, W, f, *, cu_seqlens=None, **settings) -> tuple[Tensor, Tensor]:
    """`m2rnn` with a state and a W that are bf16 in products, as the CUDA kernels have them."""

    def recurrence(q, k, v, W, f, h):
        q, k, v, W, f = (x.to(h.dtype) for x in (q, k, v, W, f))
        y = []
        for t in range(v.shape[1]):
            f_t = f[:, t, :, None, None]
            z = torch.tanh(bf16(h) @ bf16(W) + k[:, t, :, :, None] * v[:, t, :, None, :])
            h = f_t * h + (1 - f_t) * z
            y.append((q[:, t, :, :, None] * bf16(h)).sum(-2))
        return torch.stack(y, dim=1), h

    return over_documents(recurrence, q, k, v, W, f, None, cu_seqlens)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, halves: bool, exact=mamba3.rotate) -> Tensor:
    """Rotated q and k, which the scan's kernels keep in bf16, and their gradients likewise."""
    return bf16(exact(x, cos, sin, halves))


def _output(y, value, z, D, mimo_out) -> Tensor:
    """Skip and gate: MIMO's value, and the gradient before the gate, are bf16."""
    value = value if mimo_out is None else bf16(value)
    y = y if D is None else y + D[:, None, None] * value
    y = y if z is None else bf16(y) * functional.silu(z)
    return y.squeeze(-2) if mimo_out is None else (y * mimo_out).sum(-2)


@contextlib.contextmanager
def rounded() -> Iterator[None]:
    """M2RNN's and Mamba-3's definitions have kernels' roundings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(m2rnn_core, "m2rnn", _m2rnn)
        patch.setattr(mamba3, "rotate", _rotate)
        patch.setattr(mamba3, "_output", _output)
        yield
