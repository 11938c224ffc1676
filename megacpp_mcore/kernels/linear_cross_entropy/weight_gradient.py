"""The weight's gradient, summed in float32 over chunks of tokens, in little memory.

A gradient that will be added to a float32 main_grad stays the float32 sum. Of any other, a sum in
the weight's 16-bit dtype would be rounded after every chunk; a separate float32 sum takes twice the
gradient's memory in addition. There the gradient's own memory holds the float32 sum of its first
half of the rows, and only the sum of the second half needs memory of its own.
"""

import torch
from torch import Tensor

from megacpp_mcore.kernels.linear_cross_entropy.cublaslt import TILE_128X160, product


class WeightGradient:
    """The sum over chunks of d_logits^T hidden.

    add: one chunk's product. result: the sum in the weight's dtype, rounded once, or with `wide` in
    float32.
    """

    def __init__(self, weight: Tensor, chunks: int, wide: bool = False) -> None:
        dtype = torch.float32 if wide else weight.dtype
        self._result = weight.new_empty(weight.shape, dtype=dtype)
        self._started = self._narrows = False
        if wide:  # by halves, as it is below: cuBLAS then makes the same products
            self._parts = list(self._result.tensor_split(2))
            return
        if chunks == 1 or weight.dtype == torch.float32:
            self._parts = [self._result]  # one product rounds once; float32 needs no wider sum
            return
        rows, columns = weight.shape
        held = rows // 2
        inside = self._result.view(-1)[: held * columns * 2].view(torch.float32)
        outside = weight.new_empty(rows - held, columns, dtype=torch.float32)
        self._parts, self._narrows = [inside.view(held, columns), outside], True

    def add(self, d_logits: Tensor, hidden_t: Tensor) -> None:
        """d_logits: (tokens, V). hidden_t: (h, tokens), faster if contiguous."""
        start = 0
        for part in self._parts:
            rows = d_logits[:, start : start + part.shape[0]]
            _add_product(part, rows.t(), hidden_t.t(), fresh=not self._started)
            start += part.shape[0]
        self._started = True

    def result(self) -> Tensor:
        """The gradient (V, h)."""
        if not self._started:
            return self._result.zero_()
        if self._narrows:
            inside, outside = self._parts
            _narrow(inside.view(-1), self._result.view(-1))
            self._result[inside.shape[0] :].copy_(outside)
        return self._result


def _narrow(wide: Tensor, narrow: Tensor) -> None:
    """Round float32 elements to 16 bits in place: both tensors start at the same address.

    Ranges of doubling length overwrite only elements that were moved before; the first range goes
    through a copy (docs/linear-cross-entropy.md).
    """
    size = wide.numel()
    moved = min(size, max(1, size // 64))
    narrow[:moved].copy_(wide[:moved].to(narrow.dtype))
    while moved < size:
        stop = min(2 * moved, size)
        narrow[moved:stop].copy_(wide[moved:stop])
        moved = stop


def _add_product(out: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    """out += a b, or with `fresh` out = a b; out has a's dtype or is float32."""
    if product(out, a, b, TILE_128X160, accumulate=not fresh):
        return
    beta = 0 if fresh else 1
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=beta, out=out)
    elif a.is_cuda:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, beta=beta, out=out)
    else:  # a CPU has no product of two dtypes
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=beta, out=out)
