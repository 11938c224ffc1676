"""The experts' products in CUDA C++ for Hopper (csrc/), with torch_products' interface.

bf16, sums in float32. Tokens are gathered as they are loaded, and a weight gradient is added to a
float32 tensor as it is stored. Every expert's rows start at a multiple of ALIGN, and those that pad
an expert's are zero. The order of every sum is fixed.
"""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels import nvcc
from megacpp_mcore.kernels.moe_experts import torch_products
from megacpp_mcore.kernels.moe_experts.routing import Gathered, rows_of

NAME = "hopper"
ALIGN = 128
MOST_EXPERTS = 256
_SOURCE = Path(__file__).parent / "csrc" / "grouped.cu"
# As in grouped.cuh.
_FORWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT, _ADDED_WEIGHT_GRADIENT, _ADDED_TRANSPOSED = range(5)
_TILES = (256, 224)  # columns


class HopperProductError(MegacppError):
    """A product that CUDA refused to launch."""

    exit_status = 1


def reason(dtype: torch.dtype, experts: int) -> str | None:
    """Why these products cannot serve `experts` local experts of `dtype` here, or None."""
    if dtype != torch.bfloat16:
        return f"they multiply bfloat16, not {dtype}"
    if experts > MOST_EXPERTS:
        return f"{experts} local experts: they take up to {MOST_EXPERTS}"
    return nvcc.reason()


def forward(x: Tensor | Gathered, w: Tensor, ends: Tensor) -> Tensor:
    """As of torch_products."""
    return _of_rows(_FORWARD, x, w, ends, columns=w.shape[1])


def input_gradient(dy: Tensor | Gathered, w: Tensor, ends: Tensor) -> Tensor:
    """As of torch_products."""
    return _of_rows(_INPUT_GRADIENT, dy, w, ends, columns=w.shape[2])


def _of_rows(kind: int, a: Tensor | Gathered, w: Tensor, ends: Tensor, columns: int) -> Tensor:
    a, source, size = _gathered(a)
    out = a.new_empty(size, columns)
    _launch(kind, a, source, w, out, ends, size, n=columns, k=a.shape[1])
    return out


def weight_gradient(dy: Tensor | Gathered, x: Tensor | Gathered, ends: Tensor) -> Tensor:
    """As of torch_products."""
    dy, x = rows_of(dy), rows_of(x)
    out = x.new_empty(ends.shape[0], dy.shape[1], x.shape[1])
    _launch(_WEIGHT_GRADIENT, dy, None, x, out, ends, len(x), m=dy.shape[1], n=x.shape[1])
    return out


def add_weight_gradient(
    total: Tensor, dy: Tensor | Gathered, x: Tensor | Gathered, ends: Tensor
) -> None:
    """As of torch_products; in one pass where total is float32, contiguous and aligned."""
    if total.dtype != torch.float32 or not total.is_contiguous() or total.data_ptr() % 16:
        torch_products.add_weight_gradient(total, dy, x, ends)
        return
    kind, a, b = _ADDED_WEIGHT_GRADIENT, dy, rows_of(x) if isinstance(dy, Gathered) else x
    if isinstance(b, Gathered):  # only A's rows are gathered: the transposed product
        kind, a, b = _ADDED_TRANSPOSED, x, dy
    a, source, _ = _gathered(a)
    _launch(kind, a, source, b, total, ends, len(b), m=a.shape[1], n=b.shape[1])


def _gathered(a: Tensor | Gathered) -> tuple[Tensor, Tensor | None, int]:
    """A's memory, where its rows are in it if they are not in order, and how many rows A has."""
    if not isinstance(a, Gathered):
        return a, None, len(a)
    return a.tokens.contiguous(), a.routing.token, a.routing.size


def _launch(
    kind: int, a: Tensor, source: Tensor | None, b: Tensor, c: Tensor, ends: Tensor, rows: int,
    *, n: int, k: int = 0, m: int = 0,
) -> None:  # fmt: skip
    tile = _TILES[0]
    if kind != _ADDED_TRANSPOSED:
        tile = min(_TILES, key=lambda columns: -(-n // columns) * columns)
    kernels = _kernels()
    with torch.cuda.device(a.device):
        error = kernels.grouped_product(
            kind, tile, _VARIANT, a.data_ptr(), None if source is None else source.data_ptr(),
            b.data_ptr(), c.data_ptr(), ends.data_ptr(), rows, ends.shape[0], m, n, k,
            torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
    if error:
        raise HopperProductError(f"grouped_product: {kernels.grouped_error(error).decode()}")


_VARIANT = 0


@functools.cache
def _kernels() -> ctypes.CDLL:
    found = nvcc.library(_SOURCE, "sm_90a", "MEGACPP_BACKENDS=moe_experts=grouped_mm")
    found.grouped_error.restype = ctypes.c_char_p
    found.grouped_product.argtypes = (
        *(ctypes.c_int,) * 3, *(ctypes.c_void_p,) * 5, ctypes.c_int64, *(ctypes.c_int,) * 4,
        ctypes.c_void_p,
    )  # fmt: skip
    return found
