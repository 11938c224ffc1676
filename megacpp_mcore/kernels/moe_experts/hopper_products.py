"""The experts' products in CUDA C++ for Hopper (csrc/), with torch_products' interface.

bf16, sums in float32. A weight gradient can be added to a float32 tensor as it is stored. Every
expert's rows start at a multiple of ALIGN, and those that pad an expert's are zero.
"""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels import nvcc
from megacpp_mcore.kernels.moe_experts import torch_products

ALIGN = 128
MOST_EXPERTS = 256
_SOURCE = Path(__file__).parent / "csrc" / "grouped.cu"
_FORWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT, _ADDED_WEIGHT_GRADIENT = range(4)
_TILES = (256, 224)  # columns


class HopperProductError(MegacppError):
    """A product that CUDA refused to launch."""

    exit_status = 1


def forward(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """As of torch_products."""
    out = x.new_empty(x.shape[0], w.shape[1])
    _launch(_FORWARD, x, w, out, ends, n=w.shape[1], k=x.shape[1])
    return out


def input_gradient(dy: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """As of torch_products."""
    out = dy.new_empty(dy.shape[0], w.shape[2])
    _launch(_INPUT_GRADIENT, dy, w, out, ends, n=w.shape[2], k=dy.shape[1])
    return out


def weight_gradient(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """As of torch_products."""
    out = x.new_empty(ends.shape[0], dy.shape[1], x.shape[1])
    _launch(_WEIGHT_GRADIENT, dy, x, out, ends, m=dy.shape[1], n=x.shape[1])
    return out


def add_weight_gradient(total: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> None:
    """As of torch_products; in one pass where total is float32, contiguous and aligned."""
    if total.dtype != torch.float32 or not total.is_contiguous() or total.data_ptr() % 16:
        torch_products.add_weight_gradient(total, dy, x, ends)
        return
    _launch(_ADDED_WEIGHT_GRADIENT, dy, x, total, ends, m=dy.shape[1], n=x.shape[1])


def _launch(kind: int, a: Tensor, b: Tensor, c: Tensor, ends: Tensor, *, n: int, k=0, m=0) -> None:
    tile = min(_TILES, key=lambda columns: -(-n // columns) * columns)
    with torch.cuda.device(a.device):
        kernels = _kernels()
        error = kernels.grouped_product(
            kind, tile, 0, a.data_ptr(), b.data_ptr(), c.data_ptr(), ends.data_ptr(),
            a.shape[0], ends.shape[0], m, n, k, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
    if error:
        raise HopperProductError(f"grouped_product: {kernels.grouped_error(error).decode()}")


@functools.cache
def _kernels() -> ctypes.CDLL:
    found = nvcc.library(_SOURCE, "sm_90a", "MEGACPP_BACKENDS=moe_experts=grouped_mm")
    found.grouped_error.restype = ctypes.c_char_p
    found.grouped_product.argtypes = (
        *(ctypes.c_int,) * 3, *(ctypes.c_void_p,) * 4, ctypes.c_int64, *(ctypes.c_int,) * 4,
        ctypes.c_void_p,
    )  # fmt: skip
    return found
