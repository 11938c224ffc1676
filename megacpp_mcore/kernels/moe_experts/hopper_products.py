"""The experts' products in CUDA C++ for Hopper (csrc/), with torch_products' interface.

bf16, sums in float32, in a fixed order. Every expert's rows start at a multiple of ALIGN, and those
that pad an expert's are zero. A weight gradient is added to a float32 tensor as it is stored.

fc1 gathers its tokens as it loads them, which costs less than the copy that it saves. Weight
gradients do not: on an H200 they took a quarter longer so, the copy an eighth.
"""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from megacpp_mcore.errors import MegacppError
from megacpp_mcore.kernels import nvcc
from megacpp_mcore.kernels.moe_experts.routing import Gathered, rows_of

NAME = "hopper"
ALIGN = 128
MOST_EXPERTS = 256
_SOURCE = Path(__file__).parent / "csrc" / "grouped.cu"
# As in grouped.cuh.
_FORWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT, _ADDED_WEIGHT_GRADIENT = range(4)
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
    source, size, n = None, len(x), w.shape[1]
    if isinstance(x, Gathered):
        x, source = x.tokens.contiguous(), x.routing.token
    out = x.new_empty(size, n)
    _launch(_FORWARD, x, w, out, ends, size, n=n, k=x.shape[1], source=source)
    return out


def input_gradient(dy: Tensor | Gathered, w: Tensor, ends: Tensor) -> Tensor:
    """As of torch_products."""
    dy, n = rows_of(dy), w.shape[2]
    out = dy.new_empty(len(dy), n)
    _launch(_INPUT_GRADIENT, dy, w, out, ends, len(dy), n=n, k=dy.shape[1])
    return out


def weight_gradient(dy: Tensor | Gathered, x: Tensor | Gathered, ends: Tensor) -> Tensor:
    """As of torch_products."""
    dy, x = rows_of(dy), rows_of(x)
    out = x.new_empty(ends.shape[0], dy.shape[1], x.shape[1])
    _launch(_WEIGHT_GRADIENT, dy, x, out, ends, len(x), m=dy.shape[1], n=x.shape[1])
    return out


def add_weight_gradient(
    total: Tensor, dy: Tensor | Gathered, x: Tensor | Gathered, ends: Tensor
) -> None:
    """As of torch_products; in one pass where total is float32, contiguous and aligned."""
    if total.dtype != torch.float32 or not total.is_contiguous() or total.data_ptr() % 16:
        total.add_(weight_gradient(dy, x, ends))
        return
    dy, x = rows_of(dy), rows_of(x)
    _launch(_ADDED_WEIGHT_GRADIENT, dy, x, total, ends, len(x), m=dy.shape[1], n=x.shape[1])


def _launch(
    kind: int, a: Tensor, b: Tensor, c: Tensor, ends: Tensor, rows: int, *,
    n: int, k: int = 0, m: int = 0, source: Tensor | None = None,
) -> None:  # fmt: skip
    """C of the kind's product of A and B. rows: of A, which `source` gathers where it is given."""
    tile = min(_TILES, key=lambda columns: -(-n // columns) * columns)
    kernels = _kernels()
    with torch.cuda.device(a.device):
        error = kernels.grouped_product(
            kind, tile, a.data_ptr(), None if source is None else source.data_ptr(), b.data_ptr(),
            c.data_ptr(), ends.data_ptr(), rows, ends.shape[0], m, n, k,
            torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
    if error:
        raise HopperProductError(
            f"grouped_product of {tuple(a.shape)} and {tuple(b.shape)}: "
            f"{kernels.grouped_error(error).decode()}"
        )


@functools.cache
def _kernels() -> ctypes.CDLL:
    found = nvcc.library(_SOURCE, "sm_90a", "MEGACPP_BACKENDS=moe_experts=grouped_mm")
    found.grouped_error.restype = ctypes.c_char_p
    found.grouped_product.argtypes = (
        *(ctypes.c_int,) * 2, *(ctypes.c_void_p,) * 5, ctypes.c_int64, *(ctypes.c_int,) * 4,
        ctypes.c_void_p,
    )  # fmt: skip
    return found
